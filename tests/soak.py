"""Trains small runs for an hour under random faults, and compares them with uninterrupted ones.

    SOAK_MINUTES=60 SOAK_SEED=0 make soak

Each run is started again and again. Every time something happens to it, drawn from the seed: before
the start its newest step may be damaged or the clock set back, and while it trains it is killed,
killed in the middle of a save, told to stop, also while its data stall, its disk fills up, the
power is cut, or files of its folder are deleted or replaced; the folder's name is drawn too. Every
third run also changes the number of devices. Those that keep to one device have to end in the
state, the metrics and the result of the uninterrupted run bit for bit, also if the power is cut
right after they are complete; the others have to agree to rounding. Ends with a table of what was
survived.
"""

from __future__ import annotations

import collections
import contextlib
import fcntl
import logging
import os
import pathlib
import random
import re
import shutil
import signal
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator

TESTS = pathlib.Path(__file__).parent
sys.path[:0] = [str(TESTS), str(TESTS.parent)]
os.environ['JAX_PLATFORMS'] = 'cpu'
os.environ['TESTS_XLA'] = 'default'  # as users compile
os.environ['JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS'] = '0'
os.environ['JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES'] = '-1'

import numpy as np  # noqa: E402
from helpers.runs import digest, is_saving, metrics, steps  # noqa: E402
from helpers.xla import xla_flags  # noqa: E402

from vit_jax.checkpoints import manifest  # noqa: E402
from vit_jax.errors import EXIT_PREEMPTED  # noqa: E402

TOTAL = 200
FLAGS = {
    'total': f'{TOTAL} steps',
    'every.log': 1,
    'every.eval': 50,
    'every.checkpoint': 10,
    'checkpoint.keep_last': 4,
    'step.ema_decay': 0.9,
    'optim.lr': 1e-4,
    'data.cache': False,
}
DISK = 256 * 2**20  # bytes
SHUTDOWN = 0x8004587D  # EXT4_IOC_SHUTDOWN: from now on nothing reaches the disk
WITHOUT_FLUSHING = 2
STOPS_WITHIN = 60  # seconds, where the data stall
TOLERANCE = 1e-3  # relative, of every step's loss on other numbers of devices

NAMES = ['run', 'lr[1]', 'a*b?', '{a, b} #%20', '~', 'a\nb', 'x' * 200]

Running = subprocess.Popen


# --- what happens while it trains: to a process and its folder; returns the codes to end by ---


def kill(process: Running, folder: pathlib.Path) -> set[int]:
    process.kill()
    return {-signal.SIGKILL}


def kill_in_a_save(process: Running, folder: pathlib.Path) -> set[int]:
    while process.poll() is None and not is_saving(folder):
        time.sleep(0.0005)
    process.kill()
    return {-signal.SIGKILL}


def stop(process: Running, folder: pathlib.Path) -> set[int]:
    process.terminate()
    return {EXIT_PREEMPTED}


def hang_up(process: Running, folder: pathlib.Path) -> set[int]:
    process.send_signal(signal.SIGHUP)
    return {EXIT_PREEMPTED}


def stop_while_data_stall(process: Running, folder: pathlib.Path) -> set[int]:
    stall = folder.parents[1] / 'stall'  # see `helpers.stalling`
    stall.touch()
    time.sleep(random.uniform(0, 3))
    process.terminate()
    process.wait(timeout=STOPS_WITHIN)
    stall.unlink()
    return {EXIT_PREEMPTED}


def cut_the_power(process: Running, folder: pathlib.Path) -> set[int]:
    """Loses what was not synced, but no saved step. The newest may not count as saved yet."""
    time.sleep(random.uniform(0, 2))
    before = steps(folder)
    shut_down(folder.parent)
    process.kill()
    process.wait()
    mount_again(folder.parent)
    for step in before[:-1]:
        manifest.verify(folder / 'checkpoints' / str(step))
    return {-signal.SIGKILL, 1, 2}  # it may have met the disk before it was killed


def fill_the_disk(process: Running, folder: pathlib.Path) -> set[int]:
    """At a save that is one line and exit code 2; at the log the run stops and saves if it can."""
    ballast = folder.parent / 'ballast'
    with contextlib.suppress(OSError), ballast.open('wb', buffering=0) as file:
        while process.poll() is None:
            file.write(bytes(2**16))
    process.wait()
    ballast.unlink()
    return {2, EXIT_PREEMPTED}


def meddling(act: Callable[[pathlib.Path], object]) -> Callable[[Running, pathlib.Path], set[int]]:
    """Does something to the folder, and a while later tells the run to stop."""

    def meddle(process: Running, folder: pathlib.Path) -> set[int]:
        act(folder)
        time.sleep(random.uniform(0, 2))
        process.terminate()
        return {EXIT_PREEMPTED}

    return meddle


