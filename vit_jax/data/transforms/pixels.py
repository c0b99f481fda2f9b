"""Operations on byte images [H, W, C], by compiled loops or Pillow, with identical bytes.

Pillow holds Python's lock while it blends, and copies images to and from its own form. The loops of
`native` replace it if they were compiled and give the same bytes in a trial.
"""

from __future__ import annotations

import functools
import math

import numpy as np
from PIL import Image

from vit_jax.array_types import Int, UInt8
from vit_jax.data import native
from vit_jax.data.transforms import pillow
from vit_jax.data.transforms.pillow import Matrix, from_pillow, to_pillow

Pixels = UInt8[np.ndarray, 'H W C']
# New value of each old value, for all channels or one row per channel.
Tables = UInt8[np.ndarray, '*C 256']

VALUES = np.arange(256, dtype=np.uint8)
UNIT = 2**16  # fractions of a pixel in which Pillow moves images
FURTHEST = 2**15 - 1  # largest distance in pixels for these fractions


def look_up(image: Pixels, tables: Tables) -> Pixels:
    """Replace every value by its entry in the tables."""
    channels, per_channel = image.shape[-1], tables.ndim > 1
    if not native.has_loop('look_up'):
        return tables[np.arange(channels), image] if per_channel else tables[image]
    image, output = _with_output(image)
    tables = np.ascontiguousarray(tables)
    native.call_loop('look_up', image, image.size, channels, tables, per_channel, output)
    return output


def counts(image: Pixels) -> Int[np.ndarray, 'C 256']:
    """Count each value in each channel."""
    channels = image.shape[-1]
    totals = np.zeros((channels, 256), np.int64)
    if native.has_loop('count_values'):
        image = np.ascontiguousarray(image)
        native.call_loop('count_values', image, image.size, channels, totals)
        return totals
    for channel in range(channels):
        totals[channel] = np.bincount(image[..., channel].ravel(), minlength=256)
    return totals


def blend(first: Pixels, second: Pixels, share: float) -> Pixels:
    """Add `share` times the difference of the second image to the first, within 0 to 255."""
    blend_bytes = _blend_compiled if _matches_pillow() else _blend_by_pillow
    return blend_bytes(first, second, share)


def gray(image: Pixels) -> Pixels:
    """Replace colors by their luminance (ITU-R 601-2) in all channels."""
    if image.shape[-1] == 1:
        return image
    return _gray_compiled(image) if _matches_pillow() else _gray_by_pillow(image)


def move(image: Pixels, matrix: Matrix, fill: int) -> Pixels:
    """Set (x, y) to the nearest pixel of (a x + b y + c, d x + e y + f); `fill` outside."""
    a, b, c, d, e, f = matrix
    height, width = image.shape[:2]
    far = max(abs(a) * width + abs(b) * height + abs(c), abs(d) * width + abs(e) * height + abs(f))
    scales = b == d == 0 and not a == e == 1
    if scales or far >= FURTHEST or not _matches_pillow():
        return _move_by_pillow(image, matrix, fill)
    return _move_compiled(image, matrix, fill)


def smooth(image: Pixels) -> Pixels:
    """Apply Pillow's `ImageFilter.SMOOTH`, but faster.

    Border pixels are unchanged. Others are the sum of nine neighbors, counting the center five
    times, divided by 13; rounding has no ties because 13 is odd.
    """
    image = np.ascontiguousarray(image)
    output = image.copy()
    if native.has_loop('smooth'):
        native.call_loop('smooth', image, *image.shape, output)
        return output
    wide = image.astype(np.uint16)
    rows = wide[:-2] + wide[1:-1]
    rows += wide[2:]
    total = rows[:, :-2] + rows[:, 1:-1]
    total += rows[:, 2:]
    total += wide[1:-1, 1:-1] * np.uint16(4)
    total += np.uint16(13 // 2)
    np.floor_divide(total, np.uint16(13), out=output[1:-1, 1:-1], casting='unsafe')
    return output


def mirror(image: np.ndarray) -> np.ndarray:
    """Mirror an image [H, W, C] left to right."""
    image = np.asarray(image)
    is_plain = image.dtype == np.uint8 and image.strides[1:] == (image.shape[2], 1)
    output = np.empty_like(image, order='C')
    if is_plain and native.has_loop('mirror'):
        native.call_loop('mirror', image, image.strides[0], *image.shape, output)
        return output
    for channel in range(image.shape[2]):  # NumPy copies a mirrored row of pixels slowly
        output[..., channel] = image[:, ::-1, channel]
    return output


def _with_output(image: Pixels) -> tuple[Pixels, Pixels]:
    """Return the image as a contiguous array, and an output of its shape."""
    image = np.ascontiguousarray(image)
    return image, np.empty_like(image)


def _blend_compiled(first: Pixels, second: Pixels, share: float) -> Pixels:
    second, output = _with_output(second)
    native.call_loop('blend', np.ascontiguousarray(first), second, output.size, share, output)
    return output


def _blend_by_pillow(first: Pixels, second: Pixels, share: float) -> Pixels:
    return from_pillow(Image.blend(to_pillow(first), to_pillow(second), share))


def _move_by_pillow(image: Pixels, matrix: Matrix, fill: int) -> Pixels:
    return from_pillow(pillow.transform(to_pillow(image), matrix, fill))


def _gray_by_pillow(image: Pixels) -> Pixels:
    return from_pillow(to_pillow(image).convert('L').convert('RGB'))


def _gray_compiled(image: Pixels) -> Pixels:
    image, output = _with_output(image)
    native.call_loop('to_gray', image, image.size // 3, output)
    return output


def _move_compiled(image: Pixels, matrix: Matrix, fill: int) -> Pixels:
    a, b, c, d, e, f = matrix
    centers = c + a / 2 + b / 2, f + d / 2 + e / 2  # source of the first pixel's center
    # Pillow rounds shifts down, and everything else to the nearest fraction.
    x, y = (math.floor(v) * UNIT if b == d == 0 else math.floor(v * UNIT + 0.5) for v in centers)
    a, b, d, e = (math.floor(step * UNIT + 0.5) for step in (a, b, d, e))
    steps = np.array([a, b, x, d, e, y], np.int32)
    image, output = _with_output(image)
    native.call_loop('move', image, *image.shape, steps, fill, output)
    return output


@functools.cache
def _matches_pillow() -> bool:
    """Return whether compiled loops match this Pillow, which could round differently."""
    if not all(map(native.has_loop, ('blend', 'to_gray', 'move'))):
        return False
    first, second = (values[..., None] for values in np.meshgrid(VALUES, VALUES))
    for share in (0.1, 0.37, 0.82, 1.0, 1.3, 1.9):
        compiled = _blend_compiled(first, second, share)
        if not np.array_equal(compiled, _blend_by_pillow(first, second, share)):
            return False
    image = np.random.default_rng(0).integers(0, 256, (41, 50, 3), np.uint8)
    if not np.array_equal(_gray_compiled(image), _gray_by_pillow(image)):
        return False
    turns = ((0.9, 0.4, -3.2, -0.4, 0.9, 7.7), (1, 0.3, 0, 0, 1, 0), (1, 0, 0, -0.27, 1, 0))
    return all(
        np.array_equal(_move_compiled(image, turn, 99), _move_by_pillow(image, turn, 99))
        for turn in (*turns, (1, 0, -7.5, 0, 1, 3.2))
    )
