"""Fidelity and colorfulness of images, NumPy's and JAX's arrays alike, without importing JAX."""

from __future__ import annotations

from typing import Any

import numpy as np

from vit_jax.array_types import Bool, Float, Num


def psnr(
    images: Num[Any, '*B H W #C'],
    originals: Num[Any, '*#B H W #C'],
    peak: float = 1.0,
    floor: float = 1e-10,
    where: Bool[Any, '...'] | None = None,
) -> Float[Any, '*B']:
    """Compute the peak signal-to-noise ratio in dB, 10 log10(peak^2 / mean squared error).

    Args:
      images: Images; bytes need a wider dtype, since their differences would wrap around.
      originals: Images to compare with.
      peak: Largest value of a pixel.
      floor: Lower bound of the mean squared error over peak^2, which equal images have: 100 dB by
        default; 0 for infinity.
      where: Mask of the pixels to compare, which may be broadcast; all by default.
    """
    differences = images - originals
    xp = differences.__array_namespace__()
    selection = {} if where is None else {'where': where}
    error = xp.square(differences).mean(axis=(-3, -2, -1), **selection) / peak**2
    with np.errstate(divide='ignore'):
        return -10 * xp.log10(xp.maximum(error, floor))


def colorfulness(rgb: Num[Any, '*B H W 3'], peak: float = 1.0) -> Float[Any, '*B']:
    """Compute the colorfulness of images: about 0 (gray) to 110, on the scale of bytes.

    M3 of Hasler and Suesstrunk, "Measuring colorfulness in natural images", 2003, section 6.

    Args:
      rgb: Images with values from 0 to `peak`; bytes need a wider dtype.
      peak: Largest value of a pixel.
    """
    scale = 255 / peak
    red, green, blue = (scale * rgb[..., i] for i in range(3))
    xp = red.__array_namespace__()
    opponents = xp.stack([red - green, (red + green) / 2 - blue], axis=-1)
    std, mean = (xp.linalg.norm(f(opponents, axis=(-3, -2)), axis=-1) for f in (xp.std, xp.mean))
    return std + 0.3 * mean
