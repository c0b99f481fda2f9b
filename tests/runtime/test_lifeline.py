"""A process that ends with its parent."""

import os
import select
import signal
import subprocess
import sys

import pytest

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
