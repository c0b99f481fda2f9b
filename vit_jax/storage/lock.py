"""The lock of a run folder: it has one owner at a time."""

from __future__ import annotations

import contextlib
import datetime
import errno
import fcntl
import json
import logging
import os
import socket
import stat
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

from vit_jax.errors import UserError
from vit_jax.runtime.processes import on_process_0
from vit_jax.storage import lease, paths

LOCK = 'lock'

_HEARTBEAT_SECONDS = 5.0
_SILENT_SECONDS = 20.0
_log = logging.getLogger(__name__)


class InUse(UserError):
    """A folder is held by another run."""


class Taken(UserError):
    """A folder was taken over by another run while this one was at work in it."""


Check = Callable[[], None]  # raises Taken if the folder is no longer this run's


@contextlib.contextmanager
def lock(path: str | Path, silent_seconds: float = _SILENT_SECONDS) -> Iterator[Check]:
    """Make the folder if absent and keep other runs out of it; process 0 holds the lock.

    The lock is the kernel's advisory lock on `path/lock`, so it ends with its process however
    that dies. The file also names the owner, and its time stamp is renewed every few seconds:
    if a network file system does not share locks between hosts, an owner on another host counts
    as dead once its time stamp has not moved for `silent_seconds`. No clocks are compared. A
    deleted file is made again. In object storage the lock is a `lease`, for which every owner
    counts as one on another host.

    Yields:
      A check for process 0 to make before it writes there.

    Raises:
      InUse: if another run holds the folder.
      UserError: if it cannot be written.
    """
    with contextlib.ExitStack() as held:
        checks: list[Check] = []
        on_process_0(lambda: checks.append(_hold(held, paths.path(path), silent_seconds)))
        yield checks[0] if checks else lambda: None


@contextlib.contextmanager
def hold(path: str | Path) -> Iterator[None]:
    """Lock a folder as `lock` does, by this process alone, without the others of its job."""
    with contextlib.ExitStack() as held:
        _hold(held, paths.path(path), _SILENT_SECONDS)
        yield


def holder(path: str | Path) -> dict[str, Any] | None:
    """Owner of the folder, as `host`, `pid` and `since`; None if nobody holds it.

    For display: the lock is not touched, so that concurrent attempts to take it do not fail. An
    owner on this host lives if its process does; one on another host, if its time stamp is recent.
    """
    file = paths.path(path) / LOCK
    try:
        owner, renewed = paths.parse_json(paths.read_text(file) or ''), paths.modified(file)
    except (OSError, ValueError):
        return None
    if owner['host'] == socket.gethostname():
        return owner if _is_alive(owner['pid']) else None
    return owner if time.time() - renewed < _SILENT_SECONDS else None


def _is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except OSError as error:
        return isinstance(error, PermissionError)
    return True


def _hold(held: contextlib.ExitStack, path: Path, silent_seconds: float) -> Check:
    """Take the lock until `held` is closed."""
    if paths.is_remote(path):
        return _hold_lease(held, path, silent_seconds)
    try:
        paths.make_folder(path)
        kernels = _KernelLock(path, silent_seconds)
    except OSError as error:
        raise UserError(f'cannot write to the workdir {path}: {error.strerror}') from error
    held.callback(kernels.release)
    stop = threading.Event()
    beat = threading.Thread(target=_heartbeat, args=(kernels, stop), daemon=True)
    beat.start()
    held.callback(beat.join)
    held.callback(stop.set)
    return kernels.check


class _KernelLock:
    """The lock file of a local folder, held by this process until `release`.

    Raises:
      InUse: if another run holds it.
      UserError: if it is a link.
      OSError: if it cannot be written.
    """

    def __init__(self, path: Path, silent_seconds: float):
        self._path, self._silent_seconds = path, silent_seconds
        self._checking = threading.Lock()
        self._file = self._open(os.O_CREAT)

    def check(self) -> None:
        """Check that the folder is still held; a lock file that was deleted is made again.

        Raises:
          Taken: if another run has come in between.
          OSError: if the file cannot be made.
        """
        with self._checking:
            try:
                found = os.lstat(self._path / LOCK)
            except FileNotFoundError:
                self._make_again()
            else:
                if not os.path.samestat(os.fstat(self._file), found):
                    raise self._taken()

    def renew(self) -> None:
        """Show that the owner is alive, and raise as `check` does."""
        self.check()
        os.utime(self._file)

    def release(self) -> None:
        os.ftruncate(self._file, 0)
        os.close(self._file)

    def _open(self, flags: int) -> int:
        name = self._path / LOCK
        with contextlib.ExitStack() as opened:
            file = _open_no_link(name, flags)
            opened.callback(os.close, file)
            _take(file, self._path, self._silent_seconds)
            if not os.path.samestat(os.fstat(file), os.lstat(name)):
                raise InUse(f'the workdir {self._path} was in use until now: start again')
            opened.pop_all()
        return file

    def _make_again(self) -> None:
        try:
            file = self._open(os.O_CREAT | os.O_EXCL)
        except (FileExistsError, InUse) as error:
            raise self._taken() from error
        os.close(self._file)
        self._file = file

    def _taken(self) -> Taken:
        owner = holder(self._path) or {}
        return Taken(
            f'the workdir {self._path} was taken over by another run ({lease.describe(owner)}): '
            'this one ends, and writes nothing more there'
        )


def _open_no_link(name: Path, flags: int) -> int:
    """Open a file whose content will be replaced; refuse links and anything but a file."""
    try:
        file = os.open(name, os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK | flags, 0o644)
    except OSError as error:
        if error.errno != errno.ELOOP:
            raise
    else:
        found = os.fstat(file)
        if stat.S_ISREG(found.st_mode) and found.st_nlink == 1:
            return file
        os.close(file)
    raise UserError(f'{name} is a link, or no file, and would be overwritten: remove it')


def _hold_lease(held: contextlib.ExitStack, path: Path, silent_seconds: float) -> Check:
    with paths.reaching(path):
        store = lease.open_store(path)
        taken = lease.Lease(store, LOCK, _record(), silent_seconds, partial(_in_use, path))
    lease.keep(held, taken, path, _HEARTBEAT_SECONDS)
    return lambda: None


def _take(file: int, path: Path, silent_seconds: float) -> None:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        raise _in_use(path, _owner(file)) from error
    owner, seen = _owner(file), os.fstat(file).st_mtime_ns
    if owner.get('host', socket.gethostname()) != socket.gethostname():
        lease.wait_for_silence(
            owner,
            silent_seconds,
            lambda: os.fstat(file).st_mtime_ns != seen,
            partial(_in_use, path),
        )
    os.ftruncate(file, 0)
    os.pwrite(file, json.dumps(_record()).encode(), 0)


def _record() -> dict[str, Any]:
    """The record that describes this process."""
    return {
        'host': socket.gethostname(),
        'pid': os.getpid(),
        'since': datetime.datetime.now().astimezone().isoformat(timespec='seconds'),
    }


def _owner(file: int) -> dict[str, Any]:
    """The record in the lock file; empty after a run that ended in order."""
    return lease.owner_of(os.pread(file, 4096, 0))


def _in_use(path: Path, owner: dict[str, Any]) -> InUse:
    return InUse(
        f'the workdir {path} is in use by another run: {lease.describe(owner)}; '
        'wait for it, stop it, or choose another --workdir'
    )


def _heartbeat(kernels: _KernelLock, stop: threading.Event) -> None:
    while not stop.wait(_HEARTBEAT_SECONDS):
        with contextlib.suppress(OSError, Taken):  # raised by `check` before the next write
            kernels.renew()
