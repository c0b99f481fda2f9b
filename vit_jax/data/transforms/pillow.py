"""Operations on arrays by Pillow, and checks of transform arguments."""

from __future__ import annotations

from typing import Any

import numpy as np
from PIL import Image

from vit_jax.array_types import Shaped, UInt8
from vit_jax.errors import UserError

Matrix = tuple[float, float, float, float, float, float]

METHODS = {
    'nearest': Image.Resampling.NEAREST,
    'box': Image.Resampling.BOX,
    'bilinear': Image.Resampling.BILINEAR,
    'bicubic': Image.Resampling.BICUBIC,
    'lanczos': Image.Resampling.LANCZOS,
    'hamming': Image.Resampling.HAMMING,
}
Size = int | tuple[int, int]
Fill = int | tuple[int, ...]  # a byte, or one per channel


def to_pillow(image: Shaped[np.ndarray, 'H W C']) -> Image.Image:
    """Convert 3 channels to an RGB image, 1 to a gray one; UserError unless they are uint8."""
    require_bytes(image)
    return Image.fromarray(image[..., 0] if image.shape[2] == 1 else image)


def require_bytes(image: Shaped[np.ndarray, 'H W C']) -> None:
    """Raise UserError unless an image is uint8."""
    if image.dtype != np.uint8:
        raise UserError(f'needs bytes, not {image.dtype}; put value_range last')


def from_pillow(image: Image.Image) -> UInt8[np.ndarray, 'H W C']:
    """Convert an RGB image to bytes of 3 channels, a gray one to 1."""
    array = np.asarray(image)
    return array if array.ndim == 3 else array[..., None]


def resample(
    image: UInt8[np.ndarray, 'H W C'], height: int, width: int, method: str
) -> UInt8[np.ndarray, '{height} {width} C']:
    """Scale an image, antialiased where it shrinks; `method` is one of `METHODS`."""
    return from_pillow(to_pillow(image).resize((width, height), METHODS[method]))


def transform(image: Image.Image, matrix: Matrix, fill: int) -> Image.Image:
    """Set (x, y) to the nearest pixel of (a x + b y + c, d x + e y + f); `fill` outside."""
    return image.transform(
        image.size,
        Image.Transform.AFFINE,
        matrix,
        Image.Resampling.NEAREST,
        fillcolor=(fill,) * 3 if image.mode == 'RGB' else fill,
    )


def height_width(size: Any) -> tuple[int, int]:
    """Return (height, width) for such a pair, or for the side of a square.

    Raises:
      ValueError: for a wrong number of sides, or sides below 1.
    """
    pair = size if isinstance(size, tuple) else (size, size)
    if len(pair) != 2:
        raise ValueError(f'{size=} must be an integer or (height, width)')
    check_positive(height=pair[0], width=pair[1])
    return pair


def area_shares(area_min: float, area_max: float) -> tuple[float, float]:
    """Convert percentages of an area to shares.

    Raises:
      ValueError: unless 0 < `area_min` <= `area_max` <= 100.
    """
    if not 0 < area_min <= area_max <= 100:
        raise ValueError(f'{area_min=} and {area_max=} must be percentages, in increasing order')
    return area_min / 100, area_max / 100


def check_method(method: str) -> None:
    """Check the name of a resampling method.

    Raises:
      ValueError: for an unknown method.
    """
    if method not in METHODS:
        raise ValueError(f'{method=} must be one of {", ".join(METHODS)}')


def check_fill(fill: Fill | None) -> None:
    """Check that a color is a byte, or one per channel, or None.

    Raises:
      ValueError: if it is not.
    """
    values = fill if isinstance(fill, tuple) else () if fill is None else (fill,)
    is_byte = (type(value) is int and 0 <= value <= 255 for value in values)
    if fill == () or not all(is_byte):
        raise ValueError(f'{fill=} must be a byte, or a tuple with one per channel')


def check_positive(**values: Any) -> None:
    """Check that all values are integers of 1 or more.

    Raises:
      ValueError: if one is not.
    """
    for name, value in values.items():
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise ValueError(f'{name}={value!r} must be a positive integer')
