"""Paths on a disk, or in object storage: `gs://BUCKET/...` and `s3://BUCKET/...`.

A local path is a `pathlib.Path`, a remote one an `etils.epath.Path` with the same methods over
fsspec. An object appears completely or not at all, but cannot be renamed or appended to, and a
folder is only a prefix of names.

epath is not used for local paths: its glob treats `[*?` in the folder's name as a pattern, its stat
needs an entry in the password file and rounds to seconds, and its listing hides names that end in
`~`.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import io
import json
import os
import pathlib
import re
import secrets
import shutil
import stat
import tempfile
import uuid
from collections.abc import Iterator
from typing import IO, TYPE_CHECKING, Any

from vit_jax import extras
from vit_jax.errors import Unavailable, UnsuitableFile, UserError
from vit_jax.storage import servers

# The type checker treats both kinds as `pathlib.Path`; at run time only local paths are.
if TYPE_CHECKING:
    Path = pathlib.Path
else:
    Path = pathlib.PurePath

_REMOTE = ('gs', 's3')
# Size limits in bytes; larger files are damaged or malicious.
SMALL = 2**26  # configs, vocabularies, names, manifests
IMAGE = 2**28
LOG = 2**32
TABLE = 2**33  # annotations of data sets
TEXT = 2**36
_MAX_DEPTH, _MAX_DIGITS = 60, 30  # levels of JSON, digits of an integer
_MAX_NAME = 255  # most bytes of a name on common file systems
# Errors of file systems whose server does not answer.
_PASSING = (errno.ESTALE, errno.EIO, errno.ETIMEDOUT, errno.EHOSTDOWN, errno.ENETUNREACH)
# TensorStore reads `\` as `/`, and Orbax's paths `/gs/` as gs://.
_MISREAD = re.compile(r'[^/]*\\[^/]*|/gs:(?=/|$)|^/(gs|s3|az|hf)(?=/|$)')
_KINDS = {
    stat.S_IFIFO: 'a FIFO',
    stat.S_IFSOCK: 'a socket',
    stat.S_IFCHR: 'a device',
    stat.S_IFBLK: 'a device',
}


def path(text: str | os.PathLike[str]) -> Path:
    """Return the path of a folder or file.

    Raises:
      UserError: if the name is empty, too long, not in UTF-8 or has the `~` of an unknown user, or
        if the package for a remote path is missing.
    """
    name = os.fspath(text)
    if not name:
        raise UserError("'' is not the name of a folder or file; for the working directory write .")
    require_utf8(name)
    if (scheme := _scheme(name)) is None:
        return local(name)
    if not extras.is_installed(extra := extras.SCHEMES[scheme]):
        raise extras.missing_error(f'{name}: {scheme}://', extra)
    if not name.removeprefix(f'{scheme}://').strip('/'):
        raise UserError(f'{name}: write {scheme}://BUCKET/FOLDER')
    # Workers and TensorStore write to the same folders, so cached listings become stale.
    # Both settings are read when the first file system is created.
    import fsspec

    for protocol in ('gs', 'gcs', 's3'):
        fsspec.config.conf.setdefault(protocol, {}).setdefault('use_listings_cache', False)
    os.environ.setdefault('EPATH_USE_TF', 'false')
    servers.quiet_gcsfs()
    from etils import epath

    return epath.Path(name)


def local(name: str) -> pathlib.Path:
    """Return the local path of a name, with `~` expanded.

    Raises:
      UserError: if a part of it is too long, or for the `~` of an unknown user.
    """
    if longest := max((p for p in name.split('/') if len(p.encode()) > _MAX_NAME), default=''):
        raise UserError(f'{longest[:40]}...: a name of more than {_MAX_NAME} bytes; shorten it')
    try:
        return pathlib.Path(name).expanduser()
    except RuntimeError as error:
        home = name.partition('/')[0]
        raise UserError(f'{name}: there is no home {home}; write ./{name} for that name') from error


def require_utf8(name: str) -> None:
    """Raise UserError unless Python decodes the name as UTF-8, like other libraries."""
    try:
        name.encode()
        return
    except UnicodeEncodeError:
        pass
    try:
        os.fsencode(name).decode()
    except UnicodeError as error:
        raise UserError(
            f'{name!a} is not UTF-8, but perhaps Latin-1: rename it, for example with convmv'
        ) from error
    raise UserError(
        f'{name!a} is not read as UTF-8: set PYTHONUTF8=1 or a UTF-8 locale, or rename it'
    )


def absolute(text: str | os.PathLike[str]) -> Path:
    """Return the path of a folder or file; a local one is made absolute.

    Raises:
      UserError: see `path`; also if TensorStore or epath would misread it.
    """
    target = path(text)
    if is_remote(target):
        return target
    target = target.resolve()
    require_storable(str(target))
    return target


def require_storable(name: str) -> None:
    """Raise UserError if TensorStore or epath would misread the absolute path."""
    require_utf8(name)
    if misread := _MISREAD.search(name):
        raise UserError(
            f'{name}: arrays cannot be stored below a folder named {misread[0].strip("/")!r}; '
            'choose another name'
        )


def is_remote(path: str | os.PathLike[str]) -> bool:
    """Return whether the path is in object storage."""
    return _scheme(os.fspath(path)) is not None


def orbax_writes(path: str | os.PathLike[str]) -> bool:
    """Return whether Orbax can write arrays to the path: a local one, or gs://."""
    return _scheme(os.fspath(path)) in (None, 'gs')


