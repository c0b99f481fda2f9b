"""Depth of pixels, in NumPy."""

from __future__ import annotations

import numpy as np

from vit_jax.array_types import Float

NAMES = ('RMSE', 'abs_rel', 'delta1')
UNKNOWN = 0.0  # depth of pixels without a measurement


def measure(depth: Float[np.ndarray, ' N'], truth: Float[np.ndarray, ' N']) -> dict[str, float]:
    """Measure the depths of an image's pixels with positive true depths.

    Eigen et al., 2014, arXiv:1406.2283, section 4.

    Returns:
      RMSE: Root mean squared error.
      abs_rel: Mean error as a share of the true depth.
      delta1: Share of pixels whose depth is less than 25 % too large or too small.
    """
    depth, truth = depth.astype(np.float64), truth.astype(np.float64)
    ratio = np.maximum(depth / truth, truth / depth)
    error = depth - truth
    values = np.sqrt((error**2).mean()), (np.abs(error) / truth).mean(), (ratio < 1.25).mean()
    return dict(zip(NAMES, map(float, values), strict=True))
