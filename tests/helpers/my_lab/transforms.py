"""A transform that moves pixels and boxes together."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from vit_jax.data.records import Record
from vit_jax.data.transforms import transform


@transform
def upside_down() -> Callable[[Record, np.random.Generator], Record]:
    """Turn the image upside down, half of the time."""

    def apply(record: Record, rng: np.random.Generator) -> Record:
        if rng.random() < 0.5:
            return record
        height = record['image'].shape[0]
        moved = {**record, 'image': record['image'][::-1]}
        if 'boxes' in record:
            x0, y0, x1, y1 = record['boxes'].T
            moved['boxes'] = np.stack([x0, height - y1, x1, height - y0], axis=1)
        if 'points' in record:
            moved['points'] = record['points'] * [1, -1] + [0, height]
        return moved

    return apply