def _scheme(name: str) -> str | None:
    scheme = name.partition('://')[0]
    return scheme if scheme in _REMOTE and '://' in name else None


@contextlib.contextmanager
def reaching(path: os.PathLike[str]) -> Iterator[None]:
    """Turn any error of an object storage library into a one-line error.

    Raises:
      Unreachable: if no server answers, or the connection is interrupted.
      UserError: for another error in the block if the path is remote.
    """
    if scheme := _scheme(os.fspath(path)):
        servers.require_answer(scheme)
    try:
        yield
    except Exception as error:
        if isinstance(error, UserError) or not is_remote(path):
            raise
        if servers.is_network_error(error):
            raise servers.Unreachable(
                f'{os.fspath(path)}: the connection to its server broke off ({first_line(error)}): '
                'start the same command again'
            ) from error
        raise UserError(
            f'{os.fspath(path)} cannot be reached ({first_line(error)}): check the name of the '
            'bucket, the credentials and what they permit'
        ) from error


def first_line(error: BaseException) -> str:
    """Return the first line of an error's message, else the name of its class."""
    lines = str(error).strip().splitlines()
    return lines[0][:200] if lines else type(error).__name__


class WriteError(UserError):
    """A disk refuses to write, usually because it is full."""


@contextlib.contextmanager
def writing(folder: os.PathLike[str]) -> Iterator[None]:
    """Turn a disk error, such as a full disk, into a one-line error.

    Raises:
      Unavailable: for an OSError in the block, if the server of the file system does not answer.
      WriteError: for another OSError.
    """
    try:
        yield
    except OSError as error:
        raise (Unavailable if error.errno in _PASSING else WriteError)(
            f'cannot write to {os.fspath(folder)}: {error.strerror or error}; once that is fixed, '
            'the same command continues'
        ) from error


def obstacle(folder: str | os.PathLike[str]) -> str:
    """Return why a folder, which need not exist, is not writable; empty if it is writable.

    Raises:
      UserError: if object storage cannot be reached or written to.
    """
    target = absolute(folder)
    if is_remote(target):
        probe = target / f'.probe-{uuid.uuid4().hex}'
        with reaching(target):
            probe.write_bytes(b'')
            probe.unlink()
        return ''
    existing = next(parent for parent in (target, *target.parents) if parent.exists())
    if not existing.is_dir():
        return f'{existing} is not a folder'
    return '' if os.access(existing, os.W_OK | os.X_OK) else f'{existing} is read-only'


def open_file(
    path: str | os.PathLike[str], most: int | None = None, buffering: int = -1
) -> io.BufferedReader | io.FileIO:
    """Open a file named by a user, a data set or a run for reading, without blocking.

    Args:
      path: Path of a regular file, or of a link to one.
      most: Maximal size in bytes.
      buffering: See `open`; 0 reads a local file in a single call, a third faster.

    Raises:
      UnsuitableFile: for a FIFO, socket or device, which may be endless, or for a larger file.
      OSError: if the file cannot be opened.
    """
    if is_remote(path):
        remote: Any = path
        return remote.open('rb')
    name = os.fspath(path)
    _require_fit(os.stat(name), name, most)  # opening some devices has effects
    file = os.open(name, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        _require_fit(os.fstat(file), name, most)
        opened: Any = os.fdopen(file, 'rb', buffering)
        return opened
    except BaseException:
        os.close(file)
        raise


def _require_fit(status: os.stat_result, name: str, most: int | None) -> None:
    kind = stat.S_IFMT(status.st_mode)
    if kind == stat.S_IFDIR:
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), name)
    if kind != stat.S_IFREG:
        found_kind = _KINDS.get(kind, 'no file')
        raise UnsuitableFile(
            errno.EINVAL, f'it is {found_kind}, and only regular files are read', name
        )
    if most is not None and status.st_size > most:
        sizes = f'{status.st_size:,} bytes, more than the {most:,}'
        raise UnsuitableFile(errno.EFBIG, f'it has {sizes} that such a file may have', name)


