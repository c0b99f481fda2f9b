"""The tower for images of a checkpoint that also has one for texts: `FILE:vision`.

`FILE:text` is refused: no model here is a tower for texts alone.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from vit_jax.config.origin import TOWERS
from vit_jax.errors import UserError
from vit_jax.interop.files import Flat

_PREFIXES = ('vision_model.', 'visual_projection.')
_NO_TEXTS = (
    'no model here is a tower for texts alone: a SigLIP is read whole, without :text, and '
    "config.init.select='text' takes its tower; that of a CLIP has causal attention and is not read"
)


def split(place: str | os.PathLike[str]) -> tuple[str, str]:
    """The place of a checkpoint, and the tower behind it; empty if none is named."""
    path = os.fspath(place)
    head, colon, tail = path.rpartition(':')
    return (head, tail) if colon and head and tail in TOWERS else (path, '')


def take(flat: Flat, extra: Mapping[str, Any], tower: str) -> tuple[Flat, dict[str, Any]]:
    """The arrays of the tower for images, its projection included, and its part of config.json.

    Args:
      flat, extra: as `files.read_arrays` returns them.
      tower: one of TOWERS.

    Raises:
      UserError: if there is no such tower, or it is for texts.
    """
    if tower == 'text':
        raise UserError(_NO_TEXTS)
    part = {name: array for name, array in flat.items() if name.startswith(_PREFIXES)}
    if not part:
        found = ', '.join(sorted({name.partition('.')[0] for name in flat})[:5])
        raise UserError(f'there is no tower {tower!r} in the file (it holds: {found})')
    configs = {f'{name}_config' for name in TOWERS}
    rest = {key: value for key, value in extra.items() if key not in configs}
    own = extra.get('vision_config') or {}
    kind = {'model_type': f'{extra["model_type"]}_vision_model'} if 'model_type' in extra else {}
    return part, {**rest, **kind, **own}
