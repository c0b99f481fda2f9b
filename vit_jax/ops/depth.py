"""Depth of pixels: its loss, and how far predictions are from the truth; in NumPy or JAX."""

from __future__ import annotations

from typing import Any

from vit_jax.array_types import Bool, Float

NAMES = ('RMSE', 'abs_rel', 'delta1')
UNKNOWN = 0.0  # depth of pixels without a measurement
EPS = 1e-3  # meters; added to depths before the logarithm
MEAN_WEIGHT = 0.15  # of the squared mean of logarithmic errors
CLOSE = 1.25  # largest ratio of depths that counts for delta1

Maps = Float[Any, '*B H W']
Valid = Bool[Any, '*B H W']


def sig_loss(
    depth: Maps,
    truth: Maps,
    valid: Valid,
    axes: tuple[int, ...] = (-2, -1),
    unbiased: bool = False,
    spread: float | Any = 1.0,
) -> Float[Any, '*b']:
    """Compute SigLoss, sqrt(var(g) + 0.15 mean(g)^2) of logarithmic errors g.

    Eigen et al., 2014, arXiv:1406.2283, as in AdaBins (Bhat et al., 2021, arXiv:2011.14141).

    Args:
      depth: Predicted depths.
      truth: True depths.
      valid: Where they are known.
      axes: Axes whose pixels are compared together; the others remain.
      unbiased: Whether the variance is an unbiased estimate.
      spread: Weight of the variance.

    Returns:
      Losses; 0 without known depth.
    """
    xp = truth.__array_namespace__()
    logs = xp.log(xp.where(valid, depth, 1) + EPS) - xp.log(xp.where(valid, truth, 1) + EPS)
    errors = xp.where(valid, logs, 0)
    count = valid.sum(axes, keepdims=True)
    mean = errors.sum(axes, keepdims=True) / xp.maximum(count, 1)
    squares = xp.where(valid, (errors - mean) ** 2, 0).sum(axes, keepdims=True)
    variance = squares / xp.maximum(count - int(unbiased), 1)
    total = (spread * variance + MEAN_WEIGHT * mean**2).squeeze(axes)
    return xp.where(total > 0, xp.sqrt(xp.where(total > 0, total, 1)), 0)


def measure(depth: Maps, truth: Maps, valid: Valid) -> dict[str, Float[Any, '*B']]:
    """Measure each image's depths in meters (Eigen et al., 2014, arXiv:1406.2283, section 4).

    Returns:
      RMSE: Root mean squared error in meters; like the others 0 without known depth.
      abs_rel: Mean error as a share of the true depth.
      delta1: Share of pixels whose depth is less than 25 % too large or too small.
    """
    xp = truth.__array_namespace__()
    safe = xp.where(valid, truth, 1)
    errors = xp.where(valid, xp.abs(depth - truth), 0)
    ratios = xp.maximum(depth / safe, safe / depth)
    values = xp.sqrt(mean(errors**2, valid)), mean(errors / safe, valid)
    return dict(zip(NAMES, (*values, mean(1.0 * (ratios < CLOSE), valid)), strict=True))


def mean(values: Maps, valid: Valid) -> Float[Any, '*B']:
    """Average each map where depth is known; 0 if it is nowhere."""
    xp = values.__array_namespace__()
    axes = (-2, -1)
    return xp.where(valid, values, 0).sum(axes) / xp.maximum(valid.sum(axes), 1)


def eigen_crop(height: int, width: int) -> tuple[slice, slice]:
    """Return the rows and columns of NYU's images that are measured, scaled to another size.

    Eigen et al., 2014, arXiv:1406.2283, without borders that the sensor does not see.
    """
    rows, columns = (45, 471), (41, 601)  # of 480 x 640 pixels
    return (
        slice(*(int(y / 480 * height) for y in rows)),
        slice(*(int(x / 640 * width) for x in columns)),
    )
