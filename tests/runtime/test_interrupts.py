"""Ctrl-C outside of a run's loop ends a command in one line, whenever it comes."""

from __future__ import annotations

import os
import pathlib
import signal
import subprocess
import sys

import pytest
from helpers.runs import wait_until

from vit_jax.__main__ import main
from vit_jax.commands import compare
from vit_jax.errors import EXIT_INTERRUPTED

DROPPED = """
import os, signal, time
from vit_jax.runtime import process

class Dropped:
    def __del__(self):
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(1)  # until it was raised

process.watch()
try:
    Dropped()
    time.sleep(10)
except KeyboardInterrupt:
    print('interrupted')
"""


IMPORTS = """
import os, signal, sys
from vit_jax.__main__ import main
from vit_jax.commands import compare
from vit_jax.runtime import process

def load(argv):
    try:
        os.kill(os.getpid(), signal.SIGINT)
    except KeyboardInterrupt:
        raise ImportError('cannot load')

process.watch()
compare.main = load
sys.exit(main(['compare']))
"""


def run(repo, program):
    words = [sys.executable, '-c', program]
    return subprocess.run(words, cwd=repo, capture_output=True, text=True, timeout=20)


def command_that_raises(monkeypatch, error):
    def fail(argv):
        raise error

    monkeypatch.setattr(compare, 'main', fail)
    return main(['compare'])


def test_it_is_one_line(monkeypatch, capsys):
    error = KeyboardInterrupt('the same command continues')
    assert command_that_raises(monkeypatch, error) == EXIT_INTERRUPTED
    assert capsys.readouterr().err == 'interrupted: the same command continues\n'


def test_so_is_what_an_import_makes_of_it(repo):
    done = run(repo, IMPORTS)
    assert (done.returncode, done.stderr) == (EXIT_INTERRUPTED, 'interrupted\n')


def test_other_errors_keep_their_traceback(monkeypatch):
    with pytest.raises(ImportError):
        command_that_raises(monkeypatch, ImportError('cannot load'))


def test_one_that_python_drops_comes_again(repo):
    done = run(repo, DROPPED)
    assert (done.stdout, done.stderr) == ('interrupted\n', '')


@pytest.mark.process
@pytest.mark.skipif(not os.path.isdir('/proc/self'), reason='needs /proc')
def test_while_a_command_imports(repo, tmp_path):
    words = ['train', '--config', 'experiments/vit/digits.py:smoke', '--workdir', tmp_path / 'run']
    command = [sys.executable, '-m', 'vit_jax', *map(str, words)]  # not forked: it has to import
    pipes = {'stdout': subprocess.PIPE, 'stderr': subprocess.STDOUT, 'text': True}
    with subprocess.Popen(command, cwd=repo, **pipes) as process:
        maps = pathlib.Path(f'/proc/{process.pid}/maps')
        wait_until(lambda: 'jaxlib' in maps.read_text(), process)
        process.send_signal(signal.SIGINT)
        printed, _ = process.communicate(timeout=60)
    assert printed == 'interrupted\n'
    assert process.returncode == EXIT_INTERRUPTED
    assert not (tmp_path / 'run').exists()
