"""Whoever watches a run may leave: the reader of its words, or the terminal that it runs in."""

import fcntl
import os
import re
import subprocess
import sys
import termios

import pytest
from helpers.runs import started, steps
from helpers.xla import xla_flags

from vit_jax.errors import EXIT_PREEMPTED
from vit_jax.storage import run_folder

pytestmark = [pytest.mark.process, pytest.mark.slow]


def words(repo, folder, *flags):
    config = f'{repo}/experiments/vit/digits.py:smoke'
    return ['train', '--config', config, '--config.every.log=1', '--workdir', str(folder), *flags]


@pytest.mark.fault(50)
def test_a_reader_that_ends_does_not_end_the_run(repo, tmp_path):
    with started(repo, *words(repo, tmp_path)) as process:
        assert '17,418 parameters' in process.stdout.readline()
        process.stdout.close()
        assert process.wait(120) == 0
    assert run_folder.read_result(tmp_path).keys() == {'test/accuracy', 'test/loss'}
    assert [m['step'] for m in run_folder.read_metrics(tmp_path) if 'train/loss' in m] == [
        *range(1, 21)
    ]


@pytest.mark.fault(51)
def test_a_terminal_that_is_closed_saves_the_state(repo, tmp_path):
    screen, terminal = os.openpty()
    process = subprocess.Popen(
        [sys.executable, '-m', 'vit_jax', *words(repo, tmp_path, '--config.total=1000000')],
        cwd=repo,
        env={**os.environ, 'XLA_FLAGS': xla_flags(1)},
        stdin=terminal,
        stdout=terminal,
        stderr=terminal,
        start_new_session=True,
        preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0),
    )
    try:
        os.close(terminal)
        shown = b''
        while not re.search(rb'loss \d', shown):
            shown += os.read(screen, 4096)
        os.close(screen)
        assert process.wait(60) == EXIT_PREEMPTED
    finally:
        process.kill()
        process.wait()
    assert steps(tmp_path)[-1] == run_folder.read_metrics(tmp_path)[-1]['step']
