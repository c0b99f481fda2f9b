"""The folder of one saved step: its files, and its finished state.

variables/           the parameters, their average and other collections
training/            the optimizer's state and the rest
meta/                JSON: metadata of the run
manifest.json        the sha256 of every file of these items, written before the commit
commit_success.txt   the mark of Orbax's commit

A step that lacks one of the last two was never finished. Plain files only: no JAX, no Orbax.
"""

from __future__ import annotations

import math
from typing import Any

from vit_jax.errors import Unfit
from vit_jax.storage import paths

VARIABLES, TRAINING, META = 'variables', 'training', 'meta'
MANIFEST = 'manifest.json'
COMMITTED = 'commit_success.txt'


class Unfinished(Exception):
    """A step that was never completed."""


class Damaged(Exception):
    """A step that differs from what was written; the message names the file and the fault."""


def numbered(root: paths.Path) -> list[int]:
    """All steps in a folder of checkpoints, finished or not, in ascending order."""
    entries = root.iterdir() if root.is_dir() else ()
    numbers = (p for p in entries if p.name.isdecimal() and p.name == str(int(p.name)))
    return sorted(int(p.name) for p in numbers if p.is_dir())


def finished(root: paths.Path) -> list[int]:
    """The finished steps in ascending order; their files are not read."""
    return [step for step in numbered(root) if _has_manifest(root / str(step))]


def is_finished(directory: paths.Path) -> bool:
    """Whether the step was saved completely."""
    return all((directory / name).is_file() for name in (MANIFEST, COMMITTED))


def is_marked(directory: paths.Path) -> bool:
    """Whether the step has one of the two marks, so that it may once have been finished."""
    return any((directory / name).is_file() for name in (MANIFEST, COMMITTED))


def read_manifest(directory: paths.Path) -> dict[str, str]:
    """The fingerprint of every file of the step's items, by its name.

    Raises:
      Unfinished: if the step was not saved completely.
      Damaged: if the manifest cannot be read, or belongs to another step.
    """
    if not is_finished(directory):
        raise Unfinished(f'no {MANIFEST} or no {COMMITTED}: the save was never finished')
    try:
        content = paths.parse_json(paths.read_bytes(directory / MANIFEST))
        step, files = content['step'], dict(content['files'])
    except (ValueError, KeyError, TypeError, Unfit) as error:
        raise Damaged(f'{MANIFEST} is unreadable ({error})') from error
    if leading := [name for name in files if not paths.stays_inside(name)]:
        raise Damaged(f'{MANIFEST} lists {leading[0]!r}, which is outside of the step')
    if str(step) != directory.name:
        raise Damaged(f'{MANIFEST} says step {step}: a copied or renamed directory')
    return files


def read_meta(directory: paths.Path) -> dict[str, Any]:
    """The run's metadata at this step; {} if that file is missing."""
    text = paths.read_text(directory / META / 'metadata')
    return {} if text is None else paths.parse_json(text)


def count_parameters(directory: paths.Path) -> int | None:
    """Number of parameters, from the shapes in Orbax's metadata; None if that file is missing."""
    text = paths.read_text(directory / VARIABLES / '_METADATA')
    if text is None:
        return None
    shapes = [
        entry['value_metadata']['write_shape']
        for entry in paths.parse_json(text)['tree_metadata'].values()
        if entry['key_metadata'][0]['key'] == 'params'
    ]
    return sum(math.prod(shape) for shape in shapes)


def _has_manifest(directory: paths.Path) -> bool:
    try:
        read_manifest(directory)
    except (Unfinished, Damaged):
        return False
    return True
