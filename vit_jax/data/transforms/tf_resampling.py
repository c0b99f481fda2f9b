"""TensorFlow's resizing of byte images: no antialiasing, and values rounded down.

Pixels are squares with centers at halves, as in `tf.image.resize` of TensorFlow 2. Rows, then
columns, are multiplied by a sparse matrix of weights, which SciPy does without Python's lock.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import numpy as np
from jaxtyping import Float, Int, UInt8

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
    rows, columns, channels = image.shape
    flat = np.ascontiguousarray(image, np.float32).reshape(rows, columns * channels)
    short = _matrix(taps, rows, height) @ flat
    turned = np.ascontiguousarray(short.T).reshape(columns, channels * height)
    small = _matrix(taps, columns, width) @ turned
    small += np.float32(SLACK)
    resized = small.astype(np.uint8).reshape(width * channels, height).T
    return np.ascontiguousarray(resized).reshape(height, width, channels)


@functools.lru_cache(maxsize=4096)  # of some kilobytes each
def _matrix(taps: Callable[[int, int], Taps], old: int, new: int) -> Any:
    """The weights of `old` rows in `new` ones, a sparse float32 matrix [new, old]."""
    from scipy import sparse  # takes a tenth of a second

    index, weight = taps(old, new)
    starts = np.arange(new + 1) * index.shape[1]
    return sparse.csr_matrix(
        (weight.astype(np.float32).ravel(), index.ravel(), starts), shape=(new, old)
    )


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
