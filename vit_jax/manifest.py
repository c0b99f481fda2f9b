"""What a folder of checkpoints holds: which steps are finished, and whether they are intact.

The manifest of a step lists the sha256 of every file. It is written last, so it is
also the mark of a finished step. Plain files only: no JAX, no Orbax.
"""

from __future__ import annotations

import hashlib
import json
import logging
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from vit_jax.workdir import write_text_atomic

FILE = 'manifest.json'
REJECTED = 'rejected'

_log = logging.getLogger(__name__)


class Unfinished(Exception):
    """A step that was never completed."""


class Damaged(Exception):
    """A step that is not what was written; the message names the file and the fault."""


def write(directory: Path, step: int) -> None:
    """Declares `directory` to be the finished `step`."""
    files = {name: [path.stat().st_size, _sha256(path)] for name, path in _walk(directory)}
    write_text_atomic(directory / FILE, json.dumps({'step': step, 'files': files}, indent=1))


def verify(directory: Path, items: tuple[str, ...] = ()) -> None:
    """Reads the files back and compares them with the manifest.

    Args:
      directory: of one step, named by its number.
      items: the subdirectories to read; all files if empty.

    Raises:
      Unfinished: if there is no manifest.
      Damaged: at the first file that is missing or differs.
    """
    for name, entry in _read(directory)['files'].items():
        if not items or name.split('/')[0] in items:
            _verify_file(directory / name, name, entry)


def steps(root: Path) -> list[int]:
    """The finished steps in ascending order; their files are not read."""
    return [step for step in _numbered(root) if _finished(root / str(step))]


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


def clear_newer(root: Path, step: int | None) -> None:
    """Makes way for the steps after `step` (None: for all).

    Unfinished steps are deleted, finished ones are moved to `rejected/`.
    """
    for path in root.glob('*.orbax-checkpoint-tmp*'):
        _log.warning('removing %s, left by a run that was killed while saving', path)
        shutil.rmtree(path)
    for newer in (n for n in _numbered(root) if step is None or n > step):
        path = root / str(newer)
        if not (path / FILE).exists():
            _log.warning('removing the unfinished checkpoint %s', path)
            shutil.rmtree(path)
        else:
            _set_aside(path)


def _set_aside(path: Path) -> None:
    place = path.parent / REJECTED / path.name
    _log.warning('moving %s to %s', path, place)
    shutil.rmtree(place, ignore_errors=True)
    place.parent.mkdir(exist_ok=True)
    path.rename(place)


def _numbered(root: Path) -> list[int]:
    names = [p.name for p in root.iterdir() if p.is_dir()] if root.is_dir() else []
    return sorted(int(n) for n in names if n.isdecimal() and n == str(int(n)))


def _finished(directory: Path) -> bool:
    try:
        _read(directory)
    except (Unfinished, Damaged):
        return False
    return True


def _read(directory: Path) -> dict[str, Any]:
    try:
        content = json.loads((directory / FILE).read_bytes())
        step, files = content['step'], dict(content['files'])
    except (FileNotFoundError, NotADirectoryError):
        raise Unfinished(f'no {FILE}: the save was never finished') from None
    except (ValueError, KeyError, TypeError) as error:
        raise Damaged(f'{FILE} is unreadable ({error})') from error
    if str(step) != directory.name:
        raise Damaged(f'{FILE} says step {step}: a copied or renamed directory')
    return {'step': step, 'files': files}


def _verify_file(path: Path, name: str, entry: Any) -> None:
    if not path.is_file():
        raise Damaged(f'{name} is missing')
    if (found := [path.stat().st_size, _sha256(path)]) != entry:
        raise Damaged(f'{name} has changed: size and sha256 are {found} instead of {entry}')


def _walk(directory: Path) -> Iterator[tuple[str, Path]]:
    for path in sorted(directory.rglob('*')):
        if path.is_file() and path.name != FILE:
            yield path.relative_to(directory).as_posix(), path


def _sha256(path: Path) -> str:
    with path.open('rb') as file:
        return hashlib.file_digest(file, 'sha256').hexdigest()
