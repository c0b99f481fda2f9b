"""Masks compared with their segments at sampled points.

Cheng et al., 2022, Mask2Former, arXiv:2112.01527, section 3.3.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from vit_jax.array_types import Bool, Float, Int, Key, Shaped
from vit_jax.ops import masks as mask_ops

MASKS_PER_CHUNK = 10  # masks compared with their segments together, at 12,544 points each


class Sampling(NamedTuple):
    """Points where a mask is compared, see `ops.masks.uncertain_points`.

    Attributes:
      points: Number of points.
      oversample: Number of random points, relative to the number of uncertain points to choose.
      importance: Share of points that are chosen by uncertainty.
    """

    points: int
    oversample: float
    importance: float


# The values of a mask at points of one image, and their weights: (fields, points, number).
Truth = Callable[[Any, Array, Array], tuple[Array, Array]]


def prediction_keys(data: Shaped[Array, 'B 2'], count: int) -> Key[Array, 'B L 2']:
    """Return two keys for each of `count` predictions per image: for the points of the cost and of
    the loss.
    """

    def split(key: Array, number: Array) -> Array:
        return jax.random.split(jax.random.fold_in(key, number))

    split_all = jax.vmap(jax.vmap(split, (None, 0)), (0, None))
    return split_all(jax.random.wrap_key_data(data), jnp.arange(count))


def mask_costs(
    sampled: Float[Array, '*B Q P'], truth: Float[Array, '*B N P'], counts: Float[Array, '*B P']
) -> tuple[Float[Array, '*B N Q'], Float[Array, '*B N Q']]:
    """Compute the binary cross entropy and the dice loss of each mask and segment.

    Args:
      sampled: Mask logits of queries at points.
      truth: Masks of segments at these points.
      counts: Weights of the points.
    """
    weights = counts[..., None, :]

    def overlap(x: Array) -> Array:
        return jnp.einsum('...np,...qp->...nq', truth, x * weights)

    def area(x: Array) -> Array:
        return (x * weights).sum(-1)

    inside = jax.nn.sigmoid(sampled)
    count = counts.sum(-1).clip(1)[..., None, None]
    entropy = (area(jax.nn.softplus(sampled))[..., None, :] - overlap(sampled)) / count
    sizes = area(inside)[..., None, :] + area(truth)[..., None]
    return entropy, 1 - (2 * overlap(inside) + 1) / (sizes + 1)


def mask_losses(
    masks: Float[Array, 'B Q h w'],
    places: Int[Array, 'B N'],
    keys: Key[Array, ' B'],
    fields: Any,
    truth: Truth,
    sampling: Sampling,
) -> dict[str, Float[Array, ' B']]:
    """Sum `mask` and `dice` losses over the matched masks of each image.

    Masks are computed in chunks of MASKS_PER_CHUNK per image; chunks with only padding are
    skipped.

    Args:
      masks: Mask logits of each query.
      places: Query index of each object, -1 for none.
      keys: Keys of the random points.
      fields: Arrays of each image for `truth`.
      truth: Samples the mask of an object, whose number is 1 + its row.
      sampling: The points.
    """
    rows, count = places.shape
    places = jnp.pad(places, ((0, 0), (0, -count % MASKS_PER_CHUNK)), constant_values=-1)
    numbers = 1 + jnp.arange(places.shape[1]).reshape(-1, MASKS_PER_CHUNK)
    matched = jax.vmap(lambda mask, place: mask[place.clip(0)])(masks, places)

    def sum_losses(matched: Array, real: Array, numbers: Array, key: Array, fields: Any) -> dict:
        return _losses_of(matched, real, numbers, key, fields, truth, sampling)

    def losses_of_chunk(chunk: tuple[Array, Array, Array]) -> dict[str, Array]:
        matched, real, numbers = chunk

        def losses() -> dict[str, Array]:
            return jax.vmap(sum_losses, (0, 0, None, 0, 0))(matched, real, numbers, keys, fields)

        none = {'mask': jnp.zeros(rows), 'dice': jnp.zeros(rows)}
        return jax.lax.cond(real.any(), losses, lambda: none)

    def split_chunks(x: Array) -> Array:
        return x.reshape(rows, *numbers.shape, *x.shape[2:]).swapaxes(0, 1)

    chunk_losses = jax.lax.map(
        losses_of_chunk, (split_chunks(matched), split_chunks(places >= 0), numbers)
    )
    return {name: x.sum(0) for name, x in chunk_losses.items()}


def _losses_of(
    masks: Float[Array, 'K h w'],
    real: Bool[Array, ' K'],
    numbers: Int[Array, ' K'],
    key: Key[Array, ''],
    fields: Any,
    truth: Truth,
    sampling: Sampling,
) -> dict[str, Float[Array, '']]:
    """Sum `mask` and `dice` losses over the real masks of one image."""

    @jax.checkpoint  # store the points, not the values computed from them
    def losses(mask: Array, points: Array, number: Array) -> dict[str, Array]:
        logits = mask_ops.sample(mask[None], points)[0]
        inside, weights = truth(fields, points, number)
        entropy = (jax.nn.softplus(logits) - logits * inside) * weights
        probs, inside = jax.nn.sigmoid(logits) * weights, inside * weights
        dice = 1 - (2 * (probs * inside).sum() + 1) / (probs.sum() + inside.sum() + 1)
        return {'mask': entropy.sum() / weights.sum().clip(1), 'dice': dice}

    def sample_uncertain(number: Array, mask: Array) -> Array:
        return mask_ops.uncertain_points(jax.random.fold_in(key, number - 1), mask, *sampling)

    points = jax.vmap(sample_uncertain)(numbers, jax.lax.stop_gradient(masks))
    mask_losses = jax.vmap(losses)(masks, points, numbers)
    return {name: (x * real).sum() for name, x in mask_losses.items()}