def delete_the_checkpoints(process: Running, folder: pathlib.Path) -> set[int]:
    """One line and exit code 2 if a save was under way, unless SIGTERM comes after it."""

    def delete(folder: pathlib.Path) -> None:
        with contextlib.suppress(FileNotFoundError):  # none was saved yet
            shutil.rmtree((folder / 'checkpoints').rename(folder.parent / 'deleted'))

    return meddling(delete)(process, folder) | {2, -signal.SIGTERM}


DURING = {
    'SIGKILL': kill,
    'SIGKILL in the middle of a save': kill_in_a_save,
    'SIGTERM': stop,
    'SIGTERM while data stall': stop_while_data_stall,
    'SIGHUP': hang_up,
    'disk full': fill_the_disk,
    'power cut': cut_the_power,
    'lock deleted': meddling(lambda folder: (folder / 'lock').unlink()),
    'metrics.jsonl deleted': meddling(lambda folder: (folder / 'metrics.jsonl').unlink()),
    'config.json replaced': meddling(lambda folder: (folder / 'config.json').write_text('{}')),
    'checkpoints deleted': delete_the_checkpoints,
}


# --- what happens before it starts: done to the folder of its newest step ---


def flip_a_bit(step: pathlib.Path) -> None:
    file = max(step.glob('*/**/d/*'), key=lambda path: path.stat().st_size)
    content = bytearray(file.read_bytes())
    content[random.randrange(len(content))] ^= 1 << random.randrange(8)
    file.write_bytes(content)


def remove_a_mark(step: pathlib.Path) -> None:
    (step / random.choice(['commit_success.txt', 'manifest.json'])).unlink()


