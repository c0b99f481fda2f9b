"""Mask operations as pure functions: resizing, sampling at points, and losses over pixels."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from vit_jax.array_types import Bool, Float, Int, Key


def resize_bilinear(x: Float[Array, '*B H W'], size: Sequence[int]) -> Float[Array, '*B h w']:
    """Resize by interpolating between pixel centers, without antialiasing."""
    return jax.image.resize(x, (*x.shape[:-2], *size), 'linear', antialias=False)


def from_segments(segments: Int[Array, 'B H W'], count: int) -> Bool[Array, 'B N H W']:
    """Return the mask of each object n < `count`, where `segments` is n + 1."""
    return segments[:, None] == jnp.arange(1, count + 1)[:, None, None]


def from_features(
    queries: Float[Array, '*B Q K'], maps: Float[Array, '*B h w K']
) -> Float[Array, '*B Q h w']:
    """Compute mask logits in float32, products of features of queries and of pixels."""
    return jnp.einsum('...qk,...hwk->...qhw', queries, maps, preferred_element_type=jnp.float32)


class Corners(NamedTuple):
    """Four pixels around each point; they come first, since TPUs pad short last axes.

    Attributes:
      pixel: Index in the flattened map.
      weight: Weight in a bilinear interpolation; 0 outside of the map.
    """

    pixel: Int[Array, '4 *B P']
    weight: Float[Array, '4 *B P']


def corners(points: Float[Array, '*B P 2'], size: Sequence[int]) -> Corners:
    """Return the pixels around points (x, y), relative to the sides of a map of this size.

    As in PyTorch's `grid_sample` with `align_corners=False`.
    """
    height, width = size
    places = points * jnp.array([width, height], points.dtype) - 0.5
    low = jnp.floor(places)
    pixels, weights = [], []
    for i, j in ((0, 0), (0, 1), (1, 0), (1, 1)):
        x, y = low[..., 0] + j, low[..., 1] + i
        is_inside = (x >= 0) & (x < width) & (y >= 0) & (y < height)
        share = (1 - jnp.abs(places[..., 0] - x)) * (1 - jnp.abs(places[..., 1] - y))
        pixels.append(y.clip(0, height - 1) * width + x.clip(0, width - 1))
        weights.append(jnp.where(is_inside, share, 0))
    return Corners(jnp.stack(pixels).astype(jnp.int32), jnp.stack(weights))


def sample(
    maps: Float[Array, '*B K H W'], points: Float[Array, '*B P 2']
) -> Float[Array, '*B K P']:
    """Interpolate K maps bilinearly at the same points, 0 outside of the maps; see `corners`.

    Gathers of single numbers are slow on TPUs. Several maps are gathered pixel by pixel; a single
    map is multiplied by the weights of its rows and columns.
    """
    if maps.shape[-3] > 1:
        return sample_by_gather(maps, points)
    return jax.lax.platform_dependent(maps, points, tpu=sample_by_product, default=sample_by_gather)


def sample_by_gather(maps: Array, points: Array) -> Array:
    """Compute `sample` from the four pixels around each point."""
    corner_points = corners(points, maps.shape[-2:])

    def sample_one(maps: Array, corner_points: Corners) -> Array:
        return (maps[corner_points.pixel] * corner_points.weight[..., None]).sum(0).T

    *batch, count = maps.shape[:-2]
    flat = maps.reshape(-1, count, maps.shape[-2] * maps.shape[-1]).swapaxes(1, 2)
    flat_corners = jax.tree.map(lambda x: x.reshape(4, -1, x.shape[-1]), corner_points)
    return jax.vmap(sample_one, (0, 1))(flat, flat_corners).reshape(*batch, count, -1)


def sample_by_product(maps: Array, points: Array) -> Array:
    """Compute `sample` by matrix products, with weights of 0 away from a point."""
    height, width = maps.shape[-2:]
    x, y = (points[..., i] * side - 0.5 for i, side in enumerate((width, height)))

    def weights(place: Array, side: int) -> Array:
        return jnp.maximum(1 - jnp.abs(place[..., None] - jnp.arange(side)), 0)

    column_sums = jnp.einsum('...khw,...pw->...khp', maps, weights(x, width), precision='high')
    return jnp.einsum('...khp,...ph->...kp', column_sums, weights(y, height), precision='high')


def uncertain_points(
    key: Key[Array, ''],
    mask: Float[Array, 'H W'],
    count: int,
    oversample: float,
    importance: float,
) -> Float[Array, 'P 2']:
    """Draw points (x, y), relative to the sides, most of them where a mask is uncertain.

    A share `importance` of the `count` points are those with logits closest to 0 among
    `oversample * count` random points; the others are random (PointRend, Kirillov et al., 2020,
    arXiv:1912.08193, section 4.1.2).

    Args:
      key: Key of the random points.
      mask: Mask logits.
      count, oversample, importance: See above.
    """
    first, second = jax.random.split(key)
    points = jax.random.uniform(first, (int(count * oversample), 2))
    num_uncertain = int(importance * count)
    logits = sample(mask[None], points)[0]
    nearest = jax.lax.top_k(-jnp.abs(logits), num_uncertain)[1]
    uncertain = jnp.stack([points[:, 0][nearest], points[:, 1][nearest]], axis=-1)
    return jnp.concatenate([uncertain, jax.random.uniform(second, (count - num_uncertain, 2))])


def focal_loss(
    logits: Float[Array, '*B H W'],
    targets: Bool[Array, '*B H W'],
    real: Bool[Array, '*#B H W'],
    alpha: float = 0.25,
    gamma: float = 2.0,
) -> Float[Array, '*B']:
    """Focal loss: cross entropy with less weight for easy pixels, averaged over each mask.

    -a (1 - p)^gamma log p, where p is the probability of the true label, and a is alpha within the
    object and 1 - alpha outside of it (Lin et al., 2017, arXiv:1708.02002, equation 5).

    Args:
      logits: Logit of each pixel to be in the object.
      targets: 1 for pixels in the object, else 0.
      real: False for padding, which does not count.
      alpha, gamma: See above.
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
    """1 - (2 |p t| + 1) / (|p| + |t| + 1) for each mask, where |.| sums over real pixels.

    Milletari et al., 2016, arXiv:1606.04797. The added ones follow DETR, so that an object without
    pixels has a loss too. For arguments see `focal_loss`.
    """
    probs, targets = jax.nn.sigmoid(logits) * real, targets & real
    intersection = (probs * targets).sum((-2, -1))
    return 1 - (2 * intersection + 1) / (probs.sum((-2, -1)) + targets.sum((-2, -1)) + 1)
