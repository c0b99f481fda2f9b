"""The augmentation of detectors."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from vit_jax.data.records import Record
from vit_jax.data.transforms import geometry
from vit_jax.data.transforms.arguments import check_positive
from vit_jax.data.transforms.image import random_resize
from vit_jax.data.transforms.movable import image_size
from vit_jax.data.transforms.registry import transform


@transform
def scale_and_crop(
    sizes: tuple[int, ...],
    max: int | None = None,
    first: tuple[int, ...] = (400, 500, 600),
    crop: tuple[int, int] = (384, 600),
    p: float = 0.5,
) -> Callable[[Record, np.random.Generator], Record]:
    """Resize to one of `sizes`; with probability `p` after cropping a random window.

    For the window the shorter side is resized to one of `first`, then a window at a random place is
    cropped, whose height and width are uniform from `crop[0]` to `crop[1]` pixels, or those of the
    image if it has fewer. `sizes` and `max` are those of `random_resize` (Carion et al. 2020, A.4;
    the defaults, and p, are those of the authors' code for sizes of 480 to 800 and a max of 1333).
    """
    whole, before = random_resize(sizes, max), random_resize(first)
    if not isinstance(crop, tuple) or len(crop) != 2:
        raise ValueError(f'{crop=} must be the least and the largest side of a window')
    check_positive(least=crop[0], largest=crop[1])
    if crop[0] > crop[1]:
        raise ValueError(f'{crop=} must be the least and the largest side of a window')
    if not 0 <= p <= 1:
        raise ValueError(f'{p=} must be in [0, 1]')

    def apply(record: Record, rng: np.random.Generator) -> Record:
        if rng.random() < p:
            record = _window(before(record, rng), rng, *crop)
        return whole(record, rng)

    return apply


def _window(record: Record, rng: np.random.Generator, least: int, largest: int) -> Record:
    """Crop a random window with sides in this range, limited by those of the image."""
    sides = [
        int(rng.integers(min(least, pixels), min(largest, pixels) + 1))
        for pixels in image_size(record)
    ]
    y, x = (
        int(rng.integers(pixels - side + 1))
        for pixels, side in zip(image_size(record), sides, strict=True)
    )
    return geometry.crop(record, y, x, *sides)
