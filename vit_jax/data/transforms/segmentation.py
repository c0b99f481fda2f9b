"""Transforms of images for segmentation, in which masks, segments and boxes follow the pixels."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from vit_jax.data.records import OBJECTS, Record
from vit_jax.data.transforms import geometry
from vit_jax.data.transforms.geometry import image_size
from vit_jax.data.transforms.pillow import Fill, Size, check_fill, check_method, height_width
from vit_jax.data.transforms.registry import transform

ATTEMPTS = 10  # to find a window with an object


@transform
def large_scale_jitter(
    size: Size, low: float = 0.1, high: float = 2.0, method: str = 'bilinear', fill: Fill = 0
) -> Callable[[Record, np.random.Generator], Record]:
    """Scale the image at random, then crop or pad it to `size`.

    The scale is uniform in `low` to `high` times that at which the image just fits into `size`, and
    both sides are rounded down. Smaller images are padded at the right and the bottom, where
    segments are void; of larger ones a random window is taken. Objects without a pixel are dropped.
    If none is left, scale and window are drawn again, at most ten times in all.

    Ghiasi et al., 2021, arXiv:2012.07177, appendix A, as in the code of Mask2Former and EoMT.

    Args:
      size: pixels of a side, or (height, width).
      low, high: the least and the greatest scale.
      method: resampling, one of `pillow.METHODS`; masks always take their nearest pixel.
      fill: a byte for the padding, or one for each channel.

    Raises:
      ValueError: unless 0 < `low` <= `high`.
    """
    height, width = height_width(size)
    if not 0 < low <= high:
        raise ValueError(f'{low=} must be positive and at most {high=}')
    check_method(method)
    check_fill(fill)

    def draw(record: Record, rng: np.random.Generator) -> Record:
        sides = image_size(record)
        scale = min(height / sides[0], width / sides[1]) * rng.uniform(low, high)
        rows, columns = (max(1, int(side * scale)) for side in sides)
        record = geometry.resize(record, rows, columns, method)
        record = geometry.pad(
            record, 0, max(0, height - rows), 0, max(0, width - columns), fill=fill
        )
        y, x = (int(rng.integers(max(0, n) + 1)) for n in (rows - height, columns - width))
        return geometry.crop(record, y, x, height, width)

    def apply(record: Record, rng: np.random.Generator) -> Record:
        made = draw(record, rng)
        for _ in range(ATTEMPTS - 1):
            if _has_objects(made) or not _has_objects(record):
                break
            made = draw(record, rng)
        return made

    return apply


def _has_objects(record: Record) -> bool:
    return any(len(record[name]) for name in OBJECTS if name in record)
