"""Signals to a run that waits for data which do not come."""

import os
import pathlib
import signal
import subprocess
import time

import pytest
from helpers import forked
from helpers.messages import mentions
from helpers.runs import (
    digest,
    linear,
    started,
    steps,
    undrawn,  # noqa: F401
    wait_until,
)

from vit_jax.errors import EXIT_INTERRUPTED, EXIT_PREEMPTED
from vit_jax.storage import run_folder

pytestmark = [pytest.mark.process, pytest.mark.slow]
SECONDS = 60  # to save and to end, on a busy machine; the data stall for longer


def words(data: pathlib.Path, folder: pathlib.Path, stalls: str) -> list[str]:
    values = {f'{stalls}.source': f'helpers.stalling:{data}', f'{stalls}.cache': False}
    return linear(folder, **values)


@pytest.mark.fault(116)
@pytest.mark.parametrize('stalls', ['data', pytest.param('evals.test', marks=pytest.mark.long)])
def test_a_run_whose_data_stall_saves_its_state_and_goes_on_bit_for_bit(
    repo, run_cli, tmp_path, stalls
):
    folder, whole = tmp_path / 'run', tmp_path / 'whole'
    (tmp_path / 'stall').touch()
    with started(repo, *words(tmp_path, folder, stalls)) as process:
        wait_until((tmp_path / 'stalled').exists, process)
        time.sleep(0.5)  # what is ready is used up
        process.send_signal(signal.SIGTERM)
        output, _ = process.communicate(timeout=SECONDS)
    assert process.returncode == EXIT_PREEMPTED, output
    assert mentions(output, 'state', 'saved')
    assert len(steps(folder)) == 1
    (tmp_path / 'stall').unlink()
    for place in (folder, whole):
        done = run_cli(*words(tmp_path, place, stalls))
        assert done.returncode == 0, done.stderr
    assert digest(folder) == digest(whole)
    assert run_folder.read_result(folder) == run_folder.read_result(whole)


HANGS = """
import os, signal, time
from vit_jax.runtime.preemption import Preemption
with Preemption():
    os.kill(os.getpid(), signal.SIGINT)
    os.kill(os.getpid(), signal.SIGTERM)
    while True:
        try:
            print('waits', flush=True)
            time.sleep(600)
        except KeyboardInterrupt:
            pass
"""


READS = """
import sys, time
from vit_jax.data import read_ahead
from vit_jax.runtime import process
read_ahead.CLOSE_SECONDS = process.READS_SECONDS = 0.5
make = lambda n: time.sleep(600) if n else n
batches = read_ahead.read_ahead(make, 0, 9, read_ahead.Loading(0, 2), None)
print(next(batches), flush=True)
del batches
process.exit_if_threads_hang(75)
sys.exit(75)
"""


@pytest.mark.fault(116)
def test_an_exit_does_not_wait_for_batches_that_nobody_takes(repo):
    pipes = {'stdout': subprocess.PIPE, 'stderr': subprocess.STDOUT, 'text': True}
    with forked.start([], os.environ, code=READS, cwd=repo, **pipes) as process:
        try:
            output, _ = process.communicate(timeout=SECONDS)
        finally:
            process.kill()
    assert (process.returncode, output) == (EXIT_PREEMPTED, '0\n')


@pytest.mark.fault(118)
def test_a_second_ctrl_c_ends_a_process_that_hangs(repo):
    pipes = {'stdout': subprocess.PIPE, 'stderr': subprocess.PIPE, 'text': True}
    with forked.start([], os.environ, code=HANGS, cwd=repo, **pipes) as process:
        assert process.stdout.readline() == 'waits\n'
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=SECONDS)
    assert process.returncode == EXIT_INTERRUPTED
    assert errors.splitlines()[-1].startswith('interrupted: ')
