"""`python -m helpers.fork_server FD`: imports everything, and forks for every request on a socket.

What it forks runs `python -m vit_jax`, or a program that it is given; see `helpers.forked`, which
asks for it.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import json
import os
import pkgutil
import runpy
import signal
import socket
import sys

import vit_jax
from helpers.forked import UNDRAWN
from vit_jax.runtime import environment

# What commands import where they need it.
LATE = ('sklearn.datasets', 'optuna', 'matplotlib.backends.backend_agg')
LONGEST_REQUEST = 1 << 20


def import_everything() -> None:
    names = [module.name for module in pkgutil.walk_packages(vit_jax.__path__, 'vit_jax.')]
    for name in [*names, *LATE]:
        if not name.endswith('__main__'):
            with contextlib.suppress(ImportError):
                importlib.import_module(name)
    assert len(os.listdir('/proc/self/task')) == 1, 'a process with threads cannot be forked'
    gc.collect()
    gc.freeze()  # what is never looked at stays shared


def serve(connection: socket.socket) -> dict:
    """Forks for every request; returns it in the process that was forked."""
    while True:
        message, files, _, _ = socket.recv_fds(connection, LONGEST_REQUEST, 3)
        if not message:
            os._exit(0)
        request = json.loads(message)
        if (between := os.fork()) == 0:
            # Whose parent has ended belongs to the process that asked, which waits for it.
            if pid := os.fork():
                connection.send(str(pid).encode())
                os._exit(0)
            connection.close()
            become(request, files)
            return request
        os.waitpid(between, 0)
        connection.send(b'.')
        for file in files:
            os.close(file)


def become(request: dict, files: list[int]) -> None:
    """Takes over the environment, the folder and the files of who asked."""
    for number, file in enumerate(files):
        os.dup2(file, number)
        os.close(file)
    os.chdir(request['cwd'])
    os.environ.clear()
    os.environ.update(request['env'])
    # In force since this server started, so that the command need not start again for it.
    os.environ.setdefault(environment.MALLOC_VARIABLE, environment.MALLOC_TUNABLES)
    if UNDRAWN in os.environ:
        sys.modules['vit_jax.trainer.writer'].Writer.draw = lambda self: None
    sys.stdout.reconfigure(write_through='PYTHONUNBUFFERED' in os.environ)
    gc.enable()


if __name__ == '__main__':
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for pytest
    gc.disable()
    import_everything()
    request = serve(socket.socket(fileno=int(sys.argv[1])))
    signal.signal(signal.SIGINT, signal.default_int_handler)
    sys.argv[1:] = request['words']
    if request['code']:
        exec(compile(request['code'], '<string>', 'exec'), {'__name__': '__main__'})
    else:
        runpy.run_module('vit_jax', run_name='__main__', alter_sys=True)
