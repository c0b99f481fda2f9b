"""RandAugment as used by DeiT, Swin and MAE: larger magnitudes are always stronger.

Fifteen of the operations of `randaugment`, without cutout. Posterize and solarize get stronger with
the magnitude, and factors of color, contrast, brightness and sharpness are above or below 1. As in
timm, where `randaugment_increasing(2, 9)` is 'rand-m9-mstd0.5-inc1', each operation draws its own
magnitude, and whether it is applied at all. Uncovered areas are gray; in timm they have the mean
color of the data set.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from PIL import Image

from vit_jax.data.records import Record
from vit_jax.data.transforms.movable import check_cut
from vit_jax.data.transforms.randaugment import Moved, Operation, make_operations, operate
from vit_jax.data.transforms.registry import transform

SHIFT = 0.45  # of the width at magnitude 10, or of the height


@transform
def randaugment_increasing(
    num_layers: int = 2, magnitude: float = 9, std: float = 0.5, p: float = 0.5
) -> Callable[[Record, np.random.Generator], Record]:
    """Apply `num_layers` operations, each drawn from all fifteen, with probability `p`.

    Args:
      num_layers: operations an image.
      magnitude: mean of the normal distribution that an operation's magnitude is drawn from, 0 to
        10; draws are clipped to the same range.
      std: its standard deviation.
      p: probability of each operation.
    """
    if isinstance(num_layers, bool) or not isinstance(num_layers, int) or num_layers < 1:
        raise ValueError(f'{num_layers=} must be a positive integer')
    for name, value, most in (('magnitude', magnitude, 10), ('std', std, 10), ('p', p, 1)):
        if not isinstance(value, int | float) or not 0 <= value <= most:
            raise ValueError(f'{name}={value!r} must be a number from 0 to {most}')
    operations = tuple(increasing_operations().values())

    def apply(record: Record, rng: np.random.Generator) -> Record:
        check_cut(record)  # refuses a record whatever is drawn
        for choice in rng.integers(len(operations), size=num_layers):
            if rng.random() < p:
                level = float(np.clip(rng.normal(magnitude, std), 0, 10)) / 10
                record = operate([operations[choice]], record, level, rng)
        return record

    return apply


def increasing_operations() -> dict[str, Operation]:
    """The fifteen operations by name: those of `randaugment`, some at other levels."""
    found = make_operations(translate=0, cutout=0)
    del found['cutout']
    # At level 1 they keep 4 bits, and the pixels below 256; reversed, they do so at level 0.
    found['posterize'] = _reversed(found['posterize'], 4)
    found['solarize'] = _reversed(found['solarize'], 256)
    for name in ('color', 'contrast', 'brightness', 'sharpness'):
        found[name] = _either_way(found[name])
    for name, axis in (('translate_x', 0), ('translate_y', 1)):
        found[name] = _relative(name, axis)
    return found


def _reversed(operation: Operation, steps: int) -> Operation:
    """Reverse the levels of an operation, in `steps` steps, rounded down."""
    return lambda image, level, rng: operation(image, 1 - int(steps * level) / steps, rng)


def _either_way(operation: Operation) -> Operation:
    """Draw 1 - 0.9 level or 1 + 0.9 level for an operation with factors from 0.1 to 1.9."""

    def apply(image: Image.Image, level: float, rng: np.random.Generator) -> Moved:
        sign = 1 if rng.random() < 0.5 else -1
        return operation(image, (1 + sign * level) / 2, rng)

    return apply


def _relative(name: str, axis: int) -> Operation:
    """A shift by a share of the image's side."""

    def apply(image: Image.Image, level: float, rng: np.random.Generator) -> Moved:
        shift = make_operations(translate=round(SHIFT * image.size[axis]), cutout=0)[name]
        return shift(image, level, rng)

    return apply
