"""Lock of a run folder, which has one owner at a time."""

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
import sys
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

from vit_jax.errors import UserError
from vit_jax.runtime import environment
from vit_jax.runtime.processes import on_process_0
from vit_jax.storage import paths

LOCK = 'lock'
EXIT_LOST = 2  # exit code after a takeover of the lease, same as for `Taken`

_HEARTBEAT_SECONDS = 5.0
_SILENT_SECONDS = 20.0
_PID_NAMESPACE = '/proc/self/ns/pid'
_WITHOUT_FLOCK = (errno.ENOSYS, errno.ENOTSUP, errno.ENOLCK, errno.EINVAL)
_PIDS = 2**31
_KINDS = {'host': str, 'pid': int, 'since': str, 'boot': str, 'started': int, 'token': str}

Check = Callable[[], None]  # raises Taken if the folder is no longer this run's
Record = dict[str, Any]  # description of the owner, see `_record`
Refused = Callable[[Record], Exception]

_log = logging.getLogger(__name__)


class InUse(UserError):
    """A folder is in use by another run."""


class Taken(UserError):
    """A folder was taken over by another run while in use by this one."""


@contextlib.contextmanager
def lock(path: str | Path, silent_seconds: float = _SILENT_SECONDS) -> Iterator[Check]:
    """Make the folder if necessary and keep other runs out of it; process 0 holds the lock.

    The lock is the kernel's advisory lock on `path/lock`, which is released when its process dies
    for any reason. The file names the owner, and its time stamp is renewed every few seconds. Some
    network file systems do not share locks between hosts, so an owner on another host, in another
    container or before a reboot counts as dead when its time stamp has not changed for
    `silent_seconds`. Its file is then replaced, so that it notices when it wakes up. No clocks are
    compared. A deleted file is written again. In object storage the lock is a `Lease`, and all
    owners count as being on another host.

    Yields:
      A check that process 0 calls before it writes to the folder.

    Raises:
      InUse: if another run holds the folder.
      UserError: if the folder is not writable.
    """
    with contextlib.ExitStack() as stack:
        checks: list[Check] = []
        on_process_0(lambda: checks.append(_hold(stack, paths.path(path), silent_seconds)))
        yield checks[0] if checks else lambda: None


@contextlib.contextmanager
def hold(path: str | Path) -> Iterator[None]:
    """Lock a folder like `lock`, but without the job's other processes."""
    with contextlib.ExitStack() as stack:
        _hold(stack, paths.path(path), _SILENT_SECONDS)
        yield


def is_held(path: str | Path) -> bool:
    """Return whether another process holds the folder, by trying to lock it."""
    try:
        with hold(path):
            return False
    except InUse:
        return True


def holder(path: str | Path) -> Record | None:
    """Return the owner of the folder, see `_record`; None if nobody holds it.

    This is for display: the lock is not touched, so concurrent attempts to take it do not fail. An
    owner on this host is alive if its process is, any other owner if its time stamp is recent.
    """
    file = paths.path(path) / LOCK
    try:
        text, renewed = paths.read_text(file, errors='replace'), paths.modification_time(file)
    except OSError:
        return None
    if not (owner := parse_owner((text or '').encode())).get('host'):
        return None
    if _is_here(owner):
        return owner if _is_alive(owner) else None
    return owner if time.time() - renewed < _SILENT_SECONDS else None


def _is_here(owner: Record) -> bool:
    """Return whether the owner runs on this kernel, in the same namespace of process ids."""
    record = _record()
    return all(owner.get(name, record[name]) == record[name] for name in ('host', 'boot'))


def _is_alive(owner: Record) -> bool:
    """Return whether the owner's process runs, and its id was not reused since."""
    try:
        os.kill(pid := owner.get('pid', _PIDS - 1), 0)
    except PermissionError:
        pass
    except OSError:
        return False
    recorded, actual = owner.get('started'), _start_time(pid)
    return not recorded or actual is None or actual == recorded


