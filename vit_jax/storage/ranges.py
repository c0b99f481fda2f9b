"""Ranges of files in object storage, some of them kept on the local disk.

A folder keeps the first bytes of each of its files, the same share of all, so that the cache holds
its limit without counting, whatever processes read. Of data that are read in random order, as in
training, no other choice keeps more.
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

from vit_jax.errors import EXIT_FAILED, UserError
from vit_jax.storage import cache, paths

log = logging.getLogger(__name__)

LIMIT = 'VIT_JAX_CACHE_GB'
LIMIT_GB = 50.0
WEEK = 7 * 24 * 3600.0
TRIES = 4  # beside those of the libraries
PAUSE = 0.5  # seconds before the second; each further one takes twice as long
SECONDS = 60.0  # for an answer
AT_ONCE = 64  # requests of a process
ABOUT = 'about.json'
CHECKSUM = 4  # bytes before a range that is kept


class Unreachable(UserError):
    """Object storage does not answer now; the same command may succeed later."""

    exit_code = EXIT_FAILED


class Object(NamedTuple):
    """A file in object storage: its size in bytes, and a tag that changes with its content."""

    size: int
    tag: str


class Folder:
    """The files of a folder in object storage, read by ranges.

    Attributes:
      path: of the folder.
      files: those directly in it, by name.

    Raises:
      UserError: if there is no such folder, or no server answers.
    """

    def __init__(self, path: paths.Path):
        self.path = path
        with paths.reaching(path):  # without a network, in seconds
            self.files = {k: v for k, v in _listed(self._fetch_list()) if k}
        digest = hashlib.sha256(repr((os.fspath(path), sorted(self.files.items()))).encode())
        self._kept = cache.folder('ranges') / digest.hexdigest()[:32]
        self._share = 0.0

    def keep(self, names: list[str]) -> None:
        """Keep these files on the local disk, or the share of them that has room."""
        size = sum(self.files[name].size for name in names)
        with contextlib.suppress(OSError):
            self._share = min(1.0, _room(self._kept, os.fspath(self.path), size) / max(size, 1))
        log.info('%s: %.0f%% is kept in %s', self.path, 100 * self._share, self._kept)

    def derived(self, name: str) -> bytes | None:
        """The content that `keep_derived` has kept under this name."""
        return _checked(self._kept / name)

    def keep_derived(self, name: str, content: bytes) -> None:
        """Keep something small that was made of a file, such as its index."""
        if self._share:
            self._store(self._kept / name, content)

    def read(self, name: str, start: int, end: int) -> bytes:
        """The bytes of a range of a file.

        Raises:
          Unreachable: if it cannot be read after several tries.
          UserError: if the file has disappeared or may not be read.
        """
        return self.begin(name, start, end).result()

    def begin(
        self, name: str, start: int, end: int, keep: bool = True
    ) -> concurrent.futures.Future[bytes]:
        """Start reading a range, which is kept if there is room; the result raises as `read`."""
        file = None
        if keep and end <= self._share * self.files[name].size:
            file = self._kept / f'{name}.parts' / f'{start}-{end}'
            if (found := _checked(file)) is not None and len(found) == end - start:
                done: concurrent.futures.Future[bytes] = concurrent.futures.Future()
                done.set_result(found)
                return done
        return _start(self._system, self._fetch(name, start, end, file))

    @functools.cached_property
    def _system(self) -> Any:
        return _system_of(os.fspath(self.path))

    async def _fetch(self, name: str, start: int, end: int, file: pathlib.Path | None) -> bytes:
        place = f'{os.fspath(self.path)}/{name}'

        async def read() -> bytes:
            # fsspec documents its coroutines under these names, with a leading underscore.
            found = await self._system._cat_file(place, start=start, end=end)
            if len(found) != end - start:
                raise EOFError(f'{len(found):,} of {end - start:,} bytes came')
            return found

        found = await _tried(read, place)
        if file is not None:
            await asyncio.to_thread(self._store, file, found)
        return found

    def _fetch_list(self) -> list[dict[str, Any]]:
        place = os.fspath(self.path)
        return _start(
            self._system, _tried(lambda: self._system._ls(place, detail=True), place)
        ).result()

    def _store(self, file: pathlib.Path, content: bytes) -> None:
        partial = file.with_name(f'.{file.name}.{os.getpid()}')
        try:
            file.parent.mkdir(parents=True, exist_ok=True)
            partial.write_bytes(_checksum(content) + content)
            partial.replace(file)
        except OSError as error:
            if self._share:
                log.warning(
                    '%s: nothing more is kept of %s (%s): free space, or set %s',
                    *(cache.folder('ranges'), self.path, paths.first_line(error), LIMIT),
                )
            self._share = 0.0
            with contextlib.suppress(OSError):
                partial.unlink(missing_ok=True)


def limit_bytes() -> int:
    """The most that is kept on the local disk, of all data together.

    Raises:
      UserError: if the variable of the environment is no number.
    """
    text = os.environ.get(LIMIT) or str(LIMIT_GB)
    try:
        return int(max(0.0, float(text)) * 1e9)
    except (ValueError, OverflowError) as error:
        raise UserError(f'{LIMIT}={text}: write a number of gigabytes, 0 for none') from error


def _room(kept: pathlib.Path, path: str, size: int) -> int:
    """The bytes that a folder may keep, written down for others; makes room by what is old."""
    kept.mkdir(parents=True, exist_ok=True)
    others = {}
    for about in kept.parent.glob(f'*/{ABOUT}'):
        if about.parent != kept:
            with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
                others[about] = int(json.loads(about.read_bytes())['bytes'])
    total = limit_bytes()
    for about in sorted(others, key=lambda file: file.stat().st_mtime):
        old = about.stat().st_mtime < time.time() - WEEK
        if old and sum(others.values()) + size > total:
            shutil.rmtree(about.parent, ignore_errors=True)
            del others[about]
    room = max(0, min(size, total - sum(others.values())))
    content = json.dumps({'path': path, 'bytes': room})
    paths.write_atomic(kept / ABOUT, content.encode())
    return room


def _checked(file: pathlib.Path) -> bytes | None:
    """The content of a file that `_store` wrote; None if there is none, or it is damaged."""
    with contextlib.suppress(OSError):
        content = file.read_bytes()
        if content[:CHECKSUM] == _checksum(content[CHECKSUM:]):
            return content[CHECKSUM:]
    return None


def _checksum(content: bytes) -> bytes:
    return zlib.crc32(content).to_bytes(CHECKSUM, 'little')


def _listed(entries: list[dict[str, Any]]) -> list[tuple[str, Object]]:
    found = []
    for entry in entries:
        if entry.get('type') == 'file':
            tag = entry.get('etag') or entry.get('ETag') or entry.get('mtime') or ''
            name = str(entry['name']).rpartition('/')[2]
            found.append((name, Object(int(entry['size']), str(tag))))
    return found


def _system_of(path: str) -> Any:
    import fsspec

    paths.path(path)  # its settings, and its errors
    fsspec.config.conf.setdefault('s3', {}).setdefault(
        'config_kwargs', {'max_pool_connections': AT_ONCE}
    )
    return fsspec.core.url_to_fs(path)[0]


def _start(system: Any, work: Any) -> concurrent.futures.Future[Any]:
    """Run in the thread of fsspec's, as all requests of a process."""
    return asyncio.run_coroutine_threadsafe(work, system.loop)


async def _tried(request: Any, place: str) -> Any:
    """The result of a request, repeated with growing pauses where that may help.

    Raises:
      Unreachable: if no try succeeds.
      UserError: if there is no such file, or it may not be read.
    """
    began = time.monotonic()
    for attempt in range(TRIES):
        if attempt:
            await asyncio.sleep(PAUSE * 2 ** (attempt - 1) * random.uniform(1, 1.5))
        try:
            async with _gate():
                return await asyncio.wait_for(request(), SECONDS)
        except FileNotFoundError as error:
            raise UserError(f'{place}: there is no such file') from error
        except PermissionError as error:
            raise UserError(f'{place}: may not be read ({paths.first_line(error)})') from error
        except Exception as error:  # of many kinds, by library and server
            last = error
    reason = (
        f'no answer in {SECONDS:g} s' if isinstance(last, TimeoutError) else paths.first_line(last)
    )
    raise Unreachable(
        f'{place} cannot be read, {TRIES} tries in {time.monotonic() - began:.0f} s ({reason}): '
        'when the bucket answers again, the same command continues'
    ) from last


@functools.cache
def _gate() -> asyncio.Semaphore:
    return asyncio.Semaphore(AT_ONCE)