def cut_off(step: pathlib.Path) -> None:
    files = [path for path in step.glob('*/**/*') if path.is_file() and path.stat().st_size]
    os.truncate(file := random.choice(files), file.stat().st_size // 2)


BEFORE = {'flipped bit': flip_a_bit, 'lost mark': remove_a_mark, 'truncated file': cut_off}


CLOCK = 'clock set back'


def set_the_clock_back(folder: pathlib.Path) -> None:
    """Leaves files of years to come, as if the clock had been wrong until now."""
    when = time.time() + random.uniform(0, 100 * 365 * 86400)
    for path in folder.rglob('*'):
        os.utime(path, (when, when), follow_symlinks=False)


# --- runs ---


def start(folder: pathlib.Path, devices: int, log: pathlib.Path) -> Running:
    place = folder.parents[1]
    config = f'{TESTS.parent}/experiments/vit/digits.py:smoke'
    values = {**FLAGS, 'data.source': f'helpers.stalling:{place}'}
    flags = [f'--config.{name}={value}' for name, value in values.items()]
    words = [sys.executable, '-u', '-m', 'vit_jax', 'train', '--config', config, *flags]
    with log.open('w') as output:
        return subprocess.Popen(
            [*words, '--workdir', str(folder)],
            cwd=TESTS.parent,
            env={**os.environ, 'XLA_FLAGS': xla_flags(devices), 'PYTHONPATH': str(TESTS)},
            stdout=output,
            stderr=subprocess.STDOUT,
        )


def wait_for(pattern: str, process: Running, log: pathlib.Path) -> None:
    while process.poll() is None and not re.search(pattern, log.read_text(), re.MULTILINE):
        time.sleep(0.01)


def finish(process: Running, log: pathlib.Path, codes: set[int]) -> int:
    """The code by which it ended, one of `codes` or 0.

    A signal may also end the process of a run that is already complete.
    """
    code = process.wait(timeout=300)
    if code in {-signal.SIGTERM, -signal.SIGHUP} and '\ncomplete: ' in log.read_text():
        return 0
    if code not in {0, *codes}:
        sys.exit(f'ended with {code} instead of {sorted(codes)}:\n{log.read_text()[-5000:]}')
    return code


def run_under_faults(
    folder: pathlib.Path, devices: Callable[[], int], survived: collections.Counter[str]
) -> None:
    """Starts a run until it is complete."""
    log = folder.parents[1] / 'log'
    while True:
        damaged = None
        if len(saved := steps(folder)) > 1 and random.random() < 0.4:
            damage = random.choice(list(BEFORE))
            damaged = saved[-1]
            BEFORE[damage](folder / 'checkpoints' / str(damaged))
        if saved and random.random() < 0.3:
            set_the_clock_back(folder)
            survived[CLOCK] += 1
        process = start(folder, devices(), log)
        wait_for('^starts in|^resumes after', process, log)
        if random.random() < 0.9:  # else while the first step compiles
            step = min(TOTAL - 10, max(saved, default=0) + random.randint(1, 80))
            wait_for(rf'^step {step}/', process, log)
        fault = random.choice(list(DURING))
        codes = DURING[fault](process, folder) if process.poll() is None else set()
        code = finish(process, log, codes)
        said = log.read_text()
        if damaged is not None:
            assert f'checkpoints/{damaged} ignored: ' in said, said
            survived[damage] += 1
        survived['other number of devices'] += 'so far on' in said
        if code == 0:
            return
        survived[fault] += 1


def losses(folder: pathlib.Path) -> np.ndarray:
    """The loss of every step, each of which is there once."""
    lines = [line for line in metrics(folder) if 'train/loss' in line]
    assert [line['step'] for line in lines] == list(range(1, TOTAL + 1))
    return np.array([line['train/loss'] for line in lines])


def evaluations(folder: pathlib.Path) -> list[dict]:
    return [line for line in metrics(folder) if 'test/loss' in line]


def require_same(folder: pathlib.Path, reference: pathlib.Path) -> None:
    assert digest(folder) == digest(reference), 'the states differ'
    np.testing.assert_array_equal(losses(folder), losses(reference))
    assert evaluations(folder) == evaluations(reference)
    assert (folder / 'result.json').read_text() == (reference / 'result.json').read_text()


def main() -> None:
    minutes, seed = float(os.environ.get('SOAK_MINUTES', 60)), int(os.environ.get('SOAK_SEED', 0))
    random.seed(seed)
    signal.signal(signal.SIGHUP, signal.SIG_DFL)  # which nohup has runs ignore
    logging.getLogger('absl').setLevel(logging.ERROR)  # Orbax misses files of its own managers
    deadline, survived = time.monotonic() + 60 * minutes, collections.Counter()
    runs, furthest = collections.Counter(), 0.0
    with tempfile.TemporaryDirectory() as name, disk(place := pathlib.Path(name)) as root:
        os.environ.setdefault('JAX_COMPILATION_CACHE_DIR', str(TESTS.parent / '.cache' / 'jax'))
        reference, log = place / 'reference' / 'run', place / 'log'
        reference.parent.mkdir()
        finish(start(reference, 1, log), log, set())
        while time.monotonic() < deadline:
            folder = root / random.choice(NAMES)
            changing = runs.total() % 3 == 1
            devices = (lambda: random.choice([1, 2, 4])) if changing else (lambda: 1)
            run_under_faults(folder, devices, survived)
            if 'power cut' in DURING:
                shut_down(root)
                mount_again(root)
                survived['power cut at the end'] += 1
            if changing:
                found, expected = losses(folder), losses(reference)
                furthest = max(furthest, float(np.max(np.abs(found / expected - 1))))
                assert furthest < TOLERANCE, f'losses differ by {furthest:.1e}'
            else:
                require_same(folder, reference)
            runs['changed' if changing else 'one device'] += 1
            shutil.rmtree(folder)
            print(f'run {runs.total()}: {survived.total()} faults survived', flush=True)
    print(f'\nseed {seed}, {minutes:g} minutes: {survived.total()} faults survived')
    for name in (*DURING, 'power cut at the end', *BEFORE, CLOCK, 'other number of devices'):
        print(f'  {name:32}{survived[name]:5}')
    print(f'  {"runs that ended bit for bit":32}{runs["one device"]:5}')
    print(f'  {"runs that changed devices":32}{runs["changed"]:5}, to {furthest:.1e} in the loss')


@contextlib.contextmanager
def disk(place: pathlib.Path) -> Iterator[pathlib.Path]:
    """A small ext4 of its own, which can fill up and lose its power, where mounting is allowed."""
    (folder := place / 'disk').mkdir()
    with (place / 'image').open('wb') as image:
        image.truncate(DISK)
    words = [['mkfs.ext4', '-q', '-m', '0', place / 'image'], ['mount', place / 'image', folder]]
    if any(subprocess.run(command, capture_output=True).returncode for command in words):
        del DURING['disk full'], DURING['power cut']
        print('mounting takes root: no disk will be full, and no power be cut', flush=True)
        yield folder
        return
    try:
        yield folder
    finally:
        subprocess.run(['umount', '-l', folder], check=True)


def shut_down(folder: pathlib.Path) -> None:
    """Keeps all writes from the disk from now on, as without power."""
    directory = os.open(folder, os.O_RDONLY)
    fcntl.ioctl(directory, SHUTDOWN, struct.pack('I', WITHOUT_FLUSHING))
    os.close(directory)


def mount_again(folder: pathlib.Path) -> None:
    deadline = time.monotonic() + 60
    while subprocess.run(['umount', folder], capture_output=True).returncode:
        assert time.monotonic() < deadline, 'a process that was killed still uses the disk'
        time.sleep(0.05)
    subprocess.run(['mount', folder.parent / 'image', folder], check=True)


if __name__ == '__main__':
    main()
