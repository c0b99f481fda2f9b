"""Cropping and resizing as in TensorFlow, for recipes with published TensorFlow results.

They differ from `image` in the distribution of crops, see `windows.distorted_window`, and in
resampling: no antialiasing, and values are rounded down. Boxes, masks and points follow as in
`image`. JPEG decoding still differs: TensorFlow's default is a faster, less exact transform.

Pixels are squares with centers at halves, as in `tf.image.resize` of TensorFlow 2. Rows, then
columns, are multiplied by a sparse matrix of weights, by `native` or SciPy, without Python's lock.
Resizing an image on demand yields another image on demand, so a later crop reads only what it
needs.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import numpy as np

from vit_jax.array_types import Float, Int, UInt8
from vit_jax.data import native
from vit_jax.data.images import OnDemand
from vit_jax.data.records import Record
from vit_jax.data.transforms import geometry
from vit_jax.data.transforms.geometry import image_size
from vit_jax.data.transforms.pillow import Size, area_shares, check_positive, height_width
from vit_jax.data.transforms.registry import crops_at_once, resizes_on_demand, transform
from vit_jax.data.transforms.windows import distorted_window, scale_size

Apply = Callable[[Record], Record]
RandomApply = Callable[[Record, np.random.Generator], Record]
Bytes = UInt8[np.ndarray, 'H W C']
Image = Bytes | OnDemand
# Old rows or columns for every new one, and their weights, which sum to 1.
Taps = tuple[Int[np.ndarray, 'N K'], Float[np.ndarray, 'N K']]
# Added before rounding down, because a floating-point sum may be just below an integer.
SLACK = 2.0**-10


@transform
@crops_at_once
def inception_crop_tf(
    size: Size, area_min: float = 5, area_max: float = 100, method: str = 'bilinear'
) -> RandomApply:
    """Resize a random window of the image, drawn as in TensorFlow, to `size`.

    The window has the distribution of `tf.image.sample_distorted_bounding_box`: `area_min` to
    `area_max` percent of the area, with small windows more likely than in `inception_crop` (for 375
    x 500 pixels the mean is 34% of the area instead of 42%). The methods are bilinear and area.
    """
    height, width = height_width(size)
    resample, area = _find_method(method), area_shares(area_min, area_max)

    def apply(record: Record, rng: np.random.Generator) -> Record:
        window = distorted_window(rng, image_size(record), area)
        return geometry.resize(geometry.crop(record, *window), height, width, resample)

    return apply


@transform
@resizes_on_demand
def resize_tf(size: Size, method: str = 'bilinear') -> Apply:
    """Resize to `size`, without keeping the aspect ratio; `method` is bilinear or area."""
    height, width = height_width(size)
    resample = _find_method(method)

    def apply(record: Record) -> Record:
        return geometry.resize(record, height, width, resample)

    return apply


@transform
@resizes_on_demand
def resize_small_tf(size: int, method: str = 'area') -> Apply:
    """Resize the shorter side to `size`, keeping the aspect ratio; see `resize_tf`."""
    check_positive(size=size)
    resample = _find_method(method)

    def apply(record: Record) -> Record:
        return geometry.resize(record, *scale_size(image_size(record), size), resample)

    return apply


def _find_method(method: str) -> Callable[[np.ndarray, int, int], np.ndarray]:
    if method not in METHODS:
        raise ValueError(f'{method=} must be one of {", ".join(METHODS)}')
    return METHODS[method]


def bilinear(image: Image, height: int, width: int) -> Image:
    """Interpolate the four pixels around each new center, without antialiasing."""
    return _resize(image, height, width, _neighbor_taps)


def area(image: Image, height: int, width: int) -> Image:
    """Average the old pixels that each new one covers, weighted by overlap."""
    return _resize(image, height, width, _area_taps)


METHODS: dict[str, Callable[[Any, int, int], Any]] = {'bilinear': bilinear, 'area': area}


class Resized(OnDemand):
    """An image resized on demand; a window has the same bytes as in the whole image."""

    def __init__(self, image: Image, height: int, width: int, taps: Callable[[int, int], Taps]):
        self._image, self._taps, self.shape = image, taps, (height, width, image.shape[2])

    def whole(self) -> Bytes:
        return self.window(0, 0, *self.shape[:2])

    def window(self, y: int, x: int, height: int, width: int) -> Bytes:
        """Read the pixels under the window, and weight rows, then columns."""
        vertical = self._taps, self._image.shape[0], self.shape[0], y, y + height
        horizontal = self._taps, self._image.shape[1], self.shape[1], x, x + width
        (rows, down), (columns, across) = _weights(*vertical), _weights(*horizontal)
        image = self._image[rows, columns]
        if native.can_resample(image):
            return native.resample(image, down, across, SLACK)
        flat = np.ascontiguousarray(image, np.float32)
        short = _matrix(*vertical) @ flat.reshape(len(flat), -1)
        turned = np.ascontiguousarray(short.T).reshape(flat.shape[1], -1)
        small = _matrix(*horizontal) @ turned
        small += np.float32(SLACK)
        pixels = small.astype(np.uint8).reshape(-1, height).T
        return np.ascontiguousarray(pixels).reshape(height, width, -1)


def _resize(image: Image, height: int, width: int, taps: Callable[[int, int], Taps]) -> Image:
    """Resize an image; on demand if the image is on demand."""
    resized = Resized(image, height, width, taps)
    return resized if isinstance(image, OnDemand) else resized.whole()


@functools.lru_cache(maxsize=4096)  # a few kilobytes each
def _weights(
    taps: Callable[[int, int], Taps], old: int, new: int, start: int, stop: int
) -> tuple[slice, Any]:
    """Return the old rows needed by rows `start` to `stop` of `new` ones, and their weights."""
    index, weight = (part[start:stop] for part in taps(old, new))
    low, high = int(index.min()), int(index.max()) + 1
    return slice(low, high), native.Weights(index - low, weight)


@functools.lru_cache(maxsize=4096)
def _matrix(taps: Callable[[int, int], Taps], old: int, new: int, start: int, stop: int) -> Any:
    """Return `_weights` as a sparse matrix, for images that `native` does not resample."""
    from scipy import sparse  # takes a tenth of a second

    rows, weights = _weights(taps, old, new, start, stop)
    index, weight = weights.arrays
    starts = np.arange(len(index) + 1, dtype=np.int32) * index.shape[1]
    shape = len(index), rows.stop - rows.start
    return sparse.csr_matrix((weight.ravel(), index.ravel(), starts), shape=shape)


def _neighbor_taps(old: int, new: int) -> Taps:
    """Return the old centers before and after each new one; only one at the borders."""
    centers = np.maximum((np.arange(new) + 0.5) * (old / new) - 0.5, 0)
    low = centers.astype(int)
    share = centers - low
    return np.stack([low, np.minimum(low + 1, old - 1)], 1), np.stack([1 - share, share], 1)


def _area_taps(old: int, new: int) -> Taps:
    """Return the old pixels that a new one overlaps, weighted by the length of the overlap."""
    scale = old / new
    left = np.arange(new)[:, None] * scale
    index = left.astype(int) + np.arange(math.ceil(scale) + 1)
    overlap = np.minimum(index + 1, left + scale) - np.maximum(index, left)
    return np.minimum(index, old - 1), np.maximum(overlap, 0) / scale
