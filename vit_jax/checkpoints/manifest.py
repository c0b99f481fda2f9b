"""Integrity of saved steps: manifests, verification, pruning, and cleanup after crashes.

A step's manifest lists the 128-bit XXH3 digest of every file. It detects damage, not tampering, and
is ten times as fast as sha256, which older manifests use. Needs neither JAX nor Orbax.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import re
import time
from collections.abc import Callable, Collection, Iterator
from pathlib import Path

import xxhash

from vit_jax.storage import paths, run_folder
from vit_jax.storage.run_folder import REJECTED, Damaged, Unfinished

# The first one is written.
_DIGESTS: dict[str, Callable] = {'xxh3_128': xxhash.xxh3_128, 'sha256': hashlib.sha256}
_ATTEMPTS = 5  # to remove what threads are still writing
_RESTART = 'restart-'  # prefix of folders in `rejected/` with the steps before a --restart

# Orbax appends this to the name of a step that it is writing.
_UNFINISHED = '.orbax-checkpoint-tmp'
_TEMPORARY = re.compile(rf'\d+{re.escape(_UNFINISHED)}(-(\d+|deleted))?')

# Each process writes an item's arrays to its own folder; then Orbax lists all of them here.
_PROCESS, _MERGED = 'ocdbt.process_', 'manifest.ocdbt'

_log = logging.getLogger(__name__)


def write(root: Path, step: int) -> None:
    """Write the manifest of a step that Orbax has written but not yet committed.

    The commit makes the manifest visible with the rest: by a rename, or in object storage by
    Orbax's final mark. Files directly in the step's directory are not listed: they are Orbax's own
    metadata, which the commit still changes and no restore reads.
    """
    directory = uncommitted_step(root, step)
    names = [name for name in paths.files(directory) if '/' in name]
    files = {name: _fingerprint(directory / name) for name in names}
    content = json.dumps({'step': step, 'files': files}, indent=1)
    paths.write_atomic(directory / run_folder.MANIFEST, content.encode())


def uncommitted_step(root: Path, step: int) -> Path:
    """Return the folder of a step that Orbax has written but not yet committed."""
    return next(_list_uncommitted(root, f'{step}{_UNFINISHED}'), root / str(step))


def _list_uncommitted(root: Path, prefix: str = '') -> Iterator[Path]:
    """List folders of uncommitted steps whose names start with `prefix`.

    No glob: epath would treat the characters `[*?` in the run folder's name as a pattern.
    """
    for entry in root.iterdir() if root.is_dir() else ():
        if _TEMPORARY.fullmatch(entry.name) and entry.name.startswith(prefix):
            yield entry


def commit(directory: Path) -> None:
    """Mark a copied step as finished, as Orbax does."""
    paths.write_atomic(directory / run_folder.COMMITTED, b'')


def verify(directory: Path, items: tuple[str, ...] = ()) -> None:
    """Read the files back and compare them with the manifest.

    Args:
      directory: Folder of one step, named by its number.
      items: Subdirectories to verify; all if empty.

    Raises:
      Unfinished: if the manifest or the mark of Orbax's commit is missing.
      Damaged: at the first missing or changed file.
    """
    files = run_folder.read_manifest(directory)
    for name in files:
        item, _, path_in_item = name.partition('/')
        if path_in_item.startswith(_PROCESS) and (merged := f'{item}/{_MERGED}') not in files:
            raise Damaged(f'{merged} was never written: its arrays cannot be found')
    for name, entry in files.items():
        if not items or name.split('/')[0] in items:
            _verify_file(directory / name, name, entry)


def _verify_file(path: Path, name: str, entry: str) -> None:
    if not path.is_file():
        raise Damaged(f'{name} is missing')
    # A sparse file of any size would otherwise be read to its end.
    if not paths.is_remote(path) and not entry.endswith(f', {(size := path.stat().st_size)} bytes'):
        raise Damaged(f'{name} has changed since it was written: {size} bytes instead of {entry}')
    if (digest := entry.partition(' ')[0]) not in _DIGESTS:
        raise Damaged(f'the digest of {name}, {digest!r}, is not one of {", ".join(_DIGESTS)}')
    if (fingerprint := _fingerprint(path, digest)) != entry:
        raise Damaged(f'{name} has changed since it was written: {fingerprint} instead of {entry}')


def _fingerprint(path: Path, name: str = next(iter(_DIGESTS))) -> str:
    with paths.open_file(path) as file:
        digest = hashlib.file_digest(file, _DIGESTS[name]).hexdigest()
        return f'{name} {digest}, {file.tell()} bytes'


def newest_intact(root: Path, items: tuple[str, ...] = ()) -> tuple[int | None, dict[int, Damaged]]:
    """Return the newest step whose `items` are intact, and the newer, damaged steps."""
    damaged: dict[int, Damaged] = {}
    for step in reversed(run_folder.step_numbers(root)):
        try:
            verify(root / str(step), items)
            return step, damaged
        except Unfinished as fault:
            _log.warning('checkpoint %s/%d ignored: %s', root, step, fault)
        except Damaged as fault:
            _log.warning('checkpoint %s/%d ignored: %s', root, step, fault)
            damaged[step] = fault
    return None, damaged


def prune(root: Path, keep_last: int, keep_every: int, retained: Collection[int | None]) -> None:
    """Delete finished steps except the newest `keep_last`, multiples of `keep_every`, `retained`.

    Orbax's `CheckpointManager` cannot do this: it counts steps without regard to their manifests,
    deletes them in place, where a kill leaves half a step that looks finished, and does not
    support s3://.
    """
    for step in run_folder.finished_steps(root)[:-keep_last]:
        if step not in retained and (not keep_every or step % keep_every):
            _delete(root / str(step))


def _delete(directory: Path) -> None:
    """Delete a step so that an interruption leaves nothing that looks finished."""
    if paths.is_remote(directory):
        (directory / run_folder.COMMITTED).unlink(missing_ok=True)
    else:
        directory = directory.rename(f'{directory}{_UNFINISHED}-deleted')
    paths.remove(directory)


def discard(root: Path, step: int) -> None:
    """Remove the files of a failed save; its threads or other processes may still be writing."""
    for attempt in range(_ATTEMPTS):
        remaining = list(_list_uncommitted(root, f'{step}{_UNFINISHED}'))
        if not remaining:
            return
        time.sleep(0.1 * attempt)
        for path in remaining:
            with contextlib.suppress(OSError):
                paths.remove(path)


def remains(root: Path) -> list[str]:
    """List folders of `root` that may be remains of saved steps, including `rejected/`.

    An interrupted save to object storage leaves a folder named by its step, which lacks both marks.
    """
    steps = [path for n in run_folder.step_numbers(root) if paths.files(path := root / str(n))]
    if paths.is_remote(root):
        steps = [path for path in steps if run_folder.is_marked(path)]
    return [path.relative_to(root).as_posix() for path in (*steps, *_list_rejected(root))]


def clear_newer(root: Path, step: int | None) -> None:
    """Move the steps after `step` (None: all) to `rejected/`.

    Only folders that cannot be steps are deleted: Orbax's temporary and empty ones.
    """
    for path in list(_list_uncommitted(root)):
        _log.warning('removing %s, left by a run that was killed while saving', path)
        paths.remove(path)
    for newer in (n for n in run_folder.step_numbers(root) if step is None or n > step):
        path = root / str(newer)
        if not paths.files(path):
            _log.warning('removing the empty checkpoint %s', path)
            paths.remove(path)
        else:
            _move(path, _find_unused_path(root / REJECTED / path.name))


def set_all_aside(root: Path) -> Path:
    """Move all steps, also from `rejected/`, to a new folder in `rejected/`; return it.

    So a later start does not mistake them for remains of its run.
    """
    number = 1
    while (aside := root / REJECTED / f'{_RESTART}{number}').is_dir():
        number += 1
    for step in run_folder.step_numbers(root):
        _move(root / str(step), aside / str(step))
    for path in _list_rejected(root):
        _move(path, _find_unused_path(aside / path.name))
    return aside


def _list_rejected(root: Path) -> list[Path]:
    folder = root / REJECTED
    entries = list(folder.iterdir()) if folder.is_dir() else []
    folders = (p for p in entries if p.is_dir() and not p.name.startswith(_RESTART))
    return sorted(folders, key=lambda path: path.name)


def _find_unused_path(path: Path) -> Path:
    """Return the path, with a number appended if it exists already."""
    number, candidate = 1, path
    while candidate.is_dir():
        number += 1
        candidate = path.with_name(f'{path.name}-{number}')
    return candidate


def _move(path: Path, target: Path) -> None:
    _log.warning('moving %s to %s', path, target)
    if paths.is_remote(path):
        paths.copy(path, target)
        _delete(path)
    else:
        target.parent.mkdir(parents=True, exist_ok=True)
        path.rename(target)
