"""Cropping and resizing as in TensorFlow, for recipes whose results were obtained with it.

They differ from those of `image` in the distribution of crops and in resampling, see
`windows.distorted_window` and `tf_resampling`. Boxes, masks and points follow as in `image`. The
remaining difference is the decoding of JPEG files, for which TensorFlow's default is a faster and
less exact transform.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from vit_jax.data.records import Record
from vit_jax.data.transforms import geometry, tf_resampling
from vit_jax.data.transforms.arguments import Size, check_positive, height_width, shares
from vit_jax.data.transforms.movable import image_size
from vit_jax.data.transforms.registry import crops_at_once, resizes_on_demand, transform
from vit_jax.data.transforms.windows import distorted_window, scaled

Apply = Callable[[Record], Record]
RandomApply = Callable[[Record, np.random.Generator], Record]


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
    resample, area = _resampling(method), shares(area_min, area_max)

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
    if method not in tf_resampling.METHODS:
        raise ValueError(f'{method=} must be one of {", ".join(tf_resampling.METHODS)}')
    return tf_resampling.METHODS[method]
