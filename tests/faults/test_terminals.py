"""Whoever watches a run may leave: the reader of its words, or the terminal that it runs in."""

import os
import re

import pytest
from helpers import forked
from helpers.runs import started, steps, undrawn  # noqa: F401
from helpers.xla import xla_flags

from vit_jax.errors import EXIT_PREEMPTED
from vit_jax.storage import run_folder

pytestmark = [pytest.mark.process, pytest.mark.slow]


def words(repo, folder, *flags):
    config = f'{repo}/tests/helpers/linear.py'
    return ['train', '--config', config, '--config.every.log=1', '--workdir', str(folder), *flags]


@pytest.mark.fault(50)
def test_a_reader_that_ends_does_not_end_the_run(repo, tmp_path):
    with started(repo, *words(repo, tmp_path)) as process:
        assert '650 parameters' in process.stdout.readline()
        process.stdout.close()
        assert process.wait(120) == 0
    assert run_folder.read_result(tmp_path).keys() == {'test/accuracy', 'test/loss'}
    assert [m['step'] for m in run_folder.read_metrics(tmp_path) if 'train/loss' in m] == [
        *range(1, 21)
    ]


# Its standard input is the terminal that controls it, as in a shell.
IN_A_TERMINAL = """
import fcntl, os, sys, termios
from vit_jax.__main__ import main

os.setsid()
fcntl.ioctl(0, termios.TIOCSCTTY, 0)
sys.exit(main(sys.argv[1:]))
"""


@pytest.mark.fault(51)
def test_a_terminal_that_is_closed_saves_the_state(repo, tmp_path):
    screen, terminal = os.openpty()
    process = forked.start(
        words(repo, tmp_path, '--config.total=1000000'),
        {**os.environ, 'XLA_FLAGS': xla_flags(1)},
        code=IN_A_TERMINAL,
        cwd=repo,
        stdin=terminal,
        stdout=terminal,
        stderr=terminal,
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
