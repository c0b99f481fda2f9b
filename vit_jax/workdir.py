"""A run's folder: one owner at a time, atomic small files, an orderly stop when told to go."""

from __future__ import annotations

import contextlib
import datetime
import fcntl
import hashlib
import json
import logging
import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils

from vit_jax.errors import UserError

EXIT_PREEMPTED = 75  # EX_TEMPFAIL of sysexits.h: the same command, started again, continues
LOCK = 'lock'

_HEARTBEAT_SECONDS = 5.0
_SILENT_SECONDS = 20.0
_log = logging.getLogger(__name__)


class InUse(UserError):
    """Another run holds the folder."""


@contextlib.contextmanager
def lock(path: str | Path, silent_seconds: float = _SILENT_SECONDS) -> Iterator[None]:
    """Makes the folder if absent and keeps other runs out of it; process 0 holds the lock.

    The lock is an advisory one of the kernel's on `path/lock`, so it ends with its
    process however that dies. The file also names the owner, and its time stamp is
    renewed every few seconds: where a network file system does not carry locks
    between hosts, an owner on another host counts as dead once its time stamp has
    not moved for `silent_seconds`. No clocks are compared.

    Raises:
      InUse: if another run holds the folder.
      UserError: if it cannot be written.
    """
    with contextlib.ExitStack() as held:
        on_process_0(lambda: _hold(held, Path(path), silent_seconds))
        yield


def require_writable(path: str | Path) -> None:
    """Says whether a run could write to the folder, at once and without a trace.

    Raises:
      UserError: if the folder, or the nearest one above that exists, is not writable.
    """
    path = Path(path).absolute()
    existing = next(folder for folder in (path, *path.parents) if folder.exists())
    if not existing.is_dir():
        raise UserError(f'cannot write to the workdir {path}: {existing} is not a folder')
    if not os.access(existing, os.W_OK | os.X_OK):
        raise UserError(f'cannot write to the workdir {path}: {existing} is read-only')


def on_process_0(act: Callable[[], int]) -> int:
    """Runs `act` on process 0 alone and returns its result on every process.

    Raises:
      UserError: on every process if `act` raises it.
    """
    if not _distributed():
        return act()
    result, error = 0, None
    if jax.process_index() == 0:
        try:
            result = act()
        except UserError as mistake:
            error = mistake
    failed, result = multihost_utils.broadcast_one_to_all(np.array([bool(error), result], np.int32))
    if error:
        raise error
    if failed:
        raise UserError('process 0 has stopped; its own message says why')
    return int(result)


def _hold(held: contextlib.ExitStack, path: Path, silent_seconds: float) -> int:
    """Takes the lock until `held` is closed."""
    try:
        path.mkdir(parents=True, exist_ok=True)
        file = os.open(path / LOCK, os.O_RDWR | os.O_CREAT, 0o644)
        held.callback(os.close, file)
        _take(file, path, silent_seconds)
    except OSError as error:
        raise UserError(f'cannot write to the workdir {path}: {error.strerror}') from error
    held.callback(os.ftruncate, file, 0)
    stop = threading.Event()
    beat = threading.Thread(target=_heartbeat, args=(file, stop), daemon=True)
    beat.start()
    held.callback(beat.join)
    held.callback(stop.set)
    return 0


def _take(file: int, path: Path, silent_seconds: float) -> None:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        raise InUse(_in_use(path, _owner(file))) from error
    if _owner(file).get('host', socket.gethostname()) != socket.gethostname():
        _wait_for_silence(file, path, silent_seconds)
    record = {
        'host': socket.gethostname(),
        'pid': os.getpid(),
        'since': datetime.datetime.now().astimezone().isoformat(timespec='seconds'),
    }
    os.ftruncate(file, 0)
    os.pwrite(file, json.dumps(record).encode(), 0)


