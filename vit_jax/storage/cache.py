"""Cached files: derived ones, and complete files from object storage or the web.

fsspec downloads them, but its caches neither verify contents, nor have a size limit, nor work
offline. Here, files that are requested together share one folder, named by the server's tags (etag,
generation, time), so a new upload gets a new folder. A file's sha256 is stored next to it and
verified at every use. `runtime.caches` defines their folder and limits.
"""

from __future__ import annotations

import base64
import contextlib
import errno
import hashlib
import logging
import os
import pathlib
import shutil
import time
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import xxhash

from vit_jax import extras
from vit_jax.errors import Unavailable, UserError, without_secrets
from vit_jax.runtime import caches, console
from vit_jax.storage import paths, servers

PUBLIC = ('gs://vit_models/', 'gs://big_vision/', 'gs://bit_models/', 'gs://mixer_models/')
BLOCK = 16 * 2**20  # bytes per request
TRIES, PAUSE = 3, 1.0  # tries per block, and seconds between them
_TAGS = ('etag', 'ETag', 'generation', 'LastModified', 'updated', 'mtime', 'created', 'size')
_LATEST, _SUM, _MARK = 'latest', '.sha256', '.xxh3'
_BLOCK_BYTES, _MAX_BLOCKS = 2**20, 256  # of the blocks that a digest covers
_DAY = 24 * 3600.0

_log = logging.getLogger(__name__)


class MissingFile(UserError):
    """A file does not exist."""


def key(files: Sequence[pathlib.Path]) -> str:
    """Make a cache key for data derived from files, by their paths and states."""
    digest = hashlib.sha256()
    for file in files:
        state = '\0'.join(map(str, state_of(file)))
        digest.update(f'{file.resolve()}\0{state}\n'.encode())
    return digest.hexdigest()[:32]


def state_of(path: pathlib.Path) -> list[int]:
    """Return what changes with a file or folder: size, modification and change times, inode.

    Archives and container images may fix all modification times.
    """
    stat = path.stat()
    return [stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns, stat.st_ino]


def make_once(
    kind: str, name: str, origin: pathlib.Path, make: Callable[[pathlib.Path], None]
) -> pathlib.Path:
    """Return a cached file, written by `make(path)` if it is missing or has changed since.

    A digest in a second file detects changes. It covers up to 256 MiB, spread over the file.

    Args:
      kind: Kind in `runtime.caches`.
      name: Name of the file.
      origin: File that it is derived from.
      make: Function that writes it.

    Raises:
      UserError: if the folder is not writable or full.
    """
    file = caches.folder(kind) / name
    mark = file.with_name(file.name + _MARK)

    def make_marked(partial: pathlib.Path) -> None:
        make(partial)
        paths.write_text_atomic(mark, _digest_of(partial))

    with contextlib.suppress(OSError):
        if mark.read_text() == _digest_of(file):
            caches.mark_used(file)
            return file
    _write(file, make_marked)
    caches.record_origin(file, os.fspath(origin.absolute()))
    caches.trim(kind, [file])
    return file


def _digest_of(file: pathlib.Path) -> str:
    """Digest a file's size, and at most `_MAX_BLOCKS` blocks of 1 MiB."""
    size = file.stat().st_size
    digest, last = xxhash.xxh3_128(str(size).encode()), (size - 1) // _BLOCK_BYTES
    step = max(1.0, last / (_MAX_BLOCKS - 1))
    with file.open('rb') as opened:
        for i in range(min(last + 1, _MAX_BLOCKS)):
            opened.seek(round(i * step) * _BLOCK_BYTES)
            digest.update(opened.read(_BLOCK_BYTES))
    return digest.hexdigest()


def _write(file: pathlib.Path, make: Callable[[pathlib.Path], None]) -> None:
    """Write a file by `make(path)`; it appears completely or not at all."""
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        _remove_remains(file.parent)
        with paths.partial_file(file) as partial:
            make(partial)
            paths.sync(partial)
            partial.replace(file)
    except OSError as error:
        raise paths.WriteError(
            f'{file.parent}: cannot keep {file.name} ({paths.first_line(error)}): free space, or '
            'name another cache folder by XDG_CACHE_HOME'
        ) from error


def _remove_remains(folder: pathlib.Path) -> None:
    """Remove partial files that are at least a day old, left by killed processes."""
    for partial in folder.glob('.*.partial'):
        with contextlib.suppress(OSError):
            if partial.stat().st_mtime < time.time() - _DAY:
                partial.unlink()


def download(url: str, names: Sequence[str], needed: Sequence[str]) -> pathlib.Path:
    """Download the changed files of a folder; return the local folder with all existing ones.

    If the server cannot be reached, earlier copies are used, with a warning.

    Args:
      url: URL of the folder.
      names: File names.
      needed: Files that must exist.

    Raises:
      UserError: if a needed file is missing, or a file cannot be downloaded or stored.
    """
    home = caches.folder('checkpoints') / _digest(without_secrets(url), *names)
    try:
        with _convert_network_errors(url):
            system, root = _system(url)
            infos = {name: _info(system, f'{root}/{name}') for name in names}
    except servers.Unreachable as error:
        if (earlier := _find_latest(home)) is None:
            raise
        _log.warning('%s; using the copy in %s', error, earlier)
        return earlier
    existing = {name: info for name, info in infos.items() if info is not None}
    for name in needed:
        if name not in existing:
            raise MissingFile(f'{url}/{name}: there is no such file')
    local = home / _digest(*(f'{name} {_tag(info)}' for name, info in existing.items()))
    for name, info in existing.items():
        if not _is_intact(local / name):
            with _convert_network_errors(f'{url}/{name}'):
                _download(system, f'{root}/{name}', info, local / name, f'{url}/{name}')
    if existing:
        paths.write_text_atomic(home / _LATEST, local.name)
        caches.mark_used(local)
        caches.record_origin(local, without_secrets(url))
        caches.trim('checkpoints', [local])
    return local


