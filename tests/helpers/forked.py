"""Commands, and programs of tests, in processes of their own that need not import first.

Importing takes longer than all else that a command does in a test. Each is a process like any
other, with its own id, signals and exit code; only it was forked where it would have been started.
Tests of startup itself, or of other interpreter options, use `subprocess.Popen`.
"""

from __future__ import annotations

import atexit
import ctypes
import functools
import json
import os
import pathlib
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence

from vit_jax.runtime import environment

TESTS = pathlib.Path(__file__).parents[1]
UNDRAWN = (
    'TESTS_UNDRAWN'  # of the environment: runs draw no curves.png, which takes as long as they
)
_PR_SET_CHILD_SUBREAPER = 36
# Read when modules are imported, or by the interpreter when it starts.
_READ_EARLY = ('JAX_', 'PYTHON', 'LD_', 'MPL', 'OPENBLAS_')


def start(
    words: Sequence[object], env: Mapping[str, str], code: str = '', **options
) -> subprocess.Popen:
    """`python -m vit_jax *words`, or `python -c CODE *words`.

    Args:
      words: of the command.
      env: of the process.
      code: a program to run in place of `vit_jax`.
      **options: as for `subprocess.Popen`.
    """
    what = ['-c', code] if code else ['-m', 'vit_jax']
    command = [sys.executable, *what, *map(str, words)]
    if sys.platform == 'linux' and _early(env) == _early(os.environ):
        return _Forked(command, env=dict(env), **options)
    return _Started(command, env={**env, 'PYTHONPATH': _with_tests(env)}, **options)


def _with_tests(env: Mapping[str, str]) -> str:
    """The path of modules with these helpers, which configs of tests name."""
    return os.pathsep.join(filter(None, [env.get('PYTHONPATH'), str(TESTS)]))


def _early(env: Mapping[str, str]) -> dict[str, str]:
    found = {k: v for k, v in env.items() if k.startswith(_READ_EARLY)}
    found.pop('PYTHONUNBUFFERED', None)
    return found


_Started = subprocess.Popen


class _Forked(subprocess.Popen):
    """All of `Popen` but how the process begins."""

    def _execute_child(self, words, *rest) -> None:
        cwd, env = rest[4], rest[5]
        pipes = rest[9:15]
        theirs = [pipes[0], pipes[3], pipes[5]]
        code = words[2] if words[1] == '-c' else ''
        request = {'words': words[3:], 'code': code, 'env': env, 'cwd': str(cwd or os.getcwd())}
        files = [mine if file == -1 else file for mine, file in enumerate(theirs)]
        try:
            self.pid = _fork(json.dumps(request).encode(), files)
            self._child_created = True
        finally:
            self._close_pipe_fds(*pipes)


def _fork(request: bytes, files: list[int]) -> int:
    """The id of a process that was forked and is now a child of this one."""
    prctl = ctypes.CDLL(None).prctl
    prctl(_PR_SET_CHILD_SUBREAPER, 1)  # takes over the orphan that the server makes
    try:
        socket.send_fds(_server(), [request], files)
        answer = b''
        while not answer.endswith(b'.'):
            answer += (got := _server().recv(64))
            assert got, 'the fork server has ended'
    finally:
        prctl(_PR_SET_CHILD_SUBREAPER, 0)
    return int(answer[:-1])


@functools.cache
def _server() -> socket.socket:
    """A connection to the server of this process, which it starts."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
    path = {'PYTHONPATH': _with_tests(os.environ)}
    env = {environment.MALLOC_VARIABLE: environment.MALLOC_TUNABLES, **os.environ, **path}
    words = [sys.executable, '-m', 'helpers.fork_server', str(theirs.fileno())]
    process = subprocess.Popen(words, cwd=TESTS.parent, env=env, pass_fds=[theirs.fileno()])
    theirs.close()
    atexit.register(process.wait)
    atexit.register(ours.close)
    return ours
