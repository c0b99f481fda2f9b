"""Files of object storage and of the web, kept whole in the user's cache folder.

fsspec reads them. Its own caches neither check what they hold, nor are bounded, nor serve when
there is no network. Here, files that are requested together lie in one folder, named by the tags
that the server gives them (etag, generation, time): a new upload is a new folder. Beside each file
lies its sha256, with which it is compared at every use. The folders used longest ago are removed
when they exceed `MOST_BYTES`.
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
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from vit_jax import extras
from vit_jax.errors import UserError, without_secrets
from vit_jax.runtime import console
from vit_jax.storage import cache, paths, servers

_log = logging.getLogger(__name__)

MOST_BYTES = 50 * 2**30
PUBLIC = ('gs://vit_models/', 'gs://big_vision/', 'gs://bit_models/')
BLOCK = 16 * 2**20
TRIES, PAUSE = 3, 1.0  # of a block; seconds between two
_TAGS = ('etag', 'ETag', 'generation', 'LastModified', 'updated', 'mtime', 'created', 'size')
_LATEST, _SUM = 'latest', '.sha256'


class MissingFile(UserError):
    """There is no such file."""


def together(url: str, names: Sequence[str], needed: Sequence[str]) -> pathlib.Path:
    """Download files of one folder that have changed; return the local folder with all that exist.

    If the server cannot be reached, the copies of the last time are used, with a warning.

    Args:
      url: of their folder.
      names: of the files.
      needed: the files that must exist.

    Raises:
      UserError: if one of these is missing, or one cannot be downloaded or kept.
    """
    home = cache.folder('checkpoints') / _digest(without_secrets(url), *names)
    try:
        with _reaching(url):
            system, root = _system(url)
            infos = {name: _info(system, f'{root}/{name}') for name in names}
    except servers.Unreachable as error:
        if (kept := _latest(home)) is None:
            raise
        _log.warning('%s; the copy in %s is used', error, kept)
        return kept
    found = {name: info for name, info in infos.items() if info is not None}
    for name in needed:
        if name not in found:
            raise MissingFile(f'{url}/{name}: there is no such file')
    folder = home / _digest(*(f'{name} {_tag(info)}' for name, info in found.items()))
    for name, info in found.items():
        if not _is_whole(folder / name):
            with _reaching(f'{url}/{name}'):
                _download(system, f'{root}/{name}', info, folder / name, f'{url}/{name}')
    if found:
        paths.write_text_atomic(home / _LATEST, folder.name)
        os.utime(folder)
        _trim(folder)
    return folder


def _system(url: str) -> tuple[Any, str]:
    """The file system of a URL, which answers, and the path there."""
    import fsspec

    scheme, _, place = url.partition('://')
    servers.quiet_gcsfs()
    servers.require_answer(scheme)
    if scheme in ('http', 'https') and not urllib.request.getproxies():
        servers.connect(f'{scheme}://{urllib.parse.urlsplit(url).netloc}', f'{scheme}://{place}')
    # Credentials that have expired, or are of another project, would only be in the way.
    options = {'token': 'anon'} if url.startswith(PUBLIC) else {}
    system, root = fsspec.core.url_to_fs(url, **options)
    system.invalidate_cache()
    return system, root


def _info(system: Any, path: str) -> Mapping[str, Any] | None:
    """The server's description of a file; None if there is none."""
    try:
        found = system.info(path)
    except FileNotFoundError as error:
        # What the web answers is only the cause.
        if getattr(error.__cause__, 'status', 404) not in (404, 410):
            raise error.__cause__ or error from None
        return None
    return None if found.get('type') == 'directory' else found


def _tag(info: Mapping[str, Any]) -> str:
    return ' '.join(str(info[key]) for key in _TAGS if info.get(key) is not None)


def _digest(*words: str) -> str:
    return hashlib.sha256('\0'.join(words).encode()).hexdigest()[:32]


