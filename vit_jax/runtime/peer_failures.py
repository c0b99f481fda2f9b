"""The end of a process whose job has lost another process: one line and exit code 1.

When another process is lost, JAX's own threads end this one by `abort`: a C++ stack and exit code
134, which does not distinguish a lost machine from a defect.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import sys
import time
from collections.abc import Iterator
from functools import partial
from typing import Any, NoReturn

from vit_jax.errors import EXIT_FAILED, one_line

CONTINUES = 'the same command, started again on all processes, continues from the last checkpoint'
_ENOUGH = 10.0  # seconds for the main thread to finish ending the process


@contextlib.contextmanager
def detected() -> Iterator[None]:
    """Give the client of the coordination service that is created inside a callback for failures.

    JAX has no public option for it. The callback ends the process. If it cannot be called, since
    its status argument cannot be converted, as with jaxlib 0.10, the failure ends in an abort
    without a stack, see `end_in_order`.
    """
    try:
        from jax._src.distributed import _jax as made_by

        make = made_by.get_distributed_runtime_client
    except (ImportError, AttributeError):
        make = None
    if 'missed_heartbeat_callback' not in (getattr(make, '__doc__', None) or ''):
        yield
        return
    made_by.get_distributed_runtime_client = partial(make, missed_heartbeat_callback=_end)
    try:
        yield
    finally:
        made_by.get_distributed_runtime_client = make


def end_in_order(who: str) -> None:
    """Turn an abort of this process, from now on, into one line and exit code 1.

    Args:
      who: its name in the line, as 'process 1 of 2'.
    """
    global _who
    _who = who
    ctypes.CDLL(None).signal(signal.SIGABRT, _handler)


def end(line: str, code: int, linger: float = 0.0) -> NoReturn:
    """Ends this process; other threads can write nothing after the line.

    Args:
      line: for standard error.
      code: of the exit.
      linger: seconds between the line and the exit.
    """
    global _ending
    _ending = True
    with contextlib.suppress(OSError):
        sys.stdout.flush()
        sys.stderr.flush()
    _last_words(one_line(line) + '\n', code, linger)


_who = 'this process'
_ending = False


def _last_words(line: str, code: int, linger: float = 0.0) -> NoReturn:
    # No buffers, no locks: a thread of C++ may be here in the middle of its end.
    with contextlib.suppress(OSError):
        stderr = os.dup(2)
        os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
        os.write(stderr, line.encode())
    time.sleep(linger)
    os._exit(code)


def _end(*_: Any) -> None:
    if _ending:
        time.sleep(_ENOUGH)  # The main thread is ending the process, with a better message.
    line = f'error: {_who} lost another process, or failed as said above; {CONTINUES}\n'
    _last_words(line, EXIT_FAILED)


# Python's own handlers run in the main thread, later; this one runs in the thread that aborts.
_handler = ctypes.CFUNCTYPE(None, ctypes.c_int)(_end)
