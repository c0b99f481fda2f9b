"""Pixel values: bytes to the range that a model expects. Parameter-free, on the device."""

from __future__ import annotations

from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax import Array

from vit_jax.array_types import Float, Num


def to_range(image: Num[Array, '...'], value_range: Sequence[float]) -> Float[Array, '...']:
    """Bytes 0..255 to float32 in [low, high]; floats pass unchanged.

    `(-1, 1)` is (x - 127.5) / 127.5, which the released ViT and BiT models expect.
    """
    if image.dtype != jnp.uint8:
        return image
    low, high = value_range
    return image.astype(jnp.float32) * ((high - low) / 255.0) + low


def standardize(
    image: Num[Array, '... C'], mean: Sequence[float], std: Sequence[float]
) -> Float[Array, '... C']:
    """Bytes 0..255 to float32 (x / 255 - mean) / std of each color; floats pass unchanged."""
    if image.dtype != jnp.uint8:
        return image
    return (image.astype(jnp.float32) / 255.0 - jnp.asarray(mean)) / jnp.asarray(std)


def pair_mix(x: Float[Array, 'B ...'], weight: jax.typing.ArrayLike) -> Float[Array, 'B ...']:
    """`weight * x + (1 - weight) * partner`, where the partner is the neighbor in the batch."""
    weight = jnp.asarray(weight)
    return weight * x + (1 - weight) * neighbor(x)


def neighbor(x: Num[Array, 'B ...']) -> Num[Array, 'B ...']:
    """Swap examples 2i and 2i + 1.

    The batch is shuffled, so a neighbor is as random a partner as any other, and it
    lies on the same device whatever the layout: mixing examples needs no communication.
    """
    pairs = x.reshape(x.shape[0] // 2, 2, *x.shape[1:])
    return pairs[:, ::-1].reshape(x.shape)
