"""Cropping and resizing as in TensorFlow, for recipes whose results were obtained with it.

They differ from `image` in the distribution of crops, see `windows.distorted_window`, and in
resampling: without antialiasing, and with values rounded down. Boxes, masks and points follow as in
`image`. The remaining difference is the decoding of JPEG files, for which TensorFlow's default is a
faster and less exact transform.

Pixels are squares with centers at halves, as in `tf.image.resize` of TensorFlow 2. Rows, then
columns, are multiplied by a sparse matrix of weights, by `native` or SciPy, without Python's lock.
Resizing an image on demand gives another, so that a crop after it reads only what it needs.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import numpy as np

from vit_jax.array_types import Float, Int, UInt8
from vit_jax.data.images import OnDemand
from vit_jax.data.records import Record
from vit_jax.data.transforms import geometry
from vit_jax.data.transforms.geometry import image_size
from vit_jax.data.transforms.pillow import Size, area_shares, check_positive, height_width
from vit_jax.data.transforms.registry import crops_at_once, resizes_on_demand, transform
from vit_jax.data.transforms.windows import distorted_window, scaled

Apply = Callable[[Record], Record]
RandomApply = Callable[[Record, np.random.Generator], Record]
Bytes = UInt8[np.ndarray, 'H W C']
Image = Bytes | OnDemand
# The old rows or columns of every new one, and their weights, of sum 1.
Taps = tuple[Int[np.ndarray, 'N K'], Float[np.ndarray, 'N K']]
# Added before rounding down: a floating-point sum may end just below an integer.
SLACK = 2.0**-10


@transform
@crops_at_once
def inception_crop_tf(
    size: Size, area_min: float = 5, area_max: float = 100, method: str = 'bilinear'
) -> RandomApply:
    """Resize a random window of the image, drawn as in TensorFlow, to `size`.

    The window is that of `tf.image.sample_distorted_bounding_box`: `area_min` to `area_max`
    percent of the area, with small ones more likely than in `inception_crop` (on 375 x 500 pixels
    the mean is 34 % of the area instead of 42 %). The methods are bilinear and area.
    """
    height, width = height_width(size)
    resample, area = _resampling(method), area_shares(area_min, area_max)

    def apply(record: Record, rng: np.random.Generator) -> Record:
        window = distorted_window(rng, image_size(record), area)
        return geometry.resize(geometry.crop(record, *window), height, width, resample)

    return apply


@transform
@resizes_on_demand
def resize_tf(size: Size, method: str = 'bilinear') -> Apply:
    """Resize to `size`, without keeping the aspect ratio; `method` is bilinear or area."""
    height, width = height_width(size)
    resample = _resampling(method)

    def apply(record: Record) -> Record:
        return geometry.resize(record, height, width, resample)

    return apply


@transform
@resizes_on_demand
def resize_small_tf(size: int, method: str = 'area') -> Apply:
    """Resize the shorter side to `size`, keeping the aspect ratio; see `resize_tf`."""
    check_positive(size=size)
    resample = _resampling(method)

    def apply(record: Record) -> Record:
        return geometry.resize(record, *scaled(image_size(record), size), resample)

    return apply


def _resampling(method: str) -> Callable[[np.ndarray, int, int], np.ndarray]:
    if method not in METHODS:
        raise ValueError(f'{method=} must be one of {", ".join(METHODS)}')
    return METHODS[method]


def bilinear(image: Image, height: int, width: int) -> Image:
    """Blend the four pixels around each new center, without antialiasing."""
    return _resized(image, height, width, _neighbors)


def area(image: Image, height: int, width: int) -> Image:
    """Average the old pixels that each new one covers, weighted by overlap."""
    return _resized(image, height, width, _covered)


METHODS: dict[str, Callable[[Any, int, int], Any]] = {'bilinear': bilinear, 'area': area}


class Resized(OnDemand):
    """A resized image, whose windows have the same bytes as in the whole image."""

    def __init__(self, image: Image, height: int, width: int, taps: Callable[[int, int], Taps]):
        self._image, self._taps, self.shape = image, taps, (height, width, image.shape[2])

    def whole(self) -> Bytes:
        return self.window(0, 0, *self.shape[:2])

    def window(self, y: int, x: int, height: int, width: int) -> Bytes:
        """Read the pixels under the window, and weight rows, then columns."""
        from vit_jax.data import native  # only these transforms need it

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
        made = small.astype(np.uint8).reshape(-1, height).T
        return np.ascontiguousarray(made).reshape(height, width, -1)


def _resized(image: Image, height: int, width: int, taps: Callable[[int, int], Taps]) -> Image:
    """The resized image; one on demand of an image on demand."""
    made = Resized(image, height, width, taps)
    return made if isinstance(image, OnDemand) else made.whole()


@functools.lru_cache(maxsize=4096)  # of some kilobytes each
def _weights(
    taps: Callable[[int, int], Taps], old: int, new: int, start: int, stop: int
) -> tuple[slice, Any]:
    """The old rows that the rows `start` to `stop` among `new` ones need, and their weights."""
    from vit_jax.data import native

    index, weight = (each[start:stop] for each in taps(old, new))
    low, high = int(index.min()), int(index.max()) + 1
    return slice(low, high), native.Weights(index - low, weight)


@functools.lru_cache(maxsize=4096)
def _matrix(taps: Callable[[int, int], Taps], old: int, new: int, start: int, stop: int) -> Any:
    """`_weights` as a sparse matrix, for images that `native` does not resample."""
    from scipy import sparse  # takes a tenth of a second

    rows, found = _weights(taps, old, new, start, stop)
    index, weight = found.arrays
    starts = np.arange(len(index) + 1, dtype=np.int32) * index.shape[1]
    shape = len(index), rows.stop - rows.start
    return sparse.csr_matrix((weight.ravel(), index.ravel(), starts), shape=shape)


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
