"""CPU time and memory of saving and restoring checkpoints, beside those of Orbax alone.

    python tests/bench/checkpoints.py --megabytes 100 500 2000 --rounds 5

A state of float32 matrices of 4 MB is saved to a local folder and restored into NumPy arrays: by
`vit_jax.checkpoints`, with a manifest, its verification and the syncs that survive a power cut, and
by Orbax alone, as it comes and without its compression, which `vit_jax.checkpoints` does not use.
They take turns in every round, in reversed order in every other one; each is a process of its own,
so that its high-water mark of memory is its own. CPU seconds are those of all threads, the lowest
of all rounds. In brackets, the first row in units of each.
"""

from __future__ import annotations

import argparse
import functools
import importlib.metadata
import json
import pathlib
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from typing import Any

SIDE = 1024  # of a matrix


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument('--megabytes', type=int, nargs='+', default=[100, 500])
    parser.add_argument('--rounds', type=int, default=5)
    parser.add_argument('--folder', help='where to save; a temporary folder by default')
    parser.add_argument('--one', nargs=2, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.one:
        side, size = args.one
        print(json.dumps(measure(SIDES[side], int(size), args.folder)))
        return
    print(environment())
    print('| MB | | save, CPU s | restore, CPU s | save, s | restore, s | memory, MB |')
    print('|---|---|---|---|---|---|---|')
    for size in args.megabytes:
        print_rows(size, args.rounds, args.folder)


def print_rows(size: int, rounds: int, folder: str | None) -> None:
    """Print the lowest of all rounds, as other work only adds to them, and ours over each."""
    found: dict[str, list[list[float]]] = {name: [] for name in SIDES}
    for number in range(rounds):
        for name in list(SIDES)[:: -1 if number % 2 else 1]:
            command = [sys.executable, __file__, '--one', name, str(size)]
            command += ['--folder', folder] if folder else []
            done = subprocess.run(command, check=True, capture_output=True, text=True)
            found[name].append(json.loads(done.stdout.splitlines()[-1]))
    lowest = {
        name: [min(column) for column in zip(*rows, strict=True)] for name, rows in found.items()
    }
    ours = next(iter(lowest.values()))
    for name, row in lowest.items():
        shown = [*(f'{sec:.3f}' for sec in row[:-1]), f'{row[-1]:.0f}']
        cells = [f'{x} ({ours[i] / row[i]:.2f})' for i, x in enumerate(shown)]
        print(f'| {size} | {name} | {" | ".join(cells)} |', flush=True)


def measure(side: Callable, size: int, folder: str | None) -> list[float]:
    """Save and restore once.

    Returns:
      CPU seconds of both, seconds of both, and the memory's high-water mark beyond that before the
      state was made, in MB.
    """
    import jax
    import numpy as np

    jax.config.update('jax_platforms', 'cpu')
    rng, before = np.random.default_rng(0), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    count = max(1, size * 10**6 // (4 * SIDE * SIDE))
    state = {f'layer_{i}': rng.normal(size=(SIDE, SIDE)).astype('float32') for i in range(count)}
    cpu, wall = [], []
    with tempfile.TemporaryDirectory(dir=folder) as root:
        for act in side(pathlib.Path(root).resolve(), jax.device_put(state)):
            begun = time.process_time(), time.perf_counter()
            act()
            cpu.append(time.process_time() - begun[0])
            wall.append(time.perf_counter() - begun[1])
    high = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return [*cpu, *wall, (high - before) / 1000]


def with_ours(root: pathlib.Path, state: Any) -> list[Callable[[], Any]]:
    import jax

    from vit_jax.checkpoints.checkpointer import Checkpointer

    checkpointer = Checkpointer(root / 'checkpoints')
    target = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), state
    )

    def save() -> None:
        checkpointer.save(1, {'params': state}, {})
        checkpointer.wait()

    return [save, lambda: checkpointer.restore_latest({'params': target})]


def with_orbax(
    root: pathlib.Path, state: Any, *, compressed: bool = True
) -> list[Callable[[], Any]]:
    import jax
    import orbax.checkpoint as ocp

    handler = ocp.PyTreeCheckpointHandler(use_compression=compressed)
    checkpointer = ocp.AsyncCheckpointer(handler)
    target = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), state
    )
    restore = ocp.args.PyTreeRestore(
        target, restore_args=ocp.checkpoint_utils.construct_restore_args(target)
    )

    def save() -> None:
        checkpointer.save(root / '1', args=ocp.args.PyTreeSave(state))
        checkpointer.wait_until_finished()

    return [save, lambda: checkpointer.restore(root / '1', args=restore)]


SIDES = {
    'vit_jax': with_ours,
    'Orbax': with_orbax,
    'Orbax, not compressed': functools.partial(with_orbax, compressed=False),
}


def environment() -> str:
    names = ('jax', 'orbax-checkpoint')
    packages = ', '.join(f'{name} {importlib.metadata.version(name)}' for name in names)
    lines = pathlib.Path('/proc/cpuinfo').read_text().splitlines()
    models = [line.partition(':')[2].strip() for line in lines if line.startswith('model name')]
    return f'{models[0] if models else "unknown CPU"}, Python {sys.version.split()[0]}, {packages}'


if __name__ == '__main__':
    main()