def _owner(file: int) -> dict[str, Any]:
    """The record in the lock file; empty after a run that ended in order."""
    try:
        owner = json.loads(os.pread(file, 4096, 0))
    except ValueError:
        return {}
    return owner if isinstance(owner, dict) else {}


def _in_use(path: Path, owner: dict[str, Any]) -> str:
    return (
        f'the workdir {path} is in use by another run: host {owner.get("host", "unknown")}, '
        f'pid {owner.get("pid", "unknown")}, since {owner.get("since", "unknown")}; '
        'wait for it, stop it, or choose another --workdir'
    )


def _wait_for_silence(file: int, path: Path, seconds: float) -> None:
    """Returns once the owner on another host has proved dead."""
    owner, seen = _owner(file), os.fstat(file).st_mtime_ns
    _log.warning('waiting %g s to see if the run of %s is alive', seconds, owner)
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        time.sleep(min(0.5, seconds))
        if os.fstat(file).st_mtime_ns != seen:
            raise InUse(_in_use(path, owner))


def _heartbeat(file: int, stop: threading.Event) -> None:
    while not stop.wait(_HEARTBEAT_SECONDS):
        with contextlib.suppress(OSError):
            os.utime(file)


class Preemption:
    """Turns SIGTERM and SIGINT into a flag that the loop reads between two steps.

    A context manager for the main thread. More SIGTERMs change nothing, also after its
    end, so that the save and the exit that they would interrupt are finished; a second
    SIGINT (Ctrl-C) stops at once.

    With several processes, a signal to any one of them makes all of them agree on
    one later step; SIGTERM is then left to `jax.distributed`, which watches for it.
    """

    def __init__(self) -> None:
        self._flag = False
        self._previous: dict[int, Any] = {}

    def __enter__(self) -> Preemption:
        watched = [signal.SIGINT] if _distributed() else [signal.SIGINT, signal.SIGTERM]
        self._previous = {number: signal.signal(number, self._receive) for number in watched}
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)
        if self._flag and not _distributed():
            signal.signal(signal.SIGTERM, signal.SIG_IGN)

    def reached(self, step: int) -> bool:
        """Whether to save after `step` and exit; all processes call it after every step."""
        if _distributed():
            return multihost_utils.reached_preemption_sync_point(step)
        return self._flag

    def _receive(self, number: int, frame: FrameType | None) -> None:
        if number == signal.SIGINT and self._flag:
            raise KeyboardInterrupt
        self._flag = True
        if _distributed():
            os.kill(os.getpid(), signal.SIGTERM)


def _distributed() -> bool:
    return jax.distributed.is_initialized()


def write_text_atomic(path: str | Path, text: str) -> None:
    """`write_bytes_atomic` of the text in UTF-8."""
    write_bytes_atomic(path, text.encode())


def write_bytes_atomic(path: str | Path, data: bytes) -> None:
    """Writes a file that appears whole or not at all, whatever interrupts the writing.

    Raises:
      OSError: if it cannot be written; no partial file is left.
    """
    path = Path(path)
    partial = path.with_name(f'.{path.name}.{os.getpid()}.partial')
    try:
        with partial.open('wb') as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)


def tree_digest(tree: Any) -> str:
    """The sha256 over path, dtype, shape and bytes of every leaf, whatever its sharding.

    Two states have the same digest only if they are bit-identical; every process of
    a run calls it and gets the same answer.
    """
    total = hashlib.sha256()
    for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
        array = _to_host(leaf)
        total.update(f'{jax.tree_util.keystr(path)} {array.dtype} {array.shape}\n'.encode())
        total.update(np.ascontiguousarray(array).tobytes())
    return total.hexdigest()


def _to_host(leaf: Any) -> np.ndarray:
    if isinstance(leaf, jax.Array) and jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        leaf = jax.random.key_data(leaf)
    if isinstance(leaf, jax.Array) and not leaf.is_fully_addressable:
        leaf = multihost_utils.process_allgather(leaf, tiled=True)
    return np.asarray(leaf)
