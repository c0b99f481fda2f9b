"""Reading of byte ranges from object storage, with a cache on the local disk.

The cache keeps the beginning of each file in a folder, the same share of all files, so that several
processes obey its limit without counting. For data read in random order, such as in training, no
other choice has more hits.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import functools
import hashlib
import json
import logging
import os
import pathlib
import random
import shutil
import time
import zlib
from typing import Any, NamedTuple

from vit_jax.errors import UserError
from vit_jax.runtime import caches
from vit_jax.storage import paths, servers

log = logging.getLogger(__name__)

WEEK = 7 * 24 * 3600.0
TRIES = 4  # in addition to the libraries' retries
PAUSE = 0.5  # seconds before the second try; doubled before each further one
SECONDS = 60.0  # time limit for an answer
AT_ONCE = 64  # concurrent requests of a process
ABOUT = 'about.json'
CHECKSUM = 4  # bytes before a cached range


class Object(NamedTuple):
    """A file in object storage: its size in bytes, and a tag that changes with its content."""

    size: int
    tag: str


class Folder:
    """Files of a folder in object storage, read by ranges.

    Attributes:
      path: Path of the folder.
      files: {name: file} directly in the folder.

    Raises:
      UserError: if the folder does not exist, or no server answers.
    """

    def __init__(self, path: paths.Path):
        self.path = path
        with paths.reaching(path):  # fails within seconds if there is no network
            self.files = {k: v for k, v in _parse_list(self._fetch_list()) if k}
        digest = hashlib.sha256(repr((os.fspath(path), sorted(self.files.items()))).encode())
        self._cache_folder = caches.folder('ranges') / digest.hexdigest()[:32]
        self._share = 0.0

    def keep(self, names: list[str]) -> None:
        """Cache these files on the local disk, or the share of them that fits."""
        size = sum(self.files[name].size for name in names)
        with contextlib.suppress(OSError):
            self._share = min(
                1.0, _reserve(self._cache_folder, os.fspath(self.path), size) / max(size, 1)
            )
        log.info('%s: %.0f%% is cached in %s', self.path, 100 * self._share, self._cache_folder)

    def derived(self, name: str) -> bytes | None:
        """Return the content stored by `keep_derived` under this name, or None."""
        return _read_checked(self._cache_folder / name)

    def keep_derived(self, name: str, content: bytes) -> None:
        """Cache something small derived from a file, such as its index."""
        if self._share:
            self._store(self._cache_folder / name, content)

    def read(self, name: str, start: int, end: int) -> bytes:
        """Read a range of a file.

        Raises:
          Unreachable: if it cannot be read after several tries.
          UserError: if the file is gone or access is denied.
        """
        return self.begin(name, start, end).result()

    def begin(
        self, name: str, start: int, end: int, keep: bool = True
    ) -> concurrent.futures.Future[bytes]:
        """Start reading a range, and cache it if it fits; the result raises like `read`."""
        file = None
        if keep and end <= self._share * self.files[name].size:
            file = self._cache_folder / f'{name}.parts' / f'{start}-{end}'
            if (cached := _read_checked(file)) is not None and len(cached) == end - start:
                done: concurrent.futures.Future[bytes] = concurrent.futures.Future()
                done.set_result(cached)
                return done
        return _start(self._system, self._fetch(name, start, end, file))

    @functools.cached_property
    def _system(self) -> Any:
        return _open_system(os.fspath(self.path))

    async def _fetch(self, name: str, start: int, end: int, file: pathlib.Path | None) -> bytes:
        url = f'{os.fspath(self.path)}/{name}'

        async def read() -> bytes:
            # fsspec documents its coroutines under these underscored names.
            content = await self._system._cat_file(url, start=start, end=end)
            if len(content) != end - start:
                raise EOFError(f'{len(content):,} of {end - start:,} bytes came')
            return content

        content = await _retry(read, url)
        if file is not None:
            await asyncio.to_thread(self._store, file, content)
        return content

    def _fetch_list(self) -> list[dict[str, Any]]:
        url = os.fspath(self.path)
        return _start(
            self._system, _retry(lambda: self._system._ls(url, detail=True), url)
        ).result()

    def _store(self, file: pathlib.Path, content: bytes) -> None:
        try:
            file.parent.mkdir(parents=True, exist_ok=True)
            with paths.partial_file(file) as partial:
                partial.write_bytes(_checksum(content) + content)
                partial.replace(file)
        except OSError as error:
            if self._share:
                log.warning(
                    '%s: nothing more of %s is cached (%s): free space, or set %s',
                    *(caches.folder('ranges'), self.path, paths.first_line(error), caches.LIMIT),
                )
            self._share = 0.0


def _reserve(folder: pathlib.Path, path: str, size: int) -> int:
    """Reserve up to `size` bytes of the cache for a folder, removing old ones; return how many."""
    folder.mkdir(parents=True, exist_ok=True)
    reserved = {}
    for about in folder.parent.glob(f'*/{ABOUT}'):
        if about.parent != folder:
            with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
                reserved[about] = int(json.loads(about.read_bytes())['bytes'])
    total = caches.limit_bytes('ranges')
    for about in sorted(reserved, key=lambda file: file.stat().st_mtime):
        old = about.stat().st_mtime < time.time() - WEEK
        if old and sum(reserved.values()) + size > total:
            shutil.rmtree(about.parent, ignore_errors=True)
            about.parent.with_name(about.parent.name + caches.ORIGIN).unlink(missing_ok=True)
            del reserved[about]
    available = max(0, min(size, total - sum(reserved.values())))
    content = json.dumps({'path': path, 'bytes': available})
    paths.write_atomic(folder / ABOUT, content.encode())
    caches.record_origin(folder, path)
    return available


def _read_checked(file: pathlib.Path) -> bytes | None:
    """Read a file written by `_store`; None if it is missing or damaged."""
    with contextlib.suppress(OSError):
        content = file.read_bytes()
        if content[:CHECKSUM] == _checksum(content[CHECKSUM:]):
            return content[CHECKSUM:]
    return None


def _checksum(content: bytes) -> bytes:
    return zlib.crc32(content).to_bytes(CHECKSUM, 'little')


def _parse_list(entries: list[dict[str, Any]]) -> list[tuple[str, Object]]:
    objects = []
    for entry in entries:
        if entry.get('type') == 'file':
            tag = entry.get('etag') or entry.get('ETag') or entry.get('mtime') or ''
            name = str(entry['name']).rpartition('/')[2]
            objects.append((name, Object(int(entry['size']), str(tag))))
    return objects


def _open_system(path: str) -> Any:
    import fsspec

    paths.path(path)  # sets up fsspec and raises errors
    fsspec.config.conf.setdefault('s3', {}).setdefault(
        'config_kwargs', {'max_pool_connections': AT_ONCE}
    )
    return fsspec.core.url_to_fs(path)[0]


def _start(system: Any, work: Any) -> concurrent.futures.Future[Any]:
    """Run in fsspec's thread, like all requests of a process."""
    return asyncio.run_coroutine_threadsafe(work, system.loop)


async def _retry(request: Any, url: str) -> Any:
    """Send a request; retry with growing pauses where this may help.

    Raises:
      Unreachable: if no try succeeds.
      UserError: if the file does not exist or access is denied.
    """
    began = time.monotonic()
    for attempt in range(TRIES):
        if attempt:
            await asyncio.sleep(PAUSE * 2 ** (attempt - 1) * random.uniform(1, 1.5))
        try:
            async with _gate():
                return await asyncio.wait_for(request(), SECONDS)
        except FileNotFoundError as error:
            raise UserError(f'{url}: there is no such file') from error
        except PermissionError as error:
            raise UserError(f'{url}: access is denied ({paths.first_line(error)})') from error
        except Exception as error:  # its class depends on library and server
            last = error
    reason = (
        f'no answer in {SECONDS:g} s' if isinstance(last, TimeoutError) else paths.first_line(last)
    )
    raise servers.Unreachable(
        f'{url} cannot be read, {TRIES} tries in {time.monotonic() - began:.0f} s ({reason}): '
        'when the bucket answers again, the same command continues'
    ) from last


@functools.cache
def _gate() -> asyncio.Semaphore:
    return asyncio.Semaphore(AT_ONCE)
