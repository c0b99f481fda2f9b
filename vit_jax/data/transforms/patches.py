"""Images of any size for models of patch sequences: few whole patches, the aspect ratio kept."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np

from vit_jax.data.records import Record
from vit_jax.data.transforms import geometry
from vit_jax.data.transforms.arguments import check_method, check_positive, shares
from vit_jax.data.transforms.movable import image_size
from vit_jax.data.transforms.registry import crops_at_once, transform
from vit_jax.data.transforms.windows import central_window, random_window


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
    """Crop a random window, which keeps its size in pixels.

    It has `area_min` to `area_max` percent of the image's area, and the image's aspect ratio times
    1 / `ratio` to `ratio`, uniform in its logarithm.
    """
    if ratio < 1:
        raise ValueError(f'{ratio=} must be at least 1')
    area = shares(area_min, area_max)

    def apply(record: Record, rng: np.random.Generator) -> Record:
        height, width = size = image_size(record)
        ratios = width / height / ratio, width / height * ratio
        window = random_window(rng, size, area, ratios) or central_window(size, ratios)
        return geometry.crop(record, *window)

    return apply


def grid_within(height: int, width: int, most: int) -> tuple[int, int]:
    """Rows and columns of patches of an image that is scaled to at most `most` of them.

    With the greatest scale s for which ceil(s height) ceil(s width) <= most, in units of patches.
    That is where one of the two is whole, so that all fractions stay exact.
    """
    rows, columns = _largest(height, width, most), _largest(width, height, most)
    if rows * width >= columns * height:
        return rows, -(-rows * width // height)
    return -(-columns * height // width), columns


def _largest(side: int, other: int, most: int) -> int:
    """The largest number n of patches along a side for which the other's fit, too; 0 if none."""
    n = min(math.isqrt(most * side // other), most)
    while n and n * -(-n * other // side) > most:
        n -= 1
    return n


def cut(image: np.ndarray, side: int) -> np.ndarray:
    """The patches [N P] of an image [H W C] that patches of `side` pixels tile, row by row."""
    rows, columns = image.shape[0] // side, image.shape[1] // side
    patches = image.reshape(rows, side, columns, side, -1).swapaxes(1, 2)
    return patches.reshape(rows * columns, -1)
