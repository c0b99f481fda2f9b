"""Ctrl-C outside of a run's loop ends a command in one line; a child ends with its parent."""

from __future__ import annotations

import os
import pathlib
import select
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

process.remember_interrupts()
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

process.remember_interrupts()
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


def test_ctrl_c_is_reported_in_one_line(monkeypatch, capsys):
    error = KeyboardInterrupt('the same command continues')
    assert command_that_raises(monkeypatch, error) == EXIT_INTERRUPTED
    assert capsys.readouterr().err == 'interrupted: the same command continues\n'


def test_ctrl_c_that_an_import_turns_into_another_error_is_too(repo):
    done = run(repo, IMPORTS)
    assert (done.returncode, done.stderr) == (EXIT_INTERRUPTED, 'interrupted\n')


def test_other_errors_keep_their_traceback(monkeypatch):
    with pytest.raises(ImportError):
        command_that_raises(monkeypatch, ImportError('cannot load'))


def test_an_interrupt_that_python_drops_is_raised_again(repo):
    done = run(repo, DROPPED)
    assert (done.stdout, done.stderr) == ('interrupted\n', '')


@pytest.mark.process
@pytest.mark.skipif(not os.path.isdir('/proc/self'), reason='needs /proc')
def test_ctrl_c_while_a_command_imports(repo, tmp_path):
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


CHILD = """
import pathlib, sys, time
from vit_jax.runtime.process import end_with_parent
end_with_parent(pathlib.Path(sys.argv[1]).unlink)
print('ready', flush=True)
time.sleep(60)
"""
PARENT = """
import subprocess, sys
subprocess.Popen([sys.executable, '-c', *sys.argv[1:]], stdin=subprocess.PIPE).wait()
"""


@pytest.mark.parametrize('number', [signal.SIGTERM, signal.SIGKILL])
def test_a_child_cleans_up_and_ends_when_its_parent_is_killed(number, tmp_path):
    left = tmp_path / 'left'
    left.touch()
    reader, writer = os.pipe()
    words = [sys.executable, '-c', PARENT, CHILD, str(left)]
    parent = subprocess.Popen(words, stdout=writer)
    os.close(writer)
    # A pipe may give a line in pieces; the whole of it is read, and no more.
    with os.fdopen(reader, 'rb', buffering=0, closefd=False) as output:
        assert output.readline() == b'ready\n'
    assert left.exists()
    parent.send_signal(number)
    parent.wait()
    # The pipe ends when nobody is left who could write into it.
    assert select.select([reader], [], [], 20)[0]
    assert os.read(reader, 1) == b''
    os.close(reader)
    assert not left.exists()