def _hold(stack: contextlib.ExitStack, path: Path, silent_seconds: float) -> Check:
    """Take the lock until `stack` is closed."""
    if paths.is_remote(path):
        return _hold_lease(stack, path, silent_seconds)
    try:
        paths.make_folder(path)
        kernels = _KernelLock(path, silent_seconds)
    except OSError as error:
        raise paths.WriteError(f'cannot write to the workdir {path}: {error.strerror}') from error
    stack.callback(kernels.release)

    def renew() -> None:
        with contextlib.suppress(OSError, Taken):  # `check` raises it before the next write
            kernels.renew()

    _repeat(stack, renew, _HEARTBEAT_SECONDS)
    return kernels.check


def _repeat(stack: contextlib.ExitStack, act: Callable[[], None], seconds: float) -> None:
    """Call `act` in a thread at this interval until `stack` is closed."""
    stop = threading.Event()

    def loop() -> None:
        while not stop.wait(seconds):
            act()

    thread = threading.Thread(target=loop, daemon=True)
    thread.start()
    stack.callback(thread.join)
    stack.callback(stop.set)


class _KernelLock:
    """Lock file of a local folder, held by this process until `release`.

    Raises:
      InUse: if another run holds the folder.
      UserError: if the file is a link.
      OSError: if the file cannot be written.
    """

    def __init__(self, path: Path, silent_seconds: float):
        self._path, self._silent_seconds = path, silent_seconds
        self._checking, self._record = threading.Lock(), _record()
        self._file = self._open(os.O_CREAT)

    def check(self) -> None:
        """Check that this run still holds the folder, and write a deleted lock file again.

        Raises:
          Taken: if another run has taken the folder.
          OSError: if the file cannot be written.
        """
        with self._checking:
            try:
                if not self._is_ours():
                    raise self._taken()
            except FileNotFoundError:
                self._make_again()

    def renew(self) -> None:
        """Show that the owner is alive; raise like `check`."""
        self.check()
        os.utime(self._file)

    def release(self) -> None:
        """Empty the file, unless another run has taken the folder."""
        with contextlib.suppress(OSError):
            if self._is_ours():
                os.ftruncate(self._file, 0)
        os.close(self._file)

    def _is_ours(self) -> bool:
        """Return whether the lock file is still the open one, without another owner's record.

        Opening it refreshes the cache of a network file system's client.
        """
        try:
            file = os.open(self._path / LOCK, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
        except OSError as error:
            if error.errno == errno.ELOOP:
                return False
            raise
        try:
            if not os.path.samestat(os.fstat(file), os.fstat(self._file)):
                return False
            owner = parse_owner(os.pread(file, 4096, 0))
        except OSError as error:
            if error.errno == errno.ESTALE:  # deleted on another host
                return False
            raise
        finally:
            os.close(file)
        return not owner or owner.get('token') == self._record['token']

    def _open(self, flags: int) -> int:
        name = self._path / LOCK
        with contextlib.ExitStack() as opened:
            file = _open_no_link(name, flags)
            opened.callback(os.close, file)
            owner = _lock_file(file, self._path, self._silent_seconds)
            if not os.path.samestat(os.fstat(file), os.lstat(name)):
                raise InUse(f'the workdir {self._path} was in use until now: start again')
            content = json.dumps(self._record).encode()
            if not _is_here(owner):
                return _replace(name, content)
            os.ftruncate(file, 0)
            os.pwrite(file, content, 0)
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
            f'the workdir {self._path} was taken over by another run ({describe_owner(owner)}): '
            'this one ends, and writes nothing more there'
        )


def _open_no_link(name: Path, flags: int) -> int:
    """Open a file to replace its content; refuse links and special files."""
    try:
        file = os.open(name, os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK | flags, 0o666)
    except OSError as error:
        if error.errno != errno.ELOOP:
            raise
    else:
        status = os.fstat(file)
        if stat.S_ISREG(status.st_mode) and status.st_nlink == 1:
            return file
        os.close(file)
    raise UserError(f'{name} is a link or a special file, and would be overwritten: remove it')


