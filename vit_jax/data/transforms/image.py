"""Resizing, cropping, flipping and cutting of images into patches, and changes of pixels.

Sizes are an integer for squares, or (height, width). Resampling is Pillow's, antialiased when
shrinking; the methods are nearest, box, bilinear, bicubic, lanczos and hamming. `geometry`
documents how boxes, masks and points follow.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np

from vit_jax.array_types import Float, UInt8
from vit_jax.data.records import Record
from vit_jax.data.transforms import geometry
from vit_jax.data.transforms.geometry import image_size
from vit_jax.data.transforms.pillow import (
    Fill,
    Size,
    area_shares,
    check_fill,
    check_method,
    check_positive,
    height_width,
    require_bytes,
)
from vit_jax.data.transforms.registry import crops_at_once, in_pixels, transform
from vit_jax.data.transforms.windows import (
    central_window,
    random_window,
    scale_size,
    scale_size_down,
)
from vit_jax.errors import UserError, check_choice

Apply = Callable[[Record], Record]
RandomApply = Callable[[Record, np.random.Generator], Record]
Pixels = UInt8[np.ndarray, 'H W C']


@transform
def resize(size: Size, method: str = 'bilinear') -> Apply:
    """Resize to `size`, without keeping the aspect ratio.

    Boxes, masks and points move with the image.

    Args:
      size: Side in pixels, or (height, width).
      method: Resampling method, one of `pillow.METHODS`; masks always use nearest pixels.

    Raises:
      ValueError: for sides below 1, or an unknown method.
    """
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

    With `max`, the longer side has at most `max` pixels, and the shorter one fewer than `size` if
    necessary. The longer side is rounded to the nearest pixel, or 'down' as in torchvision, timm
    and transformers.
    """
    check_positive(size=size, max=size if max is None else max)
    check_method(method)
    check_choice('rounding', rounding, ('nearest', 'down'))
    scale = scale_size_down if rounding == 'down' else scale_size

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
    """Divide both sides by the ratio to `size` that `choose` selects."""
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
    """Resize by `resize_small` to a random one of `sizes` (Carion et al. 2020, A.4).

    Raises:
      ValueError: if `sizes` is not a tuple, or empty.
    """
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

    Half pixels of the offset are rounded 'down' as in transformers, or to the 'even' pixel as in
    torchvision and timm. With `fill`, a byte or one per channel, a smaller image is padded to
    `size`, and centered like in these packages.
    """
    height, width = height_width(size)
    check_choice('rounding', rounding, ('down', 'even'))
    check_fill(fill)

    def apply(record: Record) -> Record:
        if fill is None:
            y, x = (_half(pixels, rounding) for pixels in _spare_pixels(record, height, width))
            return geometry.crop(record, y, x, height, width)
        return _crop_or_pad(record, (height, width), rounding, fill)

    return apply


def _crop_or_pad(record: Record, size: tuple[int, int], rounding: str, fill: Fill) -> Record:
    """Take the middle of an image, padded by `fill` where it is smaller than `size`."""
    sides = image_size(record)
    cropped = [min(new, old) for new, old in zip(size, sides, strict=True)]
    corner = [_half(old - new, rounding) for new, old in zip(cropped, sides, strict=True)]
    lacking = [new - old for new, old in zip(size, cropped, strict=True)]
    if cropped != list(sides):
        record = geometry.crop(record, corner[0], corner[1], cropped[0], cropped[1])
    if not any(lacking):
        return record
    # transformers rounds the offset of the image in its padding up.
    top, left = (n // 2 if rounding == 'even' else -(-n // 2) for n in lacking)
    return geometry.pad(record, top, lacking[0] - top, left, lacking[1] - left, fill)


def _half(pixels: int, rounding: str) -> int:
    """Halve a number of spare rows or columns; `round` rounds halves to even."""
    return round(pixels / 2) if rounding == 'even' else pixels // 2


@transform
@crops_at_once
def random_crop(size: Size) -> RandomApply:
    """Crop a uniformly random window of `size`; UserError if the image is smaller."""
    height, width = height_width(size)

    def apply(record: Record, rng: np.random.Generator) -> Record:
        y, x = (int(rng.integers(pixels + 1)) for pixels in _spare_pixels(record, height, width))
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
    area, ratios = area_shares(area_min, area_max), (3 / 4, 4 / 3)

    def apply(record: Record, rng: np.random.Generator) -> Record:
        size_of_image = image_size(record)
        window = random_window(rng, size_of_image, area, ratios) or central_window(
            size_of_image, ratios
        )
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
        geometry.check_movable(record, padded=False)  # for any draw
        return geometry.flip(record) if rng.random() < 0.5 else record

    return apply


def _spare_pixels(record: Record, height: int, width: int) -> tuple[int, int]:
    """Return the number of rows and columns outside of a window."""
    rows, columns = image_size(record)
    if rows < height or columns < width:
        raise UserError(
            f'the image has {columns} x {rows} pixels; enlarge it first, for example with '
            f"'resize_small({max(height, width)})'"
        )
    return rows - height, columns - width


@transform
def drop_alpha() -> Callable[[Record], Record]:
    """Ignore transparency when decoding files, instead of composing the image over white.

    This is how timm and transformers read files. Its position among the transforms is irrelevant.
    """
    return lambda record: record


@transform
def random_erasing(
    p: float = 0.25, area_min: float = 2, area_max: float = 33
) -> Callable[[Pixels, np.random.Generator], Pixels]:
    """Fill a random window with random bytes, with probability `p` (Zhong et al. 2020).

    The window has `area_min` to `area_max` percent of the area and an aspect ratio of 0.3 to
    3.3; if ten draws do not fit, the image is unchanged. Boxes and masks of hidden objects stay.

    Raises:
      ValueError: if `p` or an area is out of range.
    """
    if not 0 <= p <= 1:
        raise ValueError(f'{p=} must be in [0, 1]')
    area = area_shares(area_min, area_max)

    def apply(image: Pixels, rng: np.random.Generator) -> Pixels:
        require_bytes(image)
        if rng.random() >= p:
            return image
        window = random_window(rng, image.shape[:2], area, (0.3, 3.3))
        if window is None:
            return image
        y, x, h, w = window
        image = image.copy()
        image[y : y + h, x : x + w] = rng.integers(0, 256, (h, w, image.shape[2]), np.uint8)
        return image

    return apply


@transform
def value_range(low: float, high: float) -> Callable[[Pixels], Float[np.ndarray, 'H W C']]:
    """Map bytes 0..255 to float32 low..high, on the host.

    Tasks do this on the device, with a quarter of the transfer; use this transform for other
    purposes.

    Raises:
      ValueError: unless `low` < `high`.
    """
    if not low < high:
        raise ValueError(f'{low=} must be less than {high=}')

    def apply(image: Pixels) -> Float[np.ndarray, 'H W C']:
        require_bytes(image)
        return image.astype(np.float32) * np.float32((high - low) / 255) + np.float32(low)

    return apply


@transform
def scale_and_crop(
    sizes: tuple[int, ...],
    max: int | None = None,
    first: tuple[int, ...] = (400, 500, 600),
    crop: tuple[int, int] = (384, 600),
    p: float = 0.5,
) -> Callable[[Record, np.random.Generator], Record]:
    """Resize to one of `sizes`; with probability `p` after cropping a random window.

    For the window the shorter side is resized to one of `first`, then a window at a random position
    is cropped, whose height and width are uniform from `crop[0]` to `crop[1]` pixels, limited by
    the image. `sizes` and `max` are passed to `random_resize` (Carion et al. 2020, A.4; the
    defaults come from the authors' code for sizes of 480 to 800 and a max of 1333).

    Raises:
      ValueError: for a `crop` that is not a range, or `p` outside of [0, 1].
    """
    resize_last, resize_first = random_resize(sizes, max), random_resize(first)
    if not isinstance(crop, tuple) or len(crop) != 2:
        raise ValueError(f'{crop=} must be (smallest, largest) side of a window')
    check_positive(least=crop[0], largest=crop[1])
    if crop[0] > crop[1]:
        raise ValueError(f'{crop=} must be (smallest, largest) side of a window')
    if not 0 <= p <= 1:
        raise ValueError(f'{p=} must be in [0, 1]')

    def apply(record: Record, rng: np.random.Generator) -> Record:
        if rng.random() < p:
            record = _crop_window(resize_first(record, rng), rng, *crop)
        return resize_last(record, rng)

    return apply


def _crop_window(record: Record, rng: np.random.Generator, least: int, largest: int) -> Record:
    """Crop a random window with sides in this range, limited by the image."""
    sides = [
        int(rng.integers(min(least, pixels), min(largest, pixels) + 1))
        for pixels in image_size(record)
    ]
    y, x = (
        int(rng.integers(pixels - side + 1))
        for pixels, side in zip(image_size(record), sides, strict=True)
    )
    return geometry.crop(record, y, x, *sides)


@transform
def fit_patches(side: int, most: int, method: str = 'bilinear') -> Callable[[Record], Record]:
    """Resize the image to as many whole patches as possible, at most `most` of `side` pixels.

    The aspect ratio is kept up to whole patches. SigLIP 2, arXiv:2502.14786, section 2.4.2.
    """
    check_positive(side=side, most=most)
    check_method(method)

    def apply(record: Record) -> Record:
        rows, columns = grid_within(*image_size(record), most)
        return geometry.resize(record, rows * side, columns * side, method)

    return apply


@transform
@crops_at_once
def crop_area(
    area_min: float = 5, area_max: float = 100, ratio: float = 4 / 3
) -> Callable[[Record, np.random.Generator], Record]:
    """Crop a random window without resizing it.

    It has `area_min` to `area_max` percent of the image's area, and the image's aspect ratio times
    1 / `ratio` to `ratio`, uniform in its logarithm.

    Raises:
      ValueError: for a `ratio` below 1, or areas that are not percentages.
    """
    if ratio < 1:
        raise ValueError(f'{ratio=} must be at least 1')
    area = area_shares(area_min, area_max)

    def apply(record: Record, rng: np.random.Generator) -> Record:
        height, width = size = image_size(record)
        ratios = width / height / ratio, width / height * ratio
        window = random_window(rng, size, area, ratios) or central_window(size, ratios)
        return geometry.crop(record, *window)

    return apply


def grid_within(height: int, width: int, most: int) -> tuple[int, int]:
    """Return rows and columns of an image that is scaled to at most `most` patches.

    The scale s is the largest with ceil(s height) ceil(s width) <= most, in units of patches. One
    of the two products is then an integer, so that all fractions are exact.
    """
    rows, columns = _count_along(height, width, most), _count_along(width, height, most)
    if rows * width >= columns * height:
        return rows, -(-rows * width // height)
    return -(-columns * height // width), columns


def _count_along(side: int, other: int, most: int) -> int:
    """Find the most patches along a side for which the grid has at most `most`; 0 if none fit."""
    n = min(math.isqrt(most * side // other), most)
    while n and n * -(-n * other // side) > most:
        n -= 1
    return n


def cut_patches(image: np.ndarray, side: int) -> np.ndarray:
    """Cut an image [H W C] into patches of `side` pixels, row by row, [N P]."""
    rows, columns = image.shape[0] // side, image.shape[1] // side
    patches = image.reshape(rows, side, columns, side, -1).swapaxes(1, 2)
    return patches.reshape(rows * columns, -1)
