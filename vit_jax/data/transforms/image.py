"""Resizing, cropping and flipping of images, and of boxes, masks and points with them.

Sizes are an integer for squares, or (height, width). Resampling is Pillow's, antialiased when
it shrinks; the methods are nearest, box, bilinear, bicubic and lanczos. `geometry` documents how
boxes, masks and points follow.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from vit_jax.data.records import Record
from vit_jax.data.transforms import geometry
from vit_jax.data.transforms.arguments import (
    Size,
    check_method,
    check_positive,
    height_width,
    shares,
)
from vit_jax.data.transforms.movable import image_size
from vit_jax.data.transforms.registry import crops_at_once, transform
from vit_jax.data.transforms.windows import central_window, random_window, scaled
from vit_jax.errors import UserError

Apply = Callable[[Record], Record]
RandomApply = Callable[[Record, np.random.Generator], Record]


@transform
def resize(size: Size, method: str = 'bilinear') -> Apply:
    """Resize to `size`, without keeping the aspect ratio."""
    height, width = height_width(size)
    check_method(method)

    def apply(record: Record) -> Record:
        return geometry.resize(record, height, width, method)

    return apply


@transform
def resize_small(size: int, method: str = 'bilinear', max: int | None = None) -> Apply:
    """Resize the shorter side to `size`, keeping the aspect ratio.

    With `max`, the longer side gets at most so many pixels, and the shorter one fewer than
    `size` if needed.
    """
    check_positive(size=size, max=size if max is None else max)
    check_method(method)

    def apply(record: Record) -> Record:
        return geometry.resize(record, *scaled(image_size(record), size, max), method)

    return apply


@transform
def random_resize(
    sizes: tuple[int, ...], max: int | None = None, method: str = 'bilinear'
) -> RandomApply:
    """Resize by `resize_small` to a random one of `sizes` (Carion et al. 2020, A.4)."""
    if not isinstance(sizes, tuple) or not sizes:
        raise ValueError(f'{sizes=} must be a tuple, for example (480, 512, 544)')
    choices = [resize_small(size, method, max) for size in sizes]

    def apply(record: Record, rng: np.random.Generator) -> Record:
        return choices[rng.integers(len(choices))](record)

    return apply


@transform
@crops_at_once
def central_crop(size: Size) -> Apply:
    """Crop the middle of the image; UserError if it is smaller than `size`."""
    height, width = height_width(size)

    def apply(record: Record) -> Record:
        y, x = (pixels // 2 for pixels in _spare(record, height, width))
        return geometry.crop(record, y, x, height, width)

    return apply


@transform
@crops_at_once
def random_crop(size: Size) -> RandomApply:
    """Crop a uniformly random window of `size`; UserError if the image is smaller."""
    height, width = height_width(size)

    def apply(record: Record, rng: np.random.Generator) -> Record:
        y, x = (int(rng.integers(pixels + 1)) for pixels in _spare(record, height, width))
        return geometry.crop(record, y, x, height, width)

    return apply


@transform
@crops_at_once
def inception_crop(
    size: Size, area_min: float = 5, area_max: float = 100, method: str = 'bilinear'
) -> RandomApply:
    """Resize a random window of the image to `size` (Szegedy et al. 2015, section 6).

    The window has `area_min` to `area_max` percent of the image's area and an aspect ratio
    of 3/4 to 4/3, uniform in its logarithm. If ten draws do not fit, it is the largest window
    in the middle within those ratios.
    """
    height, width = height_width(size)
    check_method(method)
    area, ratios = shares(area_min, area_max), (3 / 4, 4 / 3)

    def apply(record: Record, rng: np.random.Generator) -> Record:
        whole = image_size(record)
        window = random_window(rng, whole, area, ratios) or central_window(whole, ratios)
        return geometry.resize(geometry.crop(record, *window), height, width, method)

    return apply


@transform
def pad_and_crop(pad: int) -> RandomApply:
    """Pad with black by `pad` pixels and crop the original size at random.

    The augmentation of He et al. (2016), section 4.2: pad 4 for 32 x 32 images.
    """
    check_positive(pad=pad)

    def apply(record: Record, rng: np.random.Generator) -> Record:
        y, x = int(rng.integers(2 * pad + 1)), int(rng.integers(2 * pad + 1))
        padded = geometry.pad(record, pad, pad, pad, pad)
        return geometry.crop(padded, y, x, *image_size(record))

    return apply


@transform
def flip() -> RandomApply:
    """Mirror left and right with probability 1/2."""

    def apply(record: Record, rng: np.random.Generator) -> Record:
        mirrored = geometry.flip(record)  # refuses a record whatever is drawn
        return mirrored if rng.random() < 0.5 else record

    return apply


def _spare(record: Record, height: int, width: int) -> tuple[int, int]:
    """The number of rows and columns outside of a window."""
    rows, columns = image_size(record)
    if rows < height or columns < width:
        raise UserError(
            f'the image has {rows} x {columns} pixels; enlarge it before, for example with '
            f"'resize_small({max(height, width)})'"
        )
    return rows - height, columns - width
