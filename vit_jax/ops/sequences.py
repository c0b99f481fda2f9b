"""Images of a batch: pixel ranges, and sequences of patches of images of different sizes."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from vit_jax.array_types import Bool, Float, Int, Num
from vit_jax.errors import UserError


class Sequences(NamedTuple):
    """Patches, one image per row, as in NaViT (arXiv:2307.06304) without packing.

    Attributes:
      values: [B N P], patches in raster order, channels last; padding after the image's patches.
      grid: [B 2], rows and columns of patches of each image.
    """

    values: Num[Array, 'B N P']
    grid: Int[Array, 'B 2']

    @property
    def real(self) -> Bool[Array, 'B N']:
        """Mask of real patches; false for padding."""
        return jnp.arange(self.values.shape[1]) < self.grid.prod(axis=-1, keepdims=True)


# Mean and standard deviation of each channel of images in [0, 1].
Normalization = tuple[Sequence[float], Sequence[float]]


def from_batch(
    batch: Mapping[str, Any],
    value_range: Sequence[float],
    normalization: Normalization | None = None,
) -> Float[Array, 'B H W C'] | Sequences:
    """Return the model's images: `image`, or the `patches` and `grid` of the plan `patches`.

    Bytes are scaled, see `to_range`.
    """
    if 'patches' not in batch:
        return to_range(batch['image'], value_range, normalization)
    values = batch['patches']
    if normalization is not None:  # channels are last in a patch
        mean, std = (np.resize(x, values.shape[-1]).tolist() for x in normalization)
        normalization = mean, std
    return Sequences(to_range(values, value_range, normalization), batch['grid'])


def side_and_channels(values: int) -> tuple[int, int]:
    """Return the side in pixels and the channels, 3 or 1, of a square patch of `values` numbers.

    Raises:
      UserError: if the values do not form such a patch.
    """
    for channels in (3, 1):
        side = math.isqrt(values // channels)
        if values and side**2 * channels == values:
            return side, channels
    raise UserError(f'{values} values do not form a square patch with 1 or 3 channels')


def join_patches(
    patches: Num[np.ndarray, 'N P'], grid: Sequence[int] | Int[np.ndarray, '2']
) -> Num[np.ndarray, 'H W C']:
    """Assemble the image from the first patches of a sequence; inverts
    `data.transforms.patches.cut`.

    Args:
      patches: Patches of the image, then padding.
      grid: Rows and columns of patches.
    """
    rows, columns = map(int, grid)
    side, channels = side_and_channels(patches.shape[1])
    image = patches[: rows * columns].reshape(rows, columns, side, side, channels)
    return image.swapaxes(1, 2).reshape(rows * side, columns * side, channels)


def to_range(
    image: Num[Array, '...'],
    value_range: Sequence[float],
    normalization: Normalization | None = None,
) -> Float[Array, '...']:
    """Convert bytes to float32, normalized or else in [low, high]; floats pass unchanged.

    `(-1, 1)` is (x - 127.5) / 127.5, as in the released ViT and BiT models.
    """
    if normalization is not None:
        return standardize(image, *normalization)
    if image.dtype != jnp.uint8:
        return image
    low, high = value_range
    return image.astype(jnp.float32) * ((high - low) / 255.0) + low


def standardize(
    image: Num[Array, '... C'], mean: Sequence[float], std: Sequence[float]
) -> Float[Array, '... C']:
    """Convert bytes to float32 (x / 255 - mean) / std per channel; floats pass unchanged."""
    if image.dtype != jnp.uint8:
        return image
    return (image.astype(jnp.float32) / 255.0 - jnp.asarray(mean)) / jnp.asarray(std)


def pair_mix(x: Float[Array, 'B ...'], weight: jax.typing.ArrayLike) -> Float[Array, 'B ...']:
    """Mix each example with its neighbor: `weight * x + (1 - weight) * neighbor(x)`."""
    weight = jnp.asarray(weight)
    return weight * x + (1 - weight) * neighbor(x)


def neighbor(x: Num[Array, 'B ...']) -> Num[Array, 'B ...']:
    """Swap examples 2i and 2i + 1.

    The batch is shuffled, so a neighbor is a random partner, and it is on the same device in any
    layout: mixing examples needs no communication.
    """
    pairs = x.reshape(x.shape[0] // 2, 2, *x.shape[1:])
    return pairs[:, ::-1].reshape(x.shape)
