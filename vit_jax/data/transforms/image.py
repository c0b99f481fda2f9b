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
    Fill,
    Size,
    check_fill,
    check_method,
    check_positive,
    height_width,
    shares,
)
from vit_jax.data.transforms.movable import image_size
from vit_jax.data.transforms.registry import crops_at_once, in_pixels, transform
from vit_jax.data.transforms.windows import (
    central_window,
    random_window,
    scaled,
    scaled_down,
)
from vit_jax.errors import UserError, check_choice

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
def resize_small(
    size: int, method: str = 'bilinear', max: int | None = None, rounding: str = 'nearest'
) -> Apply:
    """Resize the shorter side to `size`, keeping the aspect ratio.

    With `max`, the longer side gets at most so many pixels, and the shorter one fewer than
    `size` if needed. The longer side is rounded to the nearest pixel, or 'down' as in torchvision,
    timm and transformers.
    """
    check_positive(size=size, max=size if max is None else max)
    check_method(method)
    check_choice('rounding', rounding, ('nearest', 'down'))
    scale = scaled_down if rounding == 'down' else scaled

    def apply(record: Record) -> Record:
        return geometry.resize(record, *scale(image_size(record), size, max), method)

    return apply


@transform
def resize_cover(size: Size, method: str = 'bilinear') -> Apply:
    """Resize to the smallest image of the same aspect ratio that covers `size`.

    Both sides are rounded to the nearest pixel, as timm does for rectangles.
    """
    return _resize_by(min, size, method)


@transform
def resize_within(size: Size, method: str = 'bilinear') -> Apply:
    """Resize to the largest image of the same aspect ratio within `size`.

    Both sides are rounded to the nearest pixel, as timm does for `crop_mode='border'`.
    """
    return _resize_by(max, size, method)


def _resize_by(choose: Callable[[float, float], float], size: Size, method: str) -> Apply:
    """Divide both sides by one of their two ratios to those of `size`."""
    height, width = height_width(size)
    check_method(method)

    def apply(record: Record) -> Record:
        sides = image_size(record)
        ratio = choose(sides[0] / height, sides[1] / width)
        rows, columns = (max(1, round(side / ratio)) for side in sides)
        return geometry.resize(record, rows, columns, method)

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
def central_crop(size: Size, rounding: str = 'down', fill: Fill | None = None) -> Apply:
    """Crop the middle of the image; UserError if it is smaller than `size` and there is no `fill`.

    Half a pixel of the offset is rounded 'down' as in transformers, or to the 'even' pixel as in
    torchvision and timm. With `fill`, a byte or one for each channel, a smaller image is padded to
    `size` by these, in its middle as that code does it.
    """
    height, width = height_width(size)
    check_choice('rounding', rounding, ('down', 'even'))
    check_fill(fill)

    def apply(record: Record) -> Record:
        if fill is None:
            y, x = (_half(pixels, rounding) for pixels in _spare(record, height, width))
            return geometry.crop(record, y, x, height, width)
        return _cropped_or_padded(record, (height, width), rounding, fill)

    return apply


def _cropped_or_padded(record: Record, size: tuple[int, int], rounding: str, fill: Fill) -> Record:
    """The middle of an image, padded by `fill` where it is smaller than `size`."""
    sides = image_size(record)
    kept = [min(new, old) for new, old in zip(size, sides, strict=True)]
    corner = [_half(old - new, rounding) for new, old in zip(kept, sides, strict=True)]
    lacking = [new - old for new, old in zip(size, kept, strict=True)]
    if kept != list(sides):
        record = geometry.crop(record, corner[0], corner[1], kept[0], kept[1])
    if not any(lacking):
        return record
    # transformers rounds the offset of the image in its padding up.
    top, left = (n // 2 if rounding == 'even' else -(-n // 2) for n in lacking)
    return geometry.pad(record, top, lacking[0] - top, left, lacking[1] - left, fill)


def _half(pixels: int, rounding: str) -> int:
    """Half of a number of spare rows or columns; of halves, `round` takes the even neighbor."""
    return round(pixels / 2) if rounding == 'even' else pixels // 2


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
@in_pixels(pad=4 / 32)
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
