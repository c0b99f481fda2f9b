"""Masks of objects as pure functions: resizing, and losses over pixels."""

from __future__ import annotations

from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax import Array

from vit_jax.array_types import Bool, Float, Int


def resize_bilinear(x: Float[Array, '*B H W'], size: Sequence[int]) -> Float[Array, '*B h w']:
    """Resize by interpolating between the centers of pixels, without antialiasing."""
    return jax.image.resize(x, (*x.shape[:-2], *size), 'linear', antialias=False)


def from_segments(segments: Int[Array, 'B H W'], count: int) -> Bool[Array, 'B N H W']:
    """The mask of each object n < `count`, where `segments` is n + 1."""
    return segments[:, None] == jnp.arange(1, count + 1)[:, None, None]


def focal_loss(
    logits: Float[Array, '*B H W'],
    targets: Bool[Array, '*B H W'],
    real: Bool[Array, '*#B H W'],
    alpha: float = 0.25,
    gamma: float = 2.0,
) -> Float[Array, '*B']:
    """Focal loss, cross entropy with less weight for easy pixels; the mean over each mask.

    -a (1 - p)^gamma log p, where p is the probability of the true label, and a is alpha within the
    object and 1 - alpha outside of it (Lin et al., 2017, arXiv:1708.02002, equation 5).

    Args:
      logits: of each pixel being in the object.
      targets: 1 for pixels in the object, else 0.
      real: where the image is not padding; the other pixels do not count.
      alpha, gamma: see above.
    """
    margin = jnp.where(targets, logits, -logits)
    weight = jnp.where(targets, alpha, 1 - alpha) * jax.nn.sigmoid(-margin) ** gamma
    pixels = weight * jax.nn.softplus(-margin) * real
    return pixels.sum((-2, -1)) / real.sum((-2, -1)).clip(1)


def dice_loss(
    logits: Float[Array, '*B H W'],
    targets: Bool[Array, '*B H W'],
    real: Bool[Array, '*#B H W'],
) -> Float[Array, '*B']:
    """1 - (2 |p t| + 1) / (|p| + |t| + 1) of each mask, with |.| the sum over its real pixels.

    Milletari et al., 2016, arXiv:1606.04797. The added ones are DETR's, and give an object without
    pixels a loss too. See `focal_loss` for the arguments.
    """
    probs, targets = jax.nn.sigmoid(logits) * real, targets & real
    shared = (probs * targets).sum((-2, -1))
    return 1 - (2 * shared + 1) / (probs.sum((-2, -1)) + targets.sum((-2, -1)) + 1)
