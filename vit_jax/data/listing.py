"""Lists of the files below a folder, kept in the user's cache folder if they are long; digests.

A folder of a million files takes minutes to list over a network. A kept list is valid while no
folder's modification time changes: adding, removing or renaming a file changes it.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import hashlib
import json
import logging
import os
import pathlib
import time
from collections.abc import Callable, Iterable, Iterator, Sequence

import numpy as np

from vit_jax.errors import UserError
from vit_jax.runtime.console import Console, Progress
from vit_jax.storage import cache, paths

log = logging.getLogger(__name__)

MANY = 10_000  # files, above which names are kept, and sizes are not read
AT_ONCE = 16  # threads that read sizes, each of which waits for the network
SETTLED_NS = 2_000_000_000  # a later change may not show in the time of a file system that rounds


def files_below(folder: pathlib.Path) -> list[str]:
    """The names of all files, relative to the folder, sorted and without hidden ones."""
    name = hashlib.sha256(os.fsencode(folder.resolve())).hexdigest()[:32]
    kept = cache.folder('listings') / f'{name}.json'
    if (names := _recall(kept, folder)) is not None:
        return names
    began = time.time_ns()
    with _progress(folder) as seen:
        names, times = _walk(folder, seen)
    if len(names) > MANY and max(times.values()) < began - SETTLED_NS:
        _keep(kept, names, times)
    return names


def digest_of(*parts: bytes | np.ndarray | str | Iterable[str]) -> str:
    """A digest of texts and arrays, the same on every machine."""
    found = hashlib.sha256()
    for part in parts:
        if isinstance(part, bytes | np.ndarray):
            content = bytes(part) if isinstance(part, bytes) else part.tobytes()
        else:
            text = part if isinstance(part, str) else '\0'.join(part)
            content = text.encode(errors='surrogatepass')
        found.update(len(content).to_bytes(8, 'little'))
        found.update(content)
    return found.hexdigest()[:16]


def digest_of_file(file: pathlib.Path) -> str:
    """A digest of the content of a file; UserError if it cannot be read."""
    try:
        with paths.open_file(file, paths.TABLE) as opened:
            return hashlib.file_digest(opened, 'sha256').hexdigest()[:16]
    except OSError as error:
        raise UserError(f'{file}: cannot be read: {paths.first_line(error)}') from error


def digest_of_sizes(folder: pathlib.Path, names: Sequence[str]) -> str:
    """A digest of the sizes of files in bytes; empty for more than `MANY`, to save time."""
    if len(names) > MANY:
        return ''

    def sizes(some: Sequence[str]) -> list[int]:
        found = []
        for name in some:
            try:
                found.append((folder / name).stat().st_size)
            except OSError:  # a broken record, once it is read
                found.append(-1)
        return found

    parts = [names[start::AT_ONCE] for start in range(AT_ONCE)]
    with concurrent.futures.ThreadPoolExecutor(AT_ONCE) as pool:
        return digest_of(np.array([size for some in pool.map(sizes, parts) for size in some]))


def _recall(kept: pathlib.Path, folder: pathlib.Path) -> list[str] | None:
    """The kept names, unless a folder has changed since."""
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError, AttributeError):
        content = json.loads(kept.read_bytes())
        if all((folder / k).stat().st_mtime_ns == t for k, t in content['folders'].items()):
            return list(content['files'])
    return None


def _keep(kept: pathlib.Path, names: list[str], times: dict[str, int]) -> None:
    content = json.dumps({'folders': times, 'files': names}).encode()
    try:
        kept.parent.mkdir(parents=True, exist_ok=True)
        paths.write_atomic(kept, content)
    except OSError as error:
        log.warning('%s: the list of files is not kept (%s)', kept.parent, paths.first_line(error))


def _walk(folder: pathlib.Path, seen: Callable[[int], None]) -> tuple[list[str], dict[str, int]]:
    """The sorted names of the files, and the modification time of each folder."""
    names: list[str] = []
    times: dict[str, int] = {}
    root = os.fspath(folder)
    for parent, folders, files in os.walk(root, followlinks=True):
        folders[:] = [name for name in folders if not name.startswith('.')]
        inside = os.path.relpath(parent, root)
        prefix = '' if inside == os.curdir else f'{inside}/'
        times[prefix] = os.stat(parent).st_mtime_ns
        names += [prefix + name for name in files if not name.startswith('.')]
        seen(len(names))
    return sorted(names), times


@contextlib.contextmanager
def _progress(folder: pathlib.Path) -> Iterator[Callable[[int], None]]:
    """Show a count of the files on a terminal."""
    console = Console(stderr=True)
    with Progress(console=console, disable=not console.is_terminal, transient=True) as bar:
        task = bar.add_task(f'listing {folder}', total=None)
        yield lambda count: bar.update(task, description=f'listing {folder}: {count:,} files')