def read_bytes(path: str | os.PathLike[str], most: int = SMALL) -> bytes:
    """Read a file; raise like `open_file`."""
    with open_file(path, most, buffering=0) as file:
        return file.read()


def read_lines(path: str | os.PathLike[str], most: int = SMALL) -> list[str]:
    """Read the lines of a text file, without a byte order mark and empty lines at the end.

    Raises:
      UnicodeDecodeError: if it is not UTF-8.
      OSError: as `open_file`.
    """
    text = read_bytes(path, most).decode('utf-8-sig')
    # `str.splitlines` also splits at characters inside a line, such as U+2028.
    lines = io.StringIO(text, newline=None).read().split('\n')
    while lines and not lines[-1].strip():
        del lines[-1]
    return lines


def read_text(path: Path, errors: str = 'strict', most: int = SMALL) -> str | None:
    """Read a text file; None if there is no such file or bucket.

    Args:
      path: Path of the file.
      errors: Handling of bytes that are not UTF-8, see `bytes.decode`.
      most: Maximal size in bytes.

    Raises:
      UserError: if object storage cannot be reached, or for files that `open_file` refuses.
    """
    with reaching(path):
        try:
            return read_bytes(path, most).decode('utf-8', errors)
        except (FileNotFoundError, NotADirectoryError):
            return None
        except UnsuitableFile as error:
            raise UserError(f'{os.fspath(path)}: {error.strerror}') from error


def sha256(file: pathlib.Path) -> str:
    """Compute the sha256 of a local file, in hexadecimal."""
    with file.open('rb') as opened:
        return hashlib.file_digest(opened, 'sha256').hexdigest()


def parse_json(text: str | bytes) -> Any:
    """Parse JSON from a file.

    Raises:
      ValueError: if it is not JSON, is nested too deeply, or has an integer with too many digits.
    """
    try:
        content = json.loads(text, parse_int=_integer)
    except RecursionError:
        raise ValueError('nested too deeply') from None
    opening: Any = ('[', '{') if isinstance(text, str) else (b'[', b'{')
    if sum(map(text.count, opening)) > _MAX_DEPTH:
        _require_shallow(content)
    return content


def _require_shallow(content: Any) -> None:
    level = [content]
    for _ in range(_MAX_DEPTH):
        values = (value.values() if isinstance(value, dict) else value for value in level)
        level = [
            value for group in values for value in group if isinstance(value, dict | list) and value
        ]
        if not level:
            return
    raise ValueError('nested too deeply')


def _integer(digits: str) -> int:
    if len(digits) > _MAX_DIGITS:
        raise ValueError(f'an integer of {len(digits):,} digits')
    return int(digits)


@contextlib.contextmanager
def intact(file: object, advice: str = 'get it again') -> Iterator[None]:
    """Turn any exception while reading a damaged or hostile file into a one-line error.

    Readers raise many classes of exceptions: recursion, overflow, memory, and Rust's panics.

    Args:
      file: File, for the message.
      advice: End of the message.

    Raises:
      UserError: for any exception in the block, except those that end the process.
    """
    try:
        yield
    except UserError:
        raise
    except BaseException as error:
        if not isinstance(error, Exception) and type(error).__name__ != 'PanicException':
            raise
        raise UserError(f'{file}: cannot be read ({reason(error)}); {advice}') from error


def reason(error: BaseException) -> str:
    """Format an error's message, or its class, in one line of at most 200 characters."""
    text = getattr(error, 'strerror', '') or ' '.join(str(error).split())
    if not text or isinstance(error, (LookupError, MemoryError, RecursionError)):
        text = f'{type(error).__name__}: {text}'.removesuffix(': ')
    return text if len(text) <= 200 else f'{text[:196]} ...'


def stays_inside(name: object) -> bool:
    """Return whether a name listed in a file stays inside the folder that it is joined to.

    Links in the folder are trusted like the folder itself.
    """
    if not isinstance(name, str) or '\0' in name:
        return False
    relative = pathlib.PurePosixPath(name)
    return bool(relative.parts) and not relative.is_absolute() and '..' not in relative.parts


def modification_time(path: Path) -> float:
    """Return the time of the last write to the file, in seconds since the epoch."""
    stat: Any = path.stat()
    return stat.mtime if is_remote(path) else stat.st_mtime


