"""Files of object storage and of the web, kept whole in the user's cache folder.

Files that are asked for together lie in one folder, named by the tags that the server gives them
(etag, generation, time): a new upload is a new folder. Beside each file lies its sha256, with which
it is compared at every use. The folders used longest ago are removed when they exceed `MOST_BYTES`.
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
import sys
import time
import urllib.parse
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import rich.progress

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


class Unreachable(UserError):
    """Storage does not answer."""


def together(url: str, names: Sequence[str], needed: Sequence[str]) -> pathlib.Path:
    """The local folder with those of some files that there are.

    If the server cannot be reached, the copies of the last time are used, with a warning.

    Args:
      url: of their folder.
      names: of the files.
      needed: those that there must be.

    Raises:
      UserError: if one is missing, or cannot be downloaded or kept.
    """
    home = cache.folder('checkpoints') / _digest(without_secrets(url), *names)
    try:
        with _reaching(url):
            system, root = _system(url)
            infos = {name: _info(system, f'{root}/{name}') for name in names}
    except Unreachable as error:
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
    if not (file.is_file() and kept.is_file()):
        return False
    with file.open('rb') as opened:
        return hashlib.file_digest(opened, 'sha256').hexdigest() == kept.read_text()


def _download(
    system: Any, path: str, info: Mapping[str, Any], file: pathlib.Path, url: str
) -> None:
    size = info.get('size')

    def make(partial: pathlib.Path) -> None:
        if size and size > shutil.disk_usage(partial.parent).free:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        digest, md5 = hashlib.sha256(), hashlib.md5(usedforsecurity=False)
        with partial.open('xb') as target:
            for block in _shown(_blocks(system, path, size, url), url, size):
                target.write(block)
                digest.update(block)
                md5.update(block)
            done = target.tell()
        if size is not None and done != size:
            raise UserError(f'{url}: ends after {done:,} of {size:,} bytes; get it again')
        told = info.get('md5Hash')
        if told and base64.b64decode(told) != md5.digest():
            raise UserError(f'{url}: arrives with another content than its MD5 says; get it again')
        if _tag(_info(system, path) or {}) != _tag(info):
            raise UserError(f'{url}: has changed during the download; get it again')
        paths.write_text_atomic(file.with_name(file.name + _SUM), digest.hexdigest())

    file.unlink(missing_ok=True)
    cache.made_once(file, make)


def _blocks(system: Any, path: str, size: int | None, url: str) -> Iterator[bytes]:
    """The content of a file; after an interruption it is asked for the rest."""
    done = failures = 0
    while True:
        try:
            with system.open(path, 'rb', block_size=BLOCK, cache_type='none') as reader:
                if done:
                    reader.seek(done)
                # Google's storage fails for what lies beyond the end.
                while block := reader.read(min(BLOCK, size - done) if size else BLOCK):
                    yield block
                    done, failures = done + len(block), 0
                    if done == size:
                        break
            return
        except GeneratorExit:
            raise
        except Exception as error:
            failures += 1
            if failures == TRIES:
                raise Unreachable(f'{url}: the download breaks off ({paths.why(error)})') from error
            time.sleep(PAUSE)


def _shown(blocks: Iterator[bytes], url: str, size: int | None) -> Iterator[bytes]:
    """The same blocks, with a progress bar on a terminal."""
    columns = (
        rich.progress.TextColumn('{task.description}'),
        rich.progress.BarColumn(),
        rich.progress.DownloadColumn(binary_units=True),
        rich.progress.TransferSpeedColumn(),
    )
    stderr = console.Console(stderr=True)
    with console.Progress(
        *columns, console=stderr, transient=True, disable=not sys.stderr.isatty()
    ) as progress:
        task = progress.add_task(url.rpartition('/')[2], total=size)
        for block in blocks:
            progress.advance(task, len(block))
            yield block


@contextlib.contextmanager
def _reaching(url: str) -> Iterator[None]:
    """Turn exceptions of the libraries of storage into one line.

    Raises:
      Unreachable: if storage does not answer, or a download breaks off.
      UserError: if a package is missing, or access is denied.
    """
    scheme = url.partition('://')[0]
    try:
        yield
    except (MissingFile, Unreachable):
        raise
    except UserError as error:
        unreachable = 'nothing answers at' in str(error)
        raise (Unreachable if unreachable else UserError)(str(error)) from None
    except ImportError as error:
        if scheme in extras.SCHEMES:
            raise extras.missing(f'{url}: {scheme}://', extras.SCHEMES[scheme]) from None
        raise UserError(f'{url}: {paths.why(error)}') from None
    except Exception as error:
        status = getattr(error, 'status', None) or vars(error).get('code')
        if isinstance(error, PermissionError) or status in (401, 403):
            raise UserError(
                f'{url}: access is denied ({paths.why(error)}): check the credentials and what '
                'they permit'
            ) from error
        raise Unreachable(f'{url}: cannot be opened ({paths.why(error)})') from error


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
