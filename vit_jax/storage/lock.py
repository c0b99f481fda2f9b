"""The lock of a run folder: it has one owner at a time."""

from __future__ import annotations

import contextlib
import datetime
import fcntl
import json
import logging
import os
import socket
import threading
import time
from collections.abc import Iterator
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


@contextlib.contextmanager
def lock(path: str | Path, silent_seconds: float = _SILENT_SECONDS) -> Iterator[None]:
    """Make the folder if absent and keep other runs out of it; process 0 holds the lock.

    The lock is an advisory one of the kernel's on `path/lock`, so it ends with its
    process however that dies. The file also names the owner, and its time stamp is
    renewed every few seconds: where a network file system does not carry locks
    between hosts, an owner on another host counts as dead once its time stamp has
    not moved for `silent_seconds`. No clocks are compared. In object storage the lock
    is a `lease`, for which every owner counts as one on another host.

    Raises:
      InUse: if another run holds the folder.
      UserError: if it cannot be written.
    """
    with contextlib.ExitStack() as held:
        on_process_0(lambda: _hold(held, paths.path(path), silent_seconds))
        yield


@contextlib.contextmanager
def hold(path: str | Path, silent_seconds: float = _SILENT_SECONDS) -> Iterator[None]:
    """Lock a folder as `lock` does, by this process alone: the others of its job are not asked."""
    with contextlib.ExitStack() as held:
        _hold(held, paths.path(path), silent_seconds)
        yield


def holder(path: str | Path) -> dict[str, Any] | None:
    """Owner of the folder, as `host`, `pid` and `since`; None if nobody holds it.

    For display: the lock is not touched, so that nobody who tries for it meanwhile fails. An
    owner on this host lives if its process does; one on another, if its time stamp is recent.
    """
    file = paths.path(path) / LOCK
    try:
        owner, renewed = json.loads(paths.read_text(file) or ''), paths.modified(file)
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


def _hold(held: contextlib.ExitStack, path: Path, silent_seconds: float) -> int:
    """Take the lock until `held` is closed."""
    if paths.is_remote(path):
        return _hold_lease(held, path, silent_seconds)
    try:
        path.mkdir(parents=True, exist_ok=True)
        file = os.open(path / LOCK, os.O_RDWR | os.O_CREAT, 0o644)
        held.callback(os.close, file)
        _take(file, path, silent_seconds)
        if not os.path.samestat(os.fstat(file), os.stat(path / LOCK)):
            raise InUse(f'the workdir {path} was in use until now: start again')
    except OSError as error:
        raise UserError(f'cannot write to the workdir {path}: {error.strerror}') from error
    held.callback(os.ftruncate, file, 0)
    stop = threading.Event()
    beat = threading.Thread(target=_heartbeat, args=(file, stop), daemon=True)
    beat.start()
    held.callback(beat.join)
    held.callback(stop.set)
    return 0


def _hold_lease(held: contextlib.ExitStack, path: Path, silent_seconds: float) -> int:
    with paths.reaching(path):
        store = lease.open_store(path)
        taken = lease.Lease(
            store, LOCK, _record(), silent_seconds, lambda owner: InUse(_in_use(path, owner))
        )
    lease.keep(held, taken, path, _HEARTBEAT_SECONDS)
    return 0


def _take(file: int, path: Path, silent_seconds: float) -> None:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        raise InUse(_in_use(path, _owner(file))) from error
    if _owner(file).get('host', socket.gethostname()) != socket.gethostname():
        _wait_for_silence(file, path, silent_seconds)
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
    try:
        owner = json.loads(os.pread(file, 4096, 0))
    except ValueError:
        return {}
    return owner if isinstance(owner, dict) else {}


def _in_use(path: Path, owner: dict[str, Any]) -> str:
    return (
        f'the workdir {path} is in use by another run: {lease.describe(owner)}; '
        'wait for it, stop it, or choose another --workdir'
    )


def _wait_for_silence(file: int, path: Path, seconds: float) -> None:
    """Wait until the owner on another host has proved dead."""
    owner, seen = _owner(file), os.fstat(file).st_mtime_ns
    _log.warning(
        'waiting %g s to see whether the run in %s is alive: %s',
        seconds,
        path,
        lease.describe(owner),
    )
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        time.sleep(min(0.5, seconds))
        if os.fstat(file).st_mtime_ns != seen:
            raise InUse(_in_use(path, owner))


def _heartbeat(file: int, stop: threading.Event) -> None:
    while not stop.wait(_HEARTBEAT_SECONDS):
        with contextlib.suppress(OSError):
            os.utime(file)