def write_text_atomic(file: str | os.PathLike[str], text: str) -> None:
    """Write text as UTF-8 by `write_atomic`."""
    write_atomic(file, text.encode())


def create(file: pathlib.Path) -> IO[bytes]:
    """Open a new local file for writing, replacing any file or link with its name."""
    file.unlink(missing_ok=True)
    return file.open('xb')


def write_atomic(file: str | os.PathLike[str], content: bytes) -> None:
    """Write a file atomically: it appears completely or not at all, even after a power cut.

    Once this returns, a local file survives a power cut.

    Raises:
      OSError: if the file cannot be written; no partial file is left.
      UserError: if object storage cannot be reached.
    """
    target = path(file)
    if is_remote(target):
        with reaching(target):
            target.write_bytes(content)
        return
    with partial_file(target) as partial:
        with partial.open('wb') as opened:
            opened.write(content)
            opened.flush()
            os.fsync(opened.fileno())
        partial.replace(target)
        sync(target.parent)


@contextlib.contextmanager
def partial_file(target: pathlib.Path) -> Iterator[pathlib.Path]:
    """Yield a new file next to a local target; remove it at the end unless renamed to the target.

    Its name is random because processes in containers that share a folder may have the same id.
    """
    partial = target.with_name(f'.{target.name[:40]}.{secrets.token_hex(8)}.partial')
    partial.touch(exist_ok=False)
    try:
        yield partial
    finally:
        with contextlib.suppress(OSError):
            partial.unlink(missing_ok=True)


@contextlib.contextmanager
def atomic_file(file: str | os.PathLike[str]) -> Iterator[pathlib.Path]:
    """Yield a local file to write in parts; it appears as `file` at the end, atomically.

    Raises like `write_atomic`.
    """
    target = path(file)
    if is_remote(target):
        with tempfile.TemporaryDirectory() as folder:
            yield pathlib.Path(folder) / target.name
            copy(pathlib.Path(folder), target.parent)
        return
    with partial_file(target) as partial:
        yield partial
        sync(partial)
        partial.replace(target)
        sync(target.parent)


def _create(file: Path) -> IO[bytes]:
    return file.open('wb') if is_remote(file) else create(file)


def make_folder(folder: Path) -> None:
    """Make a local folder and its parents; a remote one exists with its first file."""
    if is_remote(folder):
        return
    missing = [target for target in (folder, *folder.parents) if not target.exists()]
    folder.mkdir(parents=True, exist_ok=True)
    for folder_made in missing:
        sync(folder_made.parent)


def sync(target: pathlib.Path) -> None:
    """Wait until a local file's content, or a folder's names, would survive a power cut.

    Does nothing for folders that cannot be read or whose file system cannot sync them.

    Raises:
      FileNotFoundError: if the file or folder does not exist.
      OSError: if the disk reports an error.
    """
    try:
        opened = os.open(target, os.O_RDONLY | os.O_NONBLOCK)  # a FIFO would block
    except PermissionError:
        if target.is_dir():
            return
        raise
    try:
        os.fsync(opened)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):
            raise
    finally:
        os.close(opened)


def sync_all(folder: pathlib.Path) -> None:
    """Apply `sync` to everything in a local folder, at any depth, and then to the folder."""
    for parent, _, files_there in os.walk(folder, topdown=False):
        for name in files_there:
            sync(pathlib.Path(parent, name))
        sync(pathlib.Path(parent))


def files(folder: Path) -> list[str]:
    """List all files at any depth, relative to the folder, sorted."""
    if not is_remote(folder):
        regular_files = (p for p in folder.rglob('*') if p.is_file())
        return sorted(p.relative_to(folder).as_posix() for p in regular_files)
    with reaching(folder):
        system, root = _system(folder)
        return sorted(name.removeprefix(root).lstrip('/') for name in system.find(root))


def remove(folder: Path) -> None:
    """Delete a folder with its contents, or a link without its target.

    Other processes may still be writing to it.
    """
    if not is_remote(folder):
        if os.path.islink(folder):
            folder.unlink()
        else:
            shutil.rmtree(folder)
        return
    with reaching(folder):
        system, root = _system(folder)
        if names := system.find(root):
            system.rm(names)


def copy(source: Path, target: Path) -> None:
    """Copy all files of a folder; source, target or both are remote."""
    for name in files(source):
        make_folder((target / name).parent)
        with (
            reaching(target if is_remote(target) else source),
            (source / name).open('rb') as reader,
            _create(target / name) as writer,
        ):
            shutil.copyfileobj(reader, writer, 16 << 20)


def _system(folder: Path) -> tuple[Any, str]:
    import fsspec

    return fsspec.core.url_to_fs(os.fspath(folder))
