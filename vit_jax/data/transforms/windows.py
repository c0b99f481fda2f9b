"""Windows of an image: (y, x, height, width) in pixels."""

from __future__ import annotations

import math

import numpy as np

Window = tuple[int, int, int, int]

ATTEMPTS = 10  # to find a random window that fits


def random_window(
    rng: np.random.Generator,
    size: tuple[int, int],
    shares: tuple[float, float],
    ratios: tuple[float, float],
) -> Window | None:
    """A window of a random share of the area, or None if none fits.

    Args:
      rng: draws the share, uniform, the ratio, uniform in its logarithm, and the place.
      size: (height, width) of the image.
      shares: least and greatest share of the area.
      ratios: least and greatest width / height.
    """
    for _ in range(ATTEMPTS):
        area = size[0] * size[1] * rng.uniform(*shares)
        ratio = math.exp(rng.uniform(math.log(ratios[0]), math.log(ratios[1])))
        height, width = round(math.sqrt(area / ratio)), round(math.sqrt(area * ratio))
        if 0 < height <= size[0] and 0 < width <= size[1]:
            y, x = rng.integers(size[0] - height + 1), rng.integers(size[1] - width + 1)
            return int(y), int(x), height, width
    return None


def central_window(size: tuple[int, int], ratios: tuple[float, float]) -> Window:
    """The largest window in the middle whose width / height is within `ratios`."""
    height = min(size[0], max(1, round(size[1] / ratios[0])))
    width = min(size[1], max(1, round(size[0] * ratios[1])))
    return (size[0] - height) // 2, (size[1] - width) // 2, height, width
