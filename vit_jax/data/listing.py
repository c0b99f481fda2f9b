"""Lists of the files below a folder, kept in the user's cache folder if they are long; digests.

A folder of a million files takes minutes to list over a network. A kept list is valid while no
folder's state changes (`cache.state_of`), as it does when a file is added, removed or renamed.
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
        names, states = _list(folder, seen)
    newest = max(modified for _, modified, *_ in states.values())
    if len(names) > MANY and newest < began - SETTLED_NS:
        _keep(kept, names, states)
    return names


def walk(root: str) -> Iterator[tuple[str, list[str]]]:
    """The folders below one, and itself, with the names of their files; hidden ones are left out.

    Links are followed, except to a folder that holds them: they would repeat all of its files under
    other classes, or never end.
    """
    chains: dict[str, tuple[str, ...]] = {root: (os.path.realpath(root),)}
    for folder, inside, files in os.walk(root, followlinks=True):
        chain = chains.pop(folder)
        inside[:] = [name for name in inside if not name.startswith('.')]
        for name in tuple(inside):
            path = os.path.join(folder, name)
            if not os.path.islink(path):
                chains[path] = (*chain[:-1], os.path.join(chain[-1], name))
            elif leads_upwards(path, chain):
                inside.remove(name)
                warn_once(f'{path}: a link to a folder that holds it, left out')
            else:
                chains[path] = (*chain, os.path.realpath(path))
        yield folder, [name for name in files if not name.startswith('.')]


def leads_upwards(link: str, chain: Iterable[str]) -> bool:
    """Whether a link points to one of these real paths or to a parent of one."""
    target = os.path.join(os.path.realpath(link), '')
    return any(os.path.join(path, '').startswith(target) for path in chain)


@functools.cache
def warn_once(text: str) -> None:
    """Log a warning unless this process already has: a run opens its source several times."""
    log.warning('%s', text)


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
        if all(cache.state_of(folder / k) == state for k, state in content['folders'].items()):
            return list(content['files'])
    return None


def _keep(kept: pathlib.Path, names: list[str], states: dict[str, list[int]]) -> None:
    content = json.dumps({'folders': states, 'files': names}).encode()
    try:
        kept.parent.mkdir(parents=True, exist_ok=True)
        paths.write_atomic(kept, content)
    except OSError as error:
        log.warning('%s: the list of files is not kept (%s)', kept.parent, paths.first_line(error))


def _list(
    folder: pathlib.Path, seen: Callable[[int], None]
) -> tuple[list[str], dict[str, list[int]]]:
    """The sorted names of the files, and the state of each folder."""
    names: list[str] = []
    states: dict[str, list[int]] = {}
    root = os.fspath(folder)
    for parent, files in walk(root):
        inside = os.path.relpath(parent, root)
        prefix = '' if inside == os.curdir else f'{inside}/'
        states[prefix] = cache.state_of(folder / prefix)
        names += [prefix + name for name in files]
        seen(len(names))
    return sorted(names), states


@contextlib.contextmanager
def _progress(folder: pathlib.Path) -> Iterator[Callable[[int], None]]:
    """Show a count of the files on a terminal."""
    console = Console(stderr=True)
    with Progress(console=console, disable=not console.is_terminal, transient=True) as bar:
        task = bar.add_task(f'listing {folder}', total=None)
        yield lambda count: bar.update(task, description=f'listing {folder}: {count:,} files')
