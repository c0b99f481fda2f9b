"""The package's caches: one folder, with a limit for each kind of entries.

They are in `$XDG_CACHE_HOME/vit_jax`, by default `~/.cache/vit_jax`. Everything in them can be made
or downloaded again. Where a kind exceeds its limit, its least recently used entries are removed;
`VIT_JAX_CACHE_GB` replaces the limit of the large kinds. `list cache` shows and removes entries.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import pathlib
import shutil
import time
from collections.abc import Collection

from vit_jax.errors import UserError

LIMIT = 'VIT_JAX_CACHE_GB'
DEFAULT_GB = 50.0
ORIGIN = '.origin'  # ending of a file beside an entry that names its source
_DAY = 24 * 3600.0


@dataclasses.dataclass(frozen=True)
class Kind:
    """Kind of entries, in a folder with its name.

    Attributes:
      meaning: Description.
      pattern: Pattern of the paths of entries.
      gigabytes: Limit; None for the limit of large kinds.
      spared_days: Days after its last use in which an entry is not removed: a run may need it.
    """

    meaning: str
    pattern: str
    gigabytes: float | None = None
    spared_days: float = 0


KINDS = {
    'arrow': Kind('Arrow copies of Parquet files', '*.arrow', spared_days=7),
    'checkpoints': Kind('downloaded checkpoints', '*/*/'),
    'listings': Kind('file names of large folders', '*.json', 1),
    'ranges': Kind('records of data in buckets', '*/', spared_days=7),
    'tar': Kind('indices of tar shards', '*.npz', 1, spared_days=7),
    'xla': Kind('compiled programs', '*/*', 4.3),  # the step of a ViT-B/16 takes a few million
}


@dataclasses.dataclass(frozen=True)
class Entry:
    """File or folder in a cache.

    Attributes:
      kind: Name of its kind.
      path: Path.
      bytes: Size.
      used: Time of the last use, in seconds since 1970.
      origin: Path or URL that it was made from; empty if unknown.
    """

    kind: str
    path: str
    bytes: int
    used: float
    origin: str


def folder(kind: str) -> pathlib.Path:
    """Return the folder of a kind; may not exist yet."""
    home = os.environ.get('XDG_CACHE_HOME') or '~/.cache'
    return pathlib.Path(home).expanduser() / 'vit_jax' / kind


def limit_bytes(kind: str) -> int:
    """Return the size limit of a kind.

    Raises:
      UserError: The environment variable is not a number.
    """
    if (fixed := KINDS[kind].gigabytes) is not None:
        return int(fixed * 1e9)
    text = os.environ.get(LIMIT) or str(DEFAULT_GB)
    try:
        return int(max(0.0, float(text)) * 1e9)
    except (ValueError, OverflowError) as error:
        raise UserError(f'{LIMIT}={text}: write a number of gigabytes, 0 for none') from error


def entries(kind: str) -> list[Entry]:
    """List the entries of a kind, the least recently used first."""
    cached = []
    for path in folder(kind).glob(KINDS[kind].pattern):
        if path.name.startswith('.') or path.name.endswith(ORIGIN):
            continue
        with contextlib.suppress(FileNotFoundError):  # another process removes it too
            stat = path.stat()
            # Reading a folder's entries changes its access time, as `list cache` does.
            used = stat.st_mtime if path.is_dir() else max(stat.st_atime, stat.st_mtime)
            cached.append(Entry(kind, str(path), _size(path), used, _origin(path)))
    return sorted(cached, key=lambda entry: entry.used)


def record_origin(path: pathlib.Path, origin: str) -> None:
    """Record the source of an entry, for `list cache`."""
    with contextlib.suppress(OSError):
        path.with_name(path.name + ORIGIN).write_text(f'{origin}\n')


def mark_used(path: pathlib.Path) -> None:
    """Record a use of an entry."""
    with contextlib.suppress(OSError):
        os.utime(path)


def trim(kind: str, needed: Collection[pathlib.Path] = ()) -> None:
    """Remove the least recently used entries of a kind until its limit is met.

    Args:
      kind: Name of the kind.
      needed: Entries that stay.
    """
    limit, spared = limit_bytes(kind), time.time() - KINDS[kind].spared_days * _DAY
    cached, needed_paths = entries(kind), {str(path) for path in needed}
    size = sum(entry.bytes for entry in cached)
    for entry in cached:
        if size <= limit:
            return
        if entry.path not in needed_paths and entry.used <= spared:
            remove(entry)
            size -= entry.bytes


def remove(entry: Entry) -> None:
    """Remove an entry and the neighboring files that begin with its name."""
    path = pathlib.Path(entry.path)
    with contextlib.suppress(OSError):
        if path.is_dir():
            shutil.rmtree(path)
        for file in path.parent.iterdir():
            if file.name == path.name or file.name.startswith(f'{path.name}.'):
                file.unlink(missing_ok=True)


def clear(kind: str) -> None:
    """Remove all entries of a kind.

    Raises:
      UserError: The folder cannot be removed.
    """
    try:
        shutil.rmtree(folder(kind))
    except FileNotFoundError:
        pass
    except OSError as error:
        raise UserError(f'{folder(kind)} cannot be removed: {error.strerror}') from error


def _size(path: pathlib.Path) -> int:
    if not path.is_dir():
        return path.stat().st_size
    files = (file for file in path.rglob('*') if file.is_file())
    return sum(file.stat().st_size for file in files)


def _origin(path: pathlib.Path) -> str:
    """Read the source of an entry; a compiled program's name begins with its function."""
    with contextlib.suppress(OSError, UnicodeDecodeError):
        return path.with_name(path.name + ORIGIN).read_text().strip()
    return path.name.partition('-')[0] if path.name.startswith('jit_') else ''