def _lock_file(file: int, path: Path, silent_seconds: float) -> Record:
    """Lock the file of a folder; return the record of its last owner, whose process has ended."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        raise _in_use(path, parse_owner(os.pread(file, 4096, 0))) from error
    except OSError as error:
        if error.errno in _WITHOUT_FLOCK:
            raise UserError(
                f'the workdir {path} is on a file system without flock ({error.strerror}): mount '
                'it with locks (Lustre: -o flock), or choose another --workdir'
            ) from error
        raise
    owner, renewed = parse_owner(os.pread(file, 4096, 0)), os.fstat(file).st_mtime_ns
    if not _is_here(owner):
        wait_for_silence(
            owner,
            silent_seconds,
            lambda: os.fstat(file).st_mtime_ns != renewed,
            partial(_in_use, path),
        )
    return owner


def _replace(name: Path, content: bytes) -> int:
    """Replace a lock file by a new one with this content; return it open and locked."""
    with contextlib.ExitStack() as opened:
        temporary = name.with_name(f'.{name.name}.{uuid.uuid4().hex}')
        file = os.open(temporary, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o666)
        opened.callback(os.close, file)
        opened.callback(temporary.unlink, missing_ok=True)
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        os.pwrite(file, content, 0)
        os.replace(temporary, name)
        opened.pop_all()
    return file


def _record() -> Record:
    """Describe this process.

    `boot` changes with every start of the machine and differs between containers, `started` differs
    between processes with the same id, and `token` between all owners.
    """
    namespace = ''
    with contextlib.suppress(OSError):
        namespace = os.readlink(_PID_NAMESPACE)
    return {
        'host': socket.gethostname(),
        'pid': os.getpid(),
        'since': datetime.datetime.now().astimezone().isoformat(timespec='seconds'),
        'boot': f'{environment.read_or_empty(environment.BOOT_ID).strip()} {namespace}'.strip(),
        'started': _start_time(os.getpid()) or 0,
        'token': uuid.uuid4().hex,
    }


def _start_time(pid: int) -> int | None:
    """Return when a process began, in ticks since the start of the machine; None if unknown."""
    content = environment.read_or_empty(Path(f'/proc/{pid}/stat'))
    fields = content.rpartition(')')[2].split()  # the name before it may have spaces
    return int(fields[19]) if len(fields) > 19 else None


def _in_use(path: Path, owner: Record) -> InUse:
    return InUse(
        f'the workdir {path} is in use by another run: {describe_owner(owner)}; '
        'wait for it, stop it, or choose another --workdir'
    )


def describe_owner(owner: Record) -> str:
    """Describe the owner of a folder for a message."""
    return ', '.join(f'{k} {owner.get(k, "unknown")}' for k in ('host', 'pid', 'since'))


def parse_owner(content: bytes | None) -> Record:
    """Parse the owner's record from a file or object; empty if no run has written it."""
    try:
        owner = paths.parse_json(content or b'')
    except ValueError:
        return {}
    if not isinstance(owner, dict):
        return {}
    is_valid = all(isinstance(owner.get(name, kind()), kind) for name, kind in _KINDS.items())
    return owner if is_valid and 0 <= owner.get('pid', 0) < _PIDS else {}


def wait_for_silence(
    owner: Record, seconds: float, is_renewed: Callable[[], bool], refused: Refused
) -> None:
    """Wait until an owner, possibly on another host, counts as dead.

    Args:
      owner: Record of the owner.
      seconds: Time without renewal after which it counts as dead.
      is_renewed: Function that returns whether it has renewed its lock.
      refused: Function from the owner's record to the exception to raise in that case.
    """
    _log.warning(
        'waiting %g s to see whether the run that held the lock is alive: %s',
        seconds,
        describe_owner(owner),
    )
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        time.sleep(min(0.5, seconds))
        if is_renewed():
            raise refused(owner)


