"""Images of different sizes as sequences of patches, padded to the same number."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import Array

from vit_jax.array_types import Bool, Float, Int, Num
from vit_jax.errors import UserError
from vit_jax.ops import pixels


class Sequences(NamedTuple):
    """Patches of one image a row, as in NaViT (arXiv:2307.06304) without packing.

    Attributes:
      values: of the patches, row by row of the image, channels running fastest [B N P]; those
        beyond the image's are padding.
      grid: rows and columns of patches of each image [B 2].
    """

    values: Num[Array, 'B N P']
    grid: Int[Array, 'B 2']

    @property
    def real(self) -> Bool[Array, 'B N']:
        """True for patches of the image and false for padding."""
        return jnp.arange(self.values.shape[1]) < self.grid.prod(axis=-1, keepdims=True)


def of_batch(
    batch: Mapping[str, Any], value_range: Sequence[float]
) -> Float[Array, 'B H W C'] | Sequences:
    """A model's images from a batch: `image`, or the `patches` and `grid` of the plan `patches`.

    Bytes are scaled to `value_range`.
    """
    if 'patches' not in batch:
        return pixels.to_range(batch['image'], value_range)
    return Sequences(pixels.to_range(batch['patches'], value_range), batch['grid'])


def side_and_channels(values: int) -> tuple[int, int]:
    """The side in pixels and the channels, 3 or 1, of a square patch of so many values.

    Raises:
      UserError: if there is no such patch.
    """
    for channels in (3, 1):
        side = math.isqrt(values // channels)
        if values and side**2 * channels == values:
            return side, channels
    raise UserError(f'{values} values are no square patch of 1 or 3 channels')


def joined(
    patches: Num[np.ndarray, 'N P'], grid: Sequence[int] | Int[np.ndarray, '2']
) -> Num[np.ndarray, 'H W C']:
    """The image of the first patches of a sequence; inverts `data.transforms.patches.cut`.

    Args:
      patches: of the image, and padding after these.
      grid: rows and columns of patches.
    """
    rows, columns = map(int, grid)
    side, channels = side_and_channels(patches.shape[1])
    image = patches[: rows * columns].reshape(rows, columns, side, side, channels)
    return image.swapaxes(1, 2).reshape(rows * side, columns * side, channels)
