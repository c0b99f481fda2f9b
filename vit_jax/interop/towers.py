"""One tower of a checkpoint that has two: `FILE:vision` or `FILE:text`."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from vit_jax.config.origin import TOWERS
from vit_jax.errors import UserError
from vit_jax.interop.files import Flat

_PREFIXES = {
    'vision': ('vision_model.', 'visual_projection.'),
    'text': ('text_model.', 'text_projection.'),
}


def split(place: str | os.PathLike[str]) -> tuple[str, str]:
    """The place of a checkpoint, and the tower behind it; empty if none is named."""
    path = os.fspath(place)
    head, colon, tail = path.rpartition(':')
    return (head, tail) if colon and head and tail in TOWERS else (path, '')


def take(flat: Flat, extra: Mapping[str, Any], tower: str) -> tuple[Flat, dict[str, Any]]:
    """The arrays of a tower, its projection included, and its part of config.json.

    Args:
      flat, extra: as `files.read_arrays` returns them.
      tower: one of TOWERS.

    Raises:
      UserError: if there is no such tower.
    """
    part = {name: array for name, array in flat.items() if name.startswith(_PREFIXES[tower])}
    if not part:
        found = ', '.join(sorted({name.partition('.')[0] for name in flat})[:5])
        raise UserError(f'there is no tower {tower!r} in the file (it holds: {found})')
    configs = {f'{name}_config' for name in TOWERS}
    rest = {key: value for key, value in extra.items() if key not in configs}
    own = extra.get(f'{tower}_config') or {}
    kind = {'model_type': f'{extra["model_type"]}_{tower}_model'} if 'model_type' in extra else {}
    return part, {**rest, **kind, **own}
