"""Optuna's storages, made robust against a full disk and the restart of a server.

A journal reverts a failed write, and cuts off an incomplete last line that a kill has left. Calls
of a server are repeated until it answers.
"""

from __future__ import annotations

import functools
import json
import logging
import os
import re
import threading
import time
import types
from collections.abc import Callable
from typing import Any

import optuna
import sqlalchemy
from optuna.storages import RDBStorage
from optuna.storages.journal import JournalFileBackend, JournalFileSymlinkLock

from vit_jax.errors import Unavailable, causes
from vit_jax.storage import paths

PATIENCE_SECONDS = 180.0  # for a server that does not answer
PAUSE_SECONDS = 1.0  # between two tries
TORN = '.torn'  # ends the name of the file with the lines that were cut off

# Answers of servers and of SQLite that repeat until a person changes something.
_REFUSED = re.compile(
    'authentication failed|no password|access denied|permission denied|not permitted|pg_hba'
    '|does not exist|unknown database|unable to open|readonly|malformed|not a database',
    re.IGNORECASE,
)
_ERRORS = (optuna.exceptions.StorageInternalError, sqlalchemy.exc.SQLAlchemyError)
_DISK = re.compile('disk is full|disk I/O error', re.IGNORECASE)  # of SQLite

_log = logging.getLogger(__name__)
_calls = threading.local()  # `depth`: whether this thread is in a call that is repeated


def time_may_mend(error: BaseException) -> bool:
    """Return whether a database error may be temporary, such as a restart of its server."""
    return _REFUSED.search(str(error)) is None


def disk_reason(error: BaseException) -> str:
    """Return why a disk refuses to write a journal or SQLite file; empty for other errors."""
    if isinstance(error, OSError):
        return paths.reason(error)
    return next((paths.first_line(e) for e in causes(error) if _DISK.search(str(e))), '')


class Journal(JournalFileBackend):
    """Optuna's journal; a write that fails leaves the file as it was."""

    def __init__(self, path: str):
        self._path, self._mutex = path, JournalFileSymlinkLock(path)
        super().__init__(path, self._mutex)

    def append_logs(self, logs: list[dict[str, Any]]) -> None:
        """Append lines.

        Raises:
          OSError: if they cannot be written, and none of them is.
        """
        lines = [json.dumps(log, separators=(',', ':')) + '\n' for log in logs]
        self._mutex.acquire()
        try:
            self._cut_torn_line()
            size = os.path.getsize(self._path)
            try:
                with open(self._path, 'ab') as file:
                    file.write(''.join(lines).encode())
                    file.flush()
                    os.fsync(file.fileno())
            except OSError:
                os.truncate(self._path, size)
                raise
        finally:
            self._mutex.release()

    def _cut_torn_line(self) -> None:
        """Move an incomplete last line, which the next one would continue, to another file."""
        with open(self._path, 'rb+') as file:
            end = file.seek(0, os.SEEK_END)
            file.seek(max(end - 1, 0))
            if file.read(1) in (b'', b'\n'):
                return
            file.seek(0)
            start = sum(len(line) for line in file if line.endswith(b'\n'))
            file.seek(start)
            with open(f'{self._path}{TORN}', 'ab') as torn:
                torn.write(file.read() + b'\n')
            file.truncate(start)
        _log.warning('%s: cut off a torn last line, kept in %s%s', *[self._path] * 2, TORN)


class ServerStorage(RDBStorage):
    """Optuna's storage on an SQL server; calls are repeated while it does not answer.

    Raises:
      Unavailable: by any call, after `PATIENCE_SECONDS` without an answer.
    """


def _repeat_until_answer(method: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(method)
    def call(*args: Any, **options: Any) -> Any:
        if getattr(_calls, 'depth', 0):  # the outermost call begins a new session
            return method(*args, **options)
        _calls.depth, start_time, tries = 1, time.monotonic(), 0
        try:
            while True:
                try:
                    return method(*args, **options)
                except optuna.exceptions.UpdateFinishedTrialError:
                    if not tries:
                        raise
                    return True  # the answer to the previous try was lost
                except _ERRORS as e:
                    if (reason := _lost_connection(e)) is None:
                        raise
                    _wait(reason, start_time, is_first=not tries)
                    tries += 1
        finally:
            _calls.depth = 0

    return call


def _lost_connection(error: Exception) -> str | None:
    """Return why the server does not answer; None for other errors."""
    is_lost = (sqlalchemy.exc.OperationalError, sqlalchemy.exc.InterfaceError)
    for cause in causes(error):
        dropped = getattr(cause, 'connection_invalidated', False)
        if (isinstance(cause, is_lost) or dropped) and time_may_mend(cause):
            return paths.first_line(cause)
    return None


def _wait(reason: str, began: float, is_first: bool) -> None:
    seconds = time.monotonic() - began
    if seconds > PATIENCE_SECONDS:
        raise Unavailable(
            f"the study's storage has not answered for {seconds:.0f} s ({reason}): once its server "
            'does, start the same command again'
        )
    if is_first:
        _log.warning("the study's storage does not answer (%s): waiting for it", reason)
    time.sleep(PAUSE_SECONDS)


for _name, _method in vars(RDBStorage).items():
    if isinstance(_method, types.FunctionType) and not _name.startswith('__'):
        setattr(ServerStorage, _name, _repeat_until_answer(_method))
