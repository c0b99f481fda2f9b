"""TensorFlow's resizing of byte images, in NumPy: no antialiasing, and values rounded down.

Pixels are squares with centers at halves, as in `tf.image.resize` of TensorFlow 2.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable

import numpy as np
from jaxtyping import Float, Int, Shaped, UInt8

Bytes = UInt8[np.ndarray, 'H W C']
# The old rows or columns of every new one, and their weights, of sum 1.
Taps = tuple[Int[np.ndarray, 'N K'], Float[np.ndarray, 'N K']]

# Added before rounding down: a floating-point sum may end just below an integer.
SLACK = 2.0**-10


def bilinear(image: Bytes, height: int, width: int) -> UInt8[np.ndarray, '{height} {width} C']:
    """Blend the four pixels around each new center, without antialiasing."""
    return _resized(image, height, width, _neighbors)


def area(image: Bytes, height: int, width: int) -> UInt8[np.ndarray, '{height} {width} C']:
    """Average the old pixels that each new one covers, weighted by overlap."""
    return _resized(image, height, width, _covered)


METHODS: dict[str, Callable[[Bytes, int, int], Bytes]] = {'bilinear': bilinear, 'area': area}


def _resized(image: Bytes, height: int, width: int, taps: Callable[[int, int], Taps]) -> Bytes:
    rows = _weighted(image, taps(image.shape[0], height), 0)
    return (_weighted(rows, taps(image.shape[1], width), 1) + np.float32(SLACK)).astype(np.uint8)


def _neighbors(old: int, new: int) -> Taps:
    """The old centers before and after each new one; at the borders only one of them."""
    centers = np.maximum((np.arange(new) + 0.5) * (old / new) - 0.5, 0)
    low = centers.astype(int)
    share = centers - low
    return np.stack([low, np.minimum(low + 1, old - 1)], 1), np.stack([1 - share, share], 1)


def _covered(old: int, new: int) -> Taps:
    """The old pixels that a new one overlaps, weighted by the length of the overlap."""
    scale = old / new
    left = np.arange(new)[:, None] * scale
    index = left.astype(int) + np.arange(math.ceil(scale) + 1)
    overlap = np.minimum(index + 1, left + scale) - np.maximum(index, left)
    return np.minimum(index, old - 1), np.maximum(overlap, 0) / scale


def _weighted(
    image: Shaped[np.ndarray, 'H W C'], taps: Taps, axis: int
) -> Float[np.ndarray, 'H2 W2 C']:
    """Weighted sums of rows (axis 0) or columns (axis 1)."""
    along = (-1, 1, 1) if axis == 0 else (-1, 1)
    parts = (
        image.take(index, axis) * weight.astype(np.float32).reshape(along)
        for index, weight in zip(*(array.T for array in taps), strict=True)
    )
    return functools.reduce(np.add, parts)
