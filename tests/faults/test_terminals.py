"""Whoever watches a run may leave or never come: readers of its words, the terminal it runs in."""

import os
import re
import subprocess
import sys

import pytest
from helpers import forked
from helpers.runs import linear, started, steps, undrawn  # noqa: F401
from helpers.xla import xla_flags

from vit_jax.__main__ import main
from vit_jax.errors import EXIT_PREEMPTED
from vit_jax.storage import run_folder

pytestmark = [pytest.mark.process, pytest.mark.slow]


def words(folder, *flags):
    return linear(folder, '--config.every.log=1', *flags)


@pytest.mark.fault(50)
def test_a_reader_that_ends_does_not_end_the_run(repo, tmp_path):
    with started(repo, *words(tmp_path)) as process:
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
        words(tmp_path, '--config.total=1000000'),
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


@pytest.mark.fault(70)
@pytest.mark.parametrize(
    'closed',
    [
        '<&- >&- 2>&-',
        pytest.param('>&-', marks=pytest.mark.long),
        pytest.param('2>&-', marks=pytest.mark.long),
    ],
)
def test_a_run_without_standard_streams_is_whole(repo, tmp_path, closed):
    flags = ['--config.total=1', '--config.every.eval=1', '--workdir', str(tmp_path / 'run')]
    start = [sys.executable, '-m', 'vit_jax', 'train', '--config', 'tests/helpers/linear.py']
    done = subprocess.run(
        ['sh', '-c', f'exec "$@" {closed}', 'sh', *start, *flags],
        cwd=repo,
        env={**os.environ, 'XLA_FLAGS': xla_flags(1), 'PYTHONPATH': f'{repo}:{repo}/tests'},
        capture_output=True,
        text=True,
    )
    assert (done.returncode, done.stderr) == (0, '')
    assert run_folder.steps(tmp_path / 'run') == [1]
    assert main(['inspect', '--verify', str(tmp_path / 'run')]) == 0


@pytest.mark.fault(70)
@pytest.mark.parametrize(
    ('closed', 'code', 'said'),
    [
        ('>&-', 0, ''),
        pytest.param('2>&-', 0, '', marks=pytest.mark.long),
        ('>/dev/full', 2, 'error: standard output cannot be written: No space left on device\n'),
        pytest.param('2>/dev/full >/dev/full', 2, '', marks=pytest.mark.long),
    ],
)
def test_a_command_without_standard_streams_ends_in_order(repo, closed, code, said):
    words = ['sh', '-c', f'exec "$@" {closed}', 'sh', sys.executable, '-m', 'vit_jax', 'list']
    done = subprocess.run(words, cwd=repo, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (code, said)


@pytest.mark.fault(70)
def test_a_reader_that_has_left_is_no_error(repo):
    words = [sys.executable, '-m', 'vit_jax', 'list']
    reader, writer = os.pipe()
    os.close(reader)
    done = subprocess.run(words, cwd=repo, stdout=writer, stderr=subprocess.PIPE)
    os.close(writer)
    assert (done.returncode, done.stderr) == (1, b'')
