"""Windows (y, x, height, width) and sizes of an image, in pixels."""

from __future__ import annotations

import math

import numpy as np

Window = tuple[int, int, int, int]

ATTEMPTS = 10  # draws to find a window that fits
TF_ATTEMPTS = 100
TF_RATIOS = (0.75, 1.33)


def random_window(
    rng: np.random.Generator,
    size: tuple[int, int],
    shares: tuple[float, float],
    ratios: tuple[float, float],
) -> Window | None:
    """Draw a window of a random share of the area; None if none fits.

    Args:
      rng: Generator of the share (uniform), ratio (uniform in its logarithm) and position.
      size: (height, width) of the image.
      shares: Smallest and largest share of the area.
      ratios: Smallest and largest width / height.
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
    """Return the largest centered window whose width / height is within `ratios`."""
    height = min(size[0], max(1, round(size[1] / ratios[0])))
    width = min(size[1], max(1, round(size[0] * ratios[1])))
    return (size[0] - height) // 2, (size[1] - width) // 2, height, width


def distorted_window(
    rng: np.random.Generator,
    size: tuple[int, int],
    shares: tuple[float, float],
    ratios: tuple[float, float] = TF_RATIOS,
) -> Window:
    """Draw a window like `tf.image.sample_distorted_bounding_box`; the whole image if none fits.

    The ratio is uniform, then the height is uniform between the heights of the smallest and largest
    share that fits into the image: so the area is not uniform, and wide windows are rare. The last
    row and column at which a window could begin are never drawn.

    Args:
      rng: Generator of up to `TF_ATTEMPTS` windows.
      size: (height, width) of the image.
      shares: Smallest and largest share of the area.
      ratios: Smallest and largest width / height.
    """
    for _ in range(TF_ATTEMPTS):
        ratio = rng.uniform(*ratios)
        window_size = _distorted_size(rng, size, ratio, shares)
        if window_size is not None:
            y, x = (
                int(rng.integers(max(n - m, 1))) for n, m in zip(size, window_size, strict=True)
            )
            return y, x, *window_size
    return 0, 0, *size


def _distorted_size(
    rng: np.random.Generator, size: tuple[int, int], ratio: float, shares: tuple[float, float]
) -> tuple[int, int] | None:
    """Draw height and width of a window with this ratio; None if it does not fit."""
    least, greatest = (share * size[0] * size[1] for share in shares)
    tallest = round(math.sqrt(greatest / ratio))
    if round(tallest * ratio) > size[1]:
        tallest = int((size[1] + 0.5 - 1e-7) / ratio)
        tallest -= round(tallest * ratio) > size[1]
    tallest = min(tallest, size[0])
    lowest = min(round(math.sqrt(least / ratio)), tallest)
    height = lowest + int(rng.integers(tallest - lowest + 1))
    # Add or remove a row if rounding violates the bounds.
    height += height * round(height * ratio) < least
    height -= height * round(height * ratio) > greatest
    width = round(height * ratio)
    fits = 0 < height <= size[0] and 0 < width <= size[1]
    return (height, width) if fits and least <= height * width <= greatest else None


def scale_size(size: tuple[int, int], short: int, longest: int | None = None) -> tuple[int, int]:
    """Scale (height, width) to the shorter side `short`, with the longer one at most `longest`."""
    scale = short / min(size)
    if longest is not None:
        scale = min(scale, longest / max(size))
    return max(1, round(size[0] * scale)), max(1, round(size[1] * scale))


def scale_size_down(
    size: tuple[int, int], short: int, longest: int | None = None
) -> tuple[int, int]:
    """Scale like `scaled`, but round the longer side down.

    Uses the floating-point operations of transformers' `get_size_with_aspect_ratio` and, without
    `longest`, of torchvision's `Resize`.
    """
    least, most = min(size), max(size)
    exact: float = short
    if longest is not None and most / least * short > longest:
        exact = longest * least / most
        short = round(exact)
    long = most if least == short else int(exact * most / least)
    new = max(1, short), max(1, long)
    return new if size[0] <= size[1] else new[::-1]
