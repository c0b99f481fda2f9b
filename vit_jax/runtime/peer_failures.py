"""The end of a process whose job has lost another process: one line and exit code 1.

When another process is lost, JAX's own threads end this one by `abort`: a C++ stack and exit code
134, which does not distinguish a lost machine from a defect.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import signal
import sys
import threading
import time
from typing import Any, NoReturn

from vit_jax.errors import EXIT_FAILED, one_line

CONTINUES = 'the same command, started again on all processes, continues from the last checkpoint'
_ENOUGH = 10.0  # seconds for the main thread to finish ending the process, or for others to read
_LOOK_SECONDS = 1.0
_GRACE_SECONDS = 3.0  # for the main thread to end by itself, with what it has to clean up
_FOLDER = 'vit_jax/ended'


Reason = tuple[str, int]  # a line, and the exit code


class Board:
    """Reasons of processes that end early, in the coordinator's key-value store for all to read.

    A thread looks for those of others: whoever waits for them in a collective learns nothing else.

    Args:
      client: of the coordination service; connected.
      process: the number of this one.
      count: of all processes.
    """

    def __init__(self, client: Any, process: int, count: int):
        self._client, self._process, self._count = client, process, count
        self._found: Reason | None = None
        self._posted = False
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch, name='peer-failures', daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Look no more."""
        self._stop.set()
        if threading.current_thread() is not self._thread:
            self._thread.join(_ENOUGH)

    def post(self, reason: Reason) -> None:
        """Let all read the reason for which this process ends."""
        self._posted = True
        with contextlib.suppress(Exception):  # the coordinator may be gone
            key = f'{_FOLDER}/{self._process}'
            self._client.key_value_set(key, json.dumps(reason), allow_overwrite=True)

    def found(self, look: bool = True) -> Reason | None:
        """The reason of another process that has ended, or ends; None if there is none."""
        for key, text in self._entries() if look and not self._found else ():
            if key.rpartition('/')[2] != str(self._process):
                line, code = json.loads(text)
                self._found = line, code
                break
        return self._found

    def leave(self) -> None:
        """Let the job end: no other process waits for this one to read or to be read.

        Process 0 first waits for the others, since the store ends with it, and C++ complains.
        """
        if self._found and not self._posted:
            self.post(self._found)
        end = time.monotonic() + _ENOUGH
        while self._process == 0 and self._posted and time.monotonic() < end:
            if len(self._entries()) >= self._count:
                return
            time.sleep(0.1)

    def _entries(self) -> list[tuple[str, str]]:
        try:
            return self._client.key_value_dir_get(_FOLDER)
        except Exception:  # the coordinator is gone
            return []

    def _watch(self) -> None:
        while not self._stop.wait(_LOOK_SECONDS):
            if (reason := self.found()) is not None:
                if not self._stop.wait(_GRACE_SECONDS):
                    end(*reason)
                return


_board: Board | None = None


def watch(client: Any, process: int, count: int) -> None:
    """Look for failures of the other processes of the job, from now on."""
    global _board
    _board = Board(client, process, count)


def unwatch() -> None:
    """Look for them no more, as before an orderly exit."""
    if _board is not None:
        _board.close()


def reason() -> Reason | None:
    """Why another process has ended early, as the line and exit code of all; None if unknown."""
    return _board.found() if _board is not None else None


def post(line: str, code: int) -> None:
    """Let the other processes end with the same line and code."""
    if _board is not None:
        _board.post((one_line(line), code))


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
    with _one_end:  # is never left
        _ending = True
        with contextlib.suppress(OSError):
            sys.stdout.flush()
            sys.stderr.flush()
        _last_words(one_line(line) + '\n', code, linger)


def _linger(seconds: float) -> None:
    if _board is not None:
        _board.leave()
    time.sleep(seconds)


_who = 'this process'
_ending = False
_one_end = threading.Lock()


def _last_words(line: str, code: int, linger: float | None = None) -> NoReturn:
    # No buffers, no locks: a thread of C++ may be here in the middle of its end.
    with contextlib.suppress(OSError):
        stderr = os.dup(2)
        os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
        os.write(stderr, line.encode())
    if linger is not None:
        _linger(linger)
    os._exit(code)


def end_for_a_lost_peer(*_: Any) -> None:
    """Ends this process, from any thread, after another process of the job was lost."""
    if _ending:
        # The main thread is ending the process, with a better message.
        time.sleep(2 * _ENOUGH)
    unknown = f'error: {_who} lost another process, or failed as said above; {CONTINUES}'
    line, code = (_board and _board.found(look=False)) or (unknown, EXIT_FAILED)
    _last_words(line + '\n', code)


# Python's own handlers run in the main thread, later; this one runs in the thread that aborts.
_handler = ctypes.CFUNCTYPE(None, ctypes.c_int)(end_for_a_lost_peer)