def _system(url: str) -> tuple[Any, str]:
    """Open the file system of a URL, whose server answers; return it and the path inside."""
    import fsspec

    scheme, _, location = url.partition('://')
    servers.quiet_gcsfs()
    servers.require_answer(scheme)
    if scheme in ('http', 'https') and not urllib.request.getproxies():
        servers.connect(f'{scheme}://{urllib.parse.urlsplit(url).netloc}', f'{scheme}://{location}')
    # Credentials that are expired or for a different project would be refused.
    options = {'token': 'anon'} if url.startswith(PUBLIC) else {}
    system, root = fsspec.core.url_to_fs(url, **options)
    system.invalidate_cache()
    return system, root


def _info(system: Any, path: str) -> Mapping[str, Any] | None:
    """Return the server's description of a file; None if it does not exist."""
    try:
        info = system.info(path)
    except FileNotFoundError as error:
        # fsspec hides the web server's answer in the cause.
        if getattr(error.__cause__, 'status', 404) not in (404, 410):
            raise error.__cause__ or error from None
        return None
    return None if info.get('type') == 'directory' else info


def _tag(info: Mapping[str, Any]) -> str:
    return ' '.join(str(info[key]) for key in _TAGS if info.get(key) is not None)


def _digest(*parts: str) -> str:
    return hashlib.sha256('\0'.join(parts).encode()).hexdigest()[:32]


def _find_latest(home: pathlib.Path) -> pathlib.Path | None:
    """Return the folder used last, if all its files are intact."""
    if not (home / _LATEST).is_file():
        return None
    local = home / (home / _LATEST).read_text()
    files = [p for p in local.glob('*') if p.suffix != _SUM]
    return local if files and all(map(_is_intact, files)) else None


def _is_intact(file: pathlib.Path) -> bool:
    """Return whether the file exists with the sha256 that it had when downloaded."""
    recorded = file.with_name(file.name + _SUM)
    return file.is_file() and recorded.is_file() and paths.sha256(file) == recorded.read_text()


def _download(
    system: Any, path: str, info: Mapping[str, Any], file: pathlib.Path, url: str
) -> None:
    size, md5 = info.get('size'), info.get('md5Hash')

    def make(partial: pathlib.Path) -> None:
        if size and size > shutil.disk_usage(partial.parent).free:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        with (
            console.progress(file.name, size, is_bytes=True) as advance,
            partial.open('wb') as target,
        ):
            while block := _read(reader, size, url):
                target.write(block)
                advance(len(block))
        if size is not None and (downloaded := partial.stat().st_size) != size:
            raise Unavailable(
                f'{url}: ends after {downloaded:,} of {size:,} bytes; download it again'
            )
        if md5 and base64.b64decode(md5) != _md5(partial):
            raise Unavailable(f'{url}: its content does not match its MD5; download it again')
        if _tag(_info(system, path) or {}) != _tag(info):
            raise Unavailable(f'{url}: changed during the download; download it again')
        paths.write_text_atomic(file.with_name(file.name + _SUM), paths.sha256(partial))

    file.unlink(missing_ok=True)
    with system.open(path, 'rb', block_size=BLOCK, cache_type='none') as reader:
        _write(file, make)


def _read(reader: Any, size: int | None, url: str) -> bytes:
    """Read the next block of a file; request an interrupted block again."""
    # Google's storage refuses ranges past the end.
    length = BLOCK if size is None else min(BLOCK, size - reader.tell())
    for attempt in range(TRIES):
        if attempt:
            time.sleep(PAUSE)
        try:
            return reader.read(length)
        except Exception as error:
            last = error
    raise servers.Unreachable(
        f'{url}: the download was interrupted ({paths.first_line(last)})'
    ) from last


def _md5(file: pathlib.Path) -> bytes:
    with file.open('rb') as opened:
        return hashlib.file_digest(opened, lambda: hashlib.md5(usedforsecurity=False)).digest()


@contextlib.contextmanager
def _convert_network_errors(url: str) -> Iterator[None]:
    """Turn exceptions of storage libraries into one-line errors.

    Raises:
      servers.Unreachable: if the server does not answer, or a download is interrupted.
      UserError: if a package is missing, or access is denied.
    """
    scheme = url.partition('://')[0]
    try:
        yield
    except UserError:
        raise
    except ImportError as error:
        if scheme in extras.SCHEMES:
            raise extras.missing_error(f'{url}: {scheme}://', extras.SCHEMES[scheme]) from None
        raise UserError(f'{url}: {paths.first_line(error)}') from None
    except Exception as error:
        status = getattr(error, 'status', None) or vars(error).get('code')
        if isinstance(error, PermissionError) or status in (401, 403):
            raise UserError(
                f'{url}: access is denied ({paths.first_line(error)}): check the credentials '
                'and what they permit'
            ) from error
        raise servers.Unreachable(f'{url}: cannot be opened ({paths.first_line(error)})') from error
