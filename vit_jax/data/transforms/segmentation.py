"""Transforms for segmentation; masks, segments and boxes follow the pixels."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from vit_jax.data.records import OBJECTS, Record
from vit_jax.data.transforms import geometry
from vit_jax.data.transforms.geometry import check_annotations_stay, image_size
from vit_jax.data.transforms.pillow import (
    Fill,
    Size,
    check_fill,
    check_method,
    check_positive,
    height_width,
)
from vit_jax.data.transforms.registry import transform
from vit_jax.data.transforms.windows import scale_size, scale_size_down
from vit_jax.errors import UserError, check_choice

ATTEMPTS = 10  # draws to find a window with an object


@transform
def large_scale_jitter(
    size: Size, low: float = 0.1, high: float = 2.0, method: str = 'bilinear', fill: Fill = 0
) -> Callable[[Record, np.random.Generator], Record]:
    """Scale the image at random, then crop or pad it to `size`.

    The scale is uniform in `low` to `high` times the scale at which the image just fits into
    `size`; both sides are rounded down. Smaller images are padded at the right and bottom, where
    segments are void; larger ones are cropped at random. Objects without a pixel are dropped. If
    none remains, scale and window are drawn again, at most ten times in total.

    Ghiasi et al., 2021, arXiv:2012.07177, appendix A, as in the code of Mask2Former and EoMT.

    Args:
      size: Side in pixels, or (height, width).
      low, high: Smallest and largest scale.
      method: Resampling method, one of `pillow.METHODS`; masks always use nearest pixels.
      fill: Byte for the padding, or one per channel.

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
        jittered = draw(record, rng)
        for _ in range(ATTEMPTS - 1):
            if _has_objects(jittered) or not _has_objects(record):
                break
            jittered = draw(record, rng)
        return jittered

    return apply


def _has_objects(record: Record) -> bool:
    return any(len(record[name]) for name in OBJECTS if name in record)


@transform
def sliding_windows(
    size: int, most: int = 4, method: str = 'bilinear', rounding: str = 'nearest'
) -> Callable[[Record], Record]:
    """Resize the shorter side to `size`, and cut the image into squares along the longer one.

    The longer side is rounded to the nearest pixel as in EoMT's code, or 'down' as in transformers.

    The fewest windows that cover the image overlap evenly; `ops.sliding` merges their predictions.
    `image` becomes [most, size, size, C], with unused windows black. The record gets `starts`,
    int32 [most], the first row or column of each window, or -1; `tall`, whether windows are below
    each other; and `scaled_size` and `full_size`, int32 [2], the height and width of the resized
    and the original image.

    Raises:
      ValueError: for numbers below 1.
    """
    check_positive(size=size, most=most)
    check_method(method)
    check_choice('rounding', rounding, ('nearest', 'down'))
    scale = scale_size_down if rounding == 'down' else scale_size

    def apply(record: Record) -> Record:
        check_annotations_stay({k: value for k, value in record.items() if k != 'points'})
        full = image_size(record)
        height, width = scale(full, size, None)
        firsts = window_starts(max(height, width), size)
        if len(firsts) > most:
            raise UserError(
                f'an image of {full[1]} x {full[0]} pixels needs {len(firsts)} windows; raise '
                f'most={most}'
            )
        resized = geometry.resize(record, height, width, method)
        image, tall = resized['image'], full[0] > full[1]
        windows = np.zeros((most, size, size, image.shape[2]), image.dtype)
        for window, first in zip(windows, firsts, strict=False):
            along = slice(first, first + size)
            window[:] = image[along] if tall else image[:, along]
        starts = np.full(most, -1, np.int32)
        starts[: len(firsts)] = firsts
        return {
            **resized,
            'image': windows,
            'starts': starts,
            'tall': np.array(tall),
            'scaled_size': np.array([height, width], np.int32),
            'full_size': np.array(full, np.int32),
        }

    return apply


def window_starts(length: int, side: int) -> list[int]:
    """Return the first pixels of windows of `side` pixels that cover `length` pixels."""
    count = -(-length // side)
    return [i * (length - side) // max(count - 1, 1) for i in range(count)]
