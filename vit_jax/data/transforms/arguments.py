"""Checks of the arguments of transforms; ValueError if they are wrong."""

from __future__ import annotations

from typing import Any

from vit_jax.data.transforms.pillow import METHODS

Size = int | tuple[int, int]
Fill = int | tuple[int, ...]  # a byte, or one for each channel


def height_width(size: Any) -> tuple[int, int]:
    """Convert an integer, for a square, or (height, width) to (height, width)."""
    pair = size if isinstance(size, tuple) else (size, size)
    if len(pair) != 2:
        raise ValueError(f'{size=} must be an integer or (height, width)')
    check_positive(height=pair[0], width=pair[1])
    return pair


def shares(area_min: float, area_max: float) -> tuple[float, float]:
    """Convert percentages of an area to shares."""
    if not 0 < area_min <= area_max <= 100:
        raise ValueError(f'{area_min=} and {area_max=} must be percentages in this order')
    return area_min / 100, area_max / 100


def check_method(method: str) -> None:
    """Check that `method` is one of the resampling methods."""
    if method not in METHODS:
        raise ValueError(f'{method=} must be one of {", ".join(METHODS)}')


def check_fill(fill: Fill | None) -> None:
    """Check that a color is a byte, or one for each channel; None passes."""
    values = fill if isinstance(fill, tuple) else () if fill is None else (fill,)
    is_byte = (type(value) is int and 0 <= value <= 255 for value in values)
    if fill == () or not all(is_byte):
        raise ValueError(f'{fill=} must be a byte, or a tuple of one for each channel')


def check_positive(**values: Any) -> None:
    """Check that all values are integers of 1 or more."""
    for name, value in values.items():
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise ValueError(f'{name}={value!r} must be a positive integer')