def _latest(home: pathlib.Path) -> pathlib.Path | None:
    """The folder that was used last, if all in it is whole."""
    if not (home / _LATEST).is_file():
        return None
    folder = home / (home / _LATEST).read_text()
    files = [p for p in folder.glob('*') if p.suffix != _SUM]
    return folder if files and all(map(_is_whole, files)) else None


def _is_whole(file: pathlib.Path) -> bool:
    """Whether there is a copy with the sha256 that it had when it was downloaded."""
    kept = file.with_name(file.name + _SUM)
    return file.is_file() and kept.is_file() and paths.sha256(file) == kept.read_text()


def _download(
    system: Any, path: str, info: Mapping[str, Any], file: pathlib.Path, url: str
) -> None:
    size, md5 = info.get('size'), info.get('md5Hash')

    def make(partial: pathlib.Path) -> None:
        if size and size > shutil.disk_usage(partial.parent).free:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        with (
            console.progress(file.name, size, is_bytes=True) as advance,
            partial.open('xb') as target,
        ):
            while block := _read(reader, size, url):
                target.write(block)
                advance(len(block))
        if size is not None and (done := partial.stat().st_size) != size:
            raise UserError(f'{url}: ends after {done:,} of {size:,} bytes; get it again')
        if md5 and base64.b64decode(md5) != _md5(partial):
            raise UserError(f'{url}: arrives with another content than its MD5 says; get it again')
        if _tag(_info(system, path) or {}) != _tag(info):
            raise UserError(f'{url}: has changed during the download; get it again')
        paths.write_text_atomic(file.with_name(file.name + _SUM), paths.sha256(partial))

    file.unlink(missing_ok=True)
    with system.open(path, 'rb', block_size=BLOCK, cache_type='none') as reader:
        cache.made_once(file, make)


def _read(reader: Any, size: int | None, url: str) -> bytes:
    """The next block of a file; one that breaks off is requested again."""
    # Google's storage fails for bytes beyond the end.
    length = BLOCK if size is None else min(BLOCK, size - reader.tell())
    for attempt in range(TRIES):
        if attempt:
            time.sleep(PAUSE)
        try:
            return reader.read(length)
        except Exception as error:
            last = error
    raise servers.Unreachable(
        f'{url}: the download breaks off ({paths.first_line(last)})'
    ) from last


def _md5(file: pathlib.Path) -> bytes:
    with file.open('rb') as opened:
        return hashlib.file_digest(opened, lambda: hashlib.md5(usedforsecurity=False)).digest()


@contextlib.contextmanager
def _reaching(url: str) -> Iterator[None]:
    """Turn exceptions of the libraries of storage into one line.

    Raises:
      servers.Unreachable: if storage does not answer, or a download breaks off.
      UserError: if a package is missing, or access is denied.
    """
    scheme = url.partition('://')[0]
    try:
        yield
    except UserError:
        raise
    except ImportError as error:
        if scheme in extras.SCHEMES:
            raise extras.missing(f'{url}: {scheme}://', extras.SCHEMES[scheme]) from None
        raise UserError(f'{url}: {paths.first_line(error)}') from None
    except Exception as error:
        status = getattr(error, 'status', None) or vars(error).get('code')
        if isinstance(error, PermissionError) or status in (401, 403):
            raise UserError(
                f'{url}: access is denied ({paths.first_line(error)}): check the credentials '
                'and what they permit'
            ) from error
        raise servers.Unreachable(f'{url}: cannot be opened ({paths.first_line(error)})') from error


def _trim(used: pathlib.Path) -> None:
    """Remove the folders used longest ago until the rest is small enough; never `used`."""
    with contextlib.suppress(OSError):
        folders = [p for p in used.parents[1].glob('*/*') if p.is_dir()]
        folders.sort(key=lambda folder: folder.stat().st_mtime, reverse=True)
        total = 0
        for folder in folders:
            total += sum(p.stat().st_size for p in folder.iterdir())
            if total > MOST_BYTES and folder != used:
                shutil.rmtree(folder)