def _hold_lease(stack: contextlib.ExitStack, path: Path, silent_seconds: float) -> Check:
    with paths.reaching(path):
        store = open_store(path)
        lease = Lease(store, LOCK, _record(), silent_seconds, partial(_in_use, path))
    keep_renewed(stack, lease, path, _HEARTBEAT_SECONDS)
    return lambda: None


def open_store(folder: Path) -> Any:
    """Open a remote folder with TensorStore, which supports conditional writes."""
    import tensorstore

    return tensorstore.KvStore.open(store_spec(folder)).result()


def store_spec(folder: Path) -> dict[str, Any]:
    """Return TensorStore's specification of a remote folder."""
    scheme, _, remaining = os.fspath(folder).partition('://')
    bucket, _, prefix = remaining.partition('/')
    driver = {'gs': 'gcs', 's3': 's3'}[scheme]
    spec: dict[str, Any] = {'driver': driver, 'bucket': bucket}
    spec['path'] = f'{prefix}/' if prefix else ''
    # TensorStore reads all environment variables for S3 except the endpoint's.
    endpoint = os.environ.get('AWS_ENDPOINT_URL_S3') or os.environ.get('AWS_ENDPOINT_URL')
    if scheme == 's3' and endpoint:
        spec |= {'endpoint': endpoint, 'aws_region': os.environ.get('AWS_REGION', 'us-east-1')}
    return spec


class Lease:
    """Object `name` in a store, held by this process until `release`.

    Args:
      store: Store from `open_store`.
      name: Name of the object.
      record: Description of the owner.
      silent_seconds: Time without renewal after which an owner counts as dead.
      refused: Function from the owner's record to the exception to raise if the owner is alive.
    """

    def __init__(
        self, store: Any, name: str, record: Record, silent_seconds: float, refused: Refused
    ):
        self._store, self._name = store, name
        self._record = {**record, 'token': uuid.uuid4().hex, 'beats': 0}
        before = store.read(name).result()
        if before.state == 'value':

            def is_renewed() -> bool:
                return store.read(name).result().stamp.generation != before.stamp.generation

            wait_for_silence(parse_owner(before.value), silent_seconds, is_renewed, refused)
        self._generation = before.stamp.generation
        if not self.renew():
            raise refused(parse_owner(store.read(name).result().value))

    def renew(self) -> bool:
        """Show that the owner is alive; return False if it has lost the object.

        A deleted object is written again, unless another owner is faster.
        """
        self._record['beats'] += 1
        if self._write(json.dumps(self._record).encode()):
            return True
        # A retry is refused if only the answer to a successful write was lost.
        current = self._store.read(self._name).result()
        if current.state == 'missing':
            self._generation = current.stamp.generation
            return self._write(json.dumps(self._record).encode())
        if parse_owner(current.value).get('token') != self._record['token']:
            return False
        self._generation = current.stamp.generation
        return True

    def release(self) -> None:
        """Delete the object if this process still holds it."""
        try:
            self._write(None)
        except (ValueError, OSError) as error:  # the run's files are already complete
            _log.warning('%r could not be deleted: %s', self._name, error)

    def _write(self, content: bytes | None) -> bool:
        stamp = self._store.write(self._name, content, if_equal=self._generation).result()
        if not stamp.generation:
            return False
        self._generation = stamp.generation
        return True


def keep_renewed(stack: contextlib.ExitStack, lease: Lease, folder: Path, seconds: float) -> None:
    """Renew the lease at this interval until `stack` is closed, which releases it.

    If the process was suspended until another run took over, it exits immediately, because both
    would write the same files.
    """

    def renew() -> None:
        with contextlib.suppress(ValueError, OSError):  # the network may recover
            if not lease.renew():
                print(f'error: another run has taken over {folder}', file=sys.stderr)
                os._exit(EXIT_LOST)

    stack.callback(lease.release)
    _repeat(stack, renew, seconds)
