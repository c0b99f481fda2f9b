"""What a folder of checkpoints holds: which steps are finished, and whether they are intact.

The manifest of a step lists the sha256 of every file. Plain files only: no JAX, no Orbax.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
from pathlib import Path

from vit_jax.storage import paths as storage

FILE = 'manifest.json'
REJECTED = 'rejected'

# Names that Orbax gives.
_UNFINISHED = '.orbax-checkpoint-tmp'
_COMMITTED = 'commit_success.txt'

_log = logging.getLogger(__name__)


class Unfinished(Exception):
    """A step that was never completed."""


class Damaged(Exception):
    """A step that is not what was written; the message names the file and the fault."""


def write(root: Path, step: int) -> None:
    """Lists the files of a step that Orbax has written and not yet committed.

    The manifest is part of what the commit makes visible: a rename, or in object storage the
    mark that Orbax puts when all else is there. Files directly in the step's directory are
    Orbax's own notes, which the commit still changes: nothing is restored from them and they
    are not listed.
    """
    directory = written(root, step)
    names = [name for name in storage.files(directory) if '/' in name]
    files = {name: _fingerprint(directory / name) for name in names}
    content = json.dumps({'step': step, 'files': files}, indent=1)
    storage.write_atomic(directory / FILE, content.encode())


def written(root: Path, step: int) -> Path:
    """Where Orbax has written a step that it has not yet committed."""
    return next(iter(root.glob(f'{step}{_UNFINISHED}*')), root / str(step))


def commit(directory: Path) -> None:
    """Marks a step that was copied as finished, as Orbax does."""
    storage.write_atomic(directory / _COMMITTED, b'')


def verify(directory: Path, items: tuple[str, ...] = ()) -> None:
    """Reads the files back and compares them with the manifest.

    Args:
      directory: of one step, named by its number.
      items: the subdirectories to read; all files if empty.

    Raises:
      Unfinished: if there is no manifest or no mark of Orbax's commit.
      Damaged: at the first file that is missing or differs.
    """
    for name, entry in _read(directory).items():
        if not items or name.split('/')[0] in items:
            _verify_file(directory / name, name, entry)


def steps(root: Path) -> list[int]:
    """The finished steps in ascending order; their files are not read."""
    return [step for step in _numbered(root) if _is_sound(root / str(step))]


def newest_intact(root: Path, items: tuple[str, ...] = ()) -> tuple[int | None, dict[int, Damaged]]:
    """The newest step whose `items` are intact, and the damaged ones that are newer."""
    damaged: dict[int, Damaged] = {}
    for step in reversed(_numbered(root)):
        try:
            verify(root / str(step), items)
            return step, damaged
        except Unfinished as fault:
            _log.warning('checkpoint %s/%d ignored: %s', root, step, fault)
        except Damaged as fault:
            _log.warning('checkpoint %s/%d ignored: %s', root, step, fault)
            damaged[step] = fault
    return None, damaged


def prune(root: Path, keep_last: int, keep_every: int) -> None:
    """Deletes finished steps but the newest `keep_last` and the multiples of `keep_every`."""
    for step in steps(root)[:-keep_last]:
        if not keep_every or step % keep_every:
            _delete(root / str(step))


def _delete(directory: Path) -> None:
    """A kill in the middle of the deletion leaves nothing that looks like a finished step."""
    if storage.is_remote(directory):
        (directory / _COMMITTED).unlink(missing_ok=True)
    else:
        directory = directory.rename(f'{directory}{_UNFINISHED}-deleted')
    storage.remove(directory)


def discard(root: Path, step: int) -> None:
    """Removes what a failed save has written; other processes may still be writing."""
    for path in root.glob(f'{step}{_UNFINISHED}*'):
        with contextlib.suppress(OSError):
            storage.remove(path)


def clear_newer(root: Path, step: int | None) -> None:
    """Makes way for the steps after `step` (None: for all).

    Unfinished steps are deleted, finished ones are moved to `rejected/`.
    """
    for path in root.glob(f'*{_UNFINISHED}*'):
        _log.warning('removing %s, left by a run that was killed while saving', path)
        storage.remove(path)
    for newer in (n for n in _numbered(root) if step is None or n > step):
        path = root / str(newer)
        if not _finished(path):
            _log.warning('removing the unfinished checkpoint %s', path)
            storage.remove(path)
        else:
            _set_aside(path)


def _set_aside(path: Path) -> None:
    place = path.parent / REJECTED / path.name
    _log.warning('moving %s to %s', path, place)
    if place.is_dir():
        storage.remove(place)
    if storage.is_remote(path):
        storage.copy(path, place)
        _delete(path)
    else:
        place.parent.mkdir(exist_ok=True)
        path.rename(place)


def _numbered(root: Path) -> list[int]:
    paths = root.iterdir() if root.is_dir() else ()
    numbered = (p for p in paths if p.name.isdecimal() and p.name == str(int(p.name)))
    return sorted(int(p.name) for p in numbered if p.is_dir())


def _finished(directory: Path) -> bool:
    return all((directory / name).is_file() for name in (FILE, _COMMITTED))


def _is_sound(directory: Path) -> bool:
    try:
        _read(directory)
    except (Unfinished, Damaged):
        return False
    return True


def _read(directory: Path) -> dict[str, str]:
    """The manifest's files: name -> fingerprint."""
    if not _finished(directory):
        raise Unfinished(f'no {FILE} or no {_COMMITTED}: the save was never finished')
    try:
        content = json.loads((directory / FILE).read_bytes())
        step, files = content['step'], dict(content['files'])
    except (ValueError, KeyError, TypeError) as error:
        raise Damaged(f'{FILE} is unreadable ({error})') from error
    if str(step) != directory.name:
        raise Damaged(f'{FILE} says step {step}: a copied or renamed directory')
    return files


def _verify_file(path: Path, name: str, entry: str) -> None:
    if not path.is_file():
        raise Damaged(f'{name} is missing')
    if (found := _fingerprint(path)) != entry:
        raise Damaged(f'{name} has changed since it was written: {found} instead of {entry}')


def _fingerprint(path: Path) -> str:
    with path.open('rb') as file:
        digest = hashlib.file_digest(file, 'sha256').hexdigest()
        return f'sha256 {digest}, {file.tell()} bytes'
