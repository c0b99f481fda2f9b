"""Images a second of the input pipeline on 1 and 2 cores, by threads and by processes.

    python tests/bench/input_cores.py FOLDER --rounds 3 [--py-spy ~/spy/bin/py-spy]

FOLDER holds JPEG files. Every row has a process of its own, bound to its cores; the rows take
turns, in reversed order in every other round. `CPUs` are CPU seconds by seconds: fewer than the
row's cores if the machine is busy or threads wait for each other. `images/CPU s` hardly changes
with other load. With py-spy, the share of time in which a thread holds Python's lock (GIL) is
sampled, and the functions that hold it.
"""

from __future__ import annotations

import argparse
import atexit
import collections
import json
import os
import pathlib
import shutil
import statistics
import subprocess
import sys
import tempfile
import time

import psutil
from input import TRANSFORMS, cpu

# Name: cores, threads of each process, reading processes.
ROWS = {
    '1 core, 1 thread': (1, 1, 0),
    '1 core, 1 process': (1, 1, 1),
    '2 cores, 2 threads': (2, 2, 0),
    '2 cores, 2 processes': (2, 1, 2),
    '2 cores, 1 process of 2 threads': (2, 2, 1),
}
BATCH = 25
SAMPLED = 10  # seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument('folder', type=pathlib.Path)
    parser.add_argument('--rounds', type=int, default=3)
    parser.add_argument('--task', choices=TRANSFORMS, default='recipe')
    parser.add_argument('--batches', type=int, default=30)
    parser.add_argument('--py-spy', metavar='PROGRAM')
    parser.add_argument('--serve', choices=ROWS, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.serve:
        return print(json.dumps(serve(args)))
    found: dict[str, list[dict]] = {name: [] for name in ROWS}
    for number in range(args.rounds):
        for name in list(ROWS)[:: -1 if number % 2 else 1]:
            found[name].append(ask(args, name))
    print_table(args, found)


def ask(args: argparse.Namespace, name: str) -> dict:
    root = pathlib.Path(__file__).resolve().parents[2]
    words = [str(args.folder.resolve()), '--serve', name, '--task', args.task]
    words += ['--batches', str(args.batches)]
    words += ['--py-spy', args.py_spy] if args.py_spy else []
    environment = os.environ | {'PYTHONPATH': str(root)}
    command = [sys.executable, __file__, *words]
    done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, check=True)
    return json.loads(done.stdout.splitlines()[-1])


def print_table(args: argparse.Namespace, found: dict[str, list[dict]]) -> None:
    load = ', '.join(f'{x:.0f}' for x in os.getloadavg())
    print(f'{args.task} on {cpu()}, load {load}; medians, images/s also the most\n')
    print('| | images/s (most) | CPUs | images/CPU s | PSS of a worker, MB | GIL held |')
    print('|---|---|---|---|---|---|')
    for name, rows in found.items():
        rate, cpus, per_cpu, pss, gil = (
            statistics.median(row[key] for row in rows)
            for key in ('per_sec', 'cpus', 'per_cpu_sec', 'pss', 'gil')
        )
        most = max(row['per_sec'] for row in rows)
        cells = [f'{rate:.0f} ({most:.0f})', f'{cpus:.2f}', f'{per_cpu:.0f}']
        cells += [f'{pss / 1e6:.0f}' if pss else '', f'{gil:.0%}' if args.py_spy else '']
        print(f'| {name} | {" | ".join(cells)} |')
    if args.py_spy:
        held: collections.Counter[str] = collections.Counter()
        for row in found['2 cores, 2 threads']:
            held.update(row['held'])
        total = max(sum(held.values()), 1)
        shares = [f'{name} {n / total:.0%}' for name, n in held.most_common(12)]
        print(f'\nof 2 threads the lock is held in: {", ".join(shares)}')


def serve(args: argparse.Namespace) -> dict:
    """The measurements of a row, in this process."""
    from vit_jax.config.run import Data
    from vit_jax.data.dataset import open_dataset

    count, threads, workers = ROWS[args.serve]
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:count])
    classes = pathlib.Path(tempfile.mkdtemp())  # the source wants a folder for every class
    atexit.register(shutil.rmtree, classes)
    (classes / 'all').symlink_to(args.folder)
    data = open_dataset(
        Data(
            source=f'folder:{classes}',
            split='train',
            transforms=TRANSFORMS[args.task],
            threads=threads,
            workers=workers,
        ),
        BATCH,
    )
    batches = data.train_batches()
    for _ in range(2 * max(1, workers) * threads + 1):
        next(batches)
    began, spent = time.perf_counter(), cpu_seconds()
    for _ in range(args.batches):
        next(batches)
    seconds, spent = time.perf_counter() - began, cpu_seconds() - spent
    sizes = [child.memory_full_info().pss for child in readers()]
    images = args.batches * BATCH
    gil, held = sampled(args, batches) if args.py_spy and not workers else (0.0, {})
    batches.close()
    return {
        'per_sec': images / seconds,
        'cpus': spent / seconds,
        'per_cpu_sec': images / spent,
        'pss': statistics.mean(sizes) if sizes else 0,
        'gil': gil,
        'held': held,
    }


def readers() -> list[psutil.Process]:
    """The reading processes."""
    children = psutil.Process().children()
    return [c for c in children if 'spawn_main' in ' '.join(c.cmdline())]


def cpu_seconds() -> float:
    """CPU time of this process and its readers."""
    times = [process.cpu_times() for process in (psutil.Process(), *readers())]
    return sum(t.user + t.system for t in times)


def sampled(args: argparse.Namespace, batches) -> tuple[float, dict[str, int]]:
    """The share of time in which a thread holds the lock, and the functions that hold it."""
    rate = 100
    with tempfile.TemporaryDirectory() as folder:
        out = pathlib.Path(folder, 'raw')
        words = ['record', '--gil', '--format', 'raw', '--rate', str(rate), '--nonblocking']
        words += ['--duration', str(SAMPLED), '--output', str(out), '--pid', str(os.getpid())]
        with subprocess.Popen([args.py_spy, *words], stdout=2, stderr=subprocess.DEVNULL) as spy:
            while spy.poll() is None:
                next(batches)
        held: collections.Counter[str] = collections.Counter()
        for line in out.read_text().splitlines() if out.exists() else []:
            stack, _, number = line.rpartition(' ')
            held[stack.rpartition(';')[2].partition(':')[0]] += int(number)
    return sum(held.values()) / (rate * SAMPLED), dict(held)


if __name__ == '__main__':
    main()
