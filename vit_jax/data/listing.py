"""File lists of folders, cached in the user's cache folder if they are long; and digests.

Listing a million files takes minutes over a network. A cached list is valid until the state of a
folder changes (`cache.state_of`), which adding, removing or renaming a file does.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import functools
import hashlib
import json
import logging
import os
import pathlib
import time
from collections.abc import Callable, Iterable, Iterator, Sequence

import numpy as np

from vit_jax.errors import UserError
from vit_jax.runtime import caches
from vit_jax.runtime.console import Console, Progress
from vit_jax.storage import cache, paths

log = logging.getLogger(__name__)

MANY = 10_000  # files, above which names are cached and sizes are not read
AT_ONCE = 16  # threads that read sizes; each mostly waits for the network
SETTLED_NS = 2_000_000_000  # file systems that round times may hide a later change


def files_below(folder: pathlib.Path) -> list[str]:
    """List all files that are not hidden, sorted, relative to the folder."""
    name = hashlib.sha256(os.fsencode(folder.resolve())).hexdigest()[:32]
    cached = caches.folder('listings') / f'{name}.json'
    if (names := _recall(cached, folder)) is not None:
        return names
    start_time = time.time_ns()
    with _progress(folder) as show_count:
        names, states = _list(folder, show_count)
    newest = max(modified for _, modified, *_ in states.values())
    if len(names) > MANY and newest < start_time - SETTLED_NS:
        _store(cached, folder, names, states)
    return names


def walk(root: str) -> Iterator[tuple[str, list[str]]]:
    """Yield `root` and the folders below with the names of their files, without hidden ones.

    Links are followed, except to a folder that contains the link: this would repeat its files under
    other classes, or never end.
    """
    chains: dict[str, tuple[str, ...]] = {root: (os.path.realpath(root),)}
    for folder, folders, files in os.walk(root, followlinks=True):
        chain = chains.pop(folder)
        folders[:] = [name for name in folders if not name.startswith('.')]
        for name in tuple(folders):
            path = os.path.join(folder, name)
            if not os.path.islink(path):
                chains[path] = (*chain[:-1], os.path.join(chain[-1], name))
            elif leads_upwards(path, chain):
                folders.remove(name)
                warn_once(f'{path}: ignoring this link to a folder that contains it')
            else:
                chains[path] = (*chain, os.path.realpath(path))
        yield folder, [name for name in files if not name.startswith('.')]


def leads_upwards(link: str, chain: Iterable[str]) -> bool:
    """Return whether a link points to a real path of `chain`, or to a parent of one."""
    target = os.path.join(os.path.realpath(link), '')
    return any(os.path.join(path, '').startswith(target) for path in chain)


@functools.cache
def warn_once(text: str) -> None:
    """Log a warning once per process: a run opens its source several times."""
    log.warning('%s', text)


def digest_of(*parts: bytes | np.ndarray | str | Iterable[str]) -> str:
    """Digest texts and arrays; the same on every machine."""
    digest = hashlib.sha256()
    for part in parts:
        if isinstance(part, bytes | np.ndarray):
            content = bytes(part) if isinstance(part, bytes) else part.tobytes()
        else:
            text = part if isinstance(part, str) else '\0'.join(part)
            content = text.encode(errors='surrogatepass')
        digest.update(len(content).to_bytes(8, 'little'))
        digest.update(content)
    return digest.hexdigest()[:16]


def digest_of_file(file: pathlib.Path) -> str:
    """Digest the content of a file; UserError if it cannot be read."""
    try:
        with paths.open_file(file, paths.TABLE) as stream:
            return hashlib.file_digest(stream, 'sha256').hexdigest()[:16]
    except OSError as error:
        raise UserError(f'{file}: cannot be read: {paths.first_line(error)}') from error


def digest_of_sizes(folder: pathlib.Path, names: Sequence[str]) -> str:
    """Digest the sizes of files in bytes; empty for more than `MANY`, to save time."""
    if len(names) > MANY:
        return ''

    def sizes(share: Sequence[str]) -> list[int]:
        sizes_in_bytes = []
        for name in share:
            try:
                sizes_in_bytes.append((folder / name).stat().st_size)
            except OSError:  # reading it will report a broken record
                sizes_in_bytes.append(-1)
        return sizes_in_bytes

    parts = [names[start::AT_ONCE] for start in range(AT_ONCE)]
    with concurrent.futures.ThreadPoolExecutor(AT_ONCE) as pool:
        return digest_of(np.array([size for share in pool.map(sizes, parts) for size in share]))


def _recall(cached: pathlib.Path, folder: pathlib.Path) -> list[str] | None:
    """Return the cached names, unless a folder has changed since."""
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError, AttributeError):
        content = json.loads(cached.read_bytes())
        if all(cache.state_of(folder / k) == state for k, state in content['folders'].items()):
            return list(content['files'])
    return None


def _store(
    cached: pathlib.Path, folder: pathlib.Path, names: list[str], states: dict[str, list[int]]
) -> None:
    content = json.dumps({'folders': states, 'files': names}).encode()
    try:
        cached.parent.mkdir(parents=True, exist_ok=True)
        paths.write_atomic(cached, content)
        caches.record_origin(cached, os.fspath(folder.absolute()))
        caches.trim('listings', [cached])
    except OSError as error:
        log.warning('%s: cannot cache the file list (%s)', cached.parent, paths.first_line(error))


def _list(
    folder: pathlib.Path, show_count: Callable[[int], None]
) -> tuple[list[str], dict[str, list[int]]]:
    """Return the sorted file names, and the state of each folder."""
    names: list[str] = []
    states: dict[str, list[int]] = {}
    root = os.fspath(folder)
    for parent, files in walk(root):
        relative = os.path.relpath(parent, root)
        prefix = '' if relative == os.curdir else f'{relative}/'
        states[prefix] = cache.state_of(folder / prefix)
        names += [prefix + name for name in files]
        show_count(len(names))
    return sorted(names), states


@contextlib.contextmanager
def _progress(folder: pathlib.Path) -> Iterator[Callable[[int], None]]:
    """Show the number of files on a terminal."""
    console = Console(stderr=True)
    with Progress(console=console, disable=not console.is_terminal, transient=True) as bar:
        task = bar.add_task(f'listing {folder}', total=None)
        yield lambda count: bar.update(task, description=f'listing {folder}: {count:,} files')
