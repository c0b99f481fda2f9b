"""Masks of a detector's objects: products of features of queries and of pixels.

RF-DETR for instance segmentation, Robinson et al., 2025, arXiv:2511.09554.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax import Array

from vit_jax.array_types import Float
from vit_jax.models.eomt import Depthwise
from vit_jax.nn.blocks import GELUS
from vit_jax.nn.dense import Dense
from vit_jax.nn.detection import UNIFORM, ZEROS
from vit_jax.nn.norms import LayerNorm

_BLOCK_EPS, _QUERY_EPS = 1e-6, 1e-5  # in norms


@dataclasses.dataclass(frozen=True)
class MaskFields:
    """Masks of objects.

    Attributes:
      stride: Side in pixels of the square of one mask logit; 0 for no masks, 4 in the paper.
      mlp_dim: Hidden width of the layers that turn queries into features of masks.
    """

    stride: int = 0
    mlp_dim: int = 1024


class MaskHead(nn.Module):
    """Features whose products are the masks of a detector's queries, after each block.

    The map is enlarged to the size of the masks. `block_0`, ... continue from each other, and `map`
    projects the output of each; the proposals use the enlarged map itself. `bias` is the logit of
    all masks for features of zero, in the last channel, which is one in the maps.
    """

    width: int
    depth: int
    mlp_dim: int
    dtype: Any

    def setup(self) -> None:
        self.block = [MaskBlock(self.dtype) for _ in range(self.depth)]
        self.query = MaskQuery(self.mlp_dim, self.dtype)
        self.map = nn.Conv(self.width, (1, 1), kernel_init=UNIFORM, dtype=self.dtype)
        self.bias = self.param('bias', ZEROS, (1,))

    def __call__(
        self,
        features: Float[Array, 'B h w D'],
        size: tuple[int, int],
        proposals: Float[Array, 'B G Q D'],
        hidden: Float[Array, 'B L GQ D'],
    ) -> dict[str, Float[Array, 'B ...']]:
        """Compute `mask_queries` [B 1+L GQ D+1] and `mask_maps` [B 1+L h w D+1].

        Args:
          features: Map of the image.
          size: Rows and columns of the masks.
          proposals: Features of the proposals of each group.
          hidden: Queries after each block of the decoder.
        """
        shape = len(features), *size, self.width
        x = jax.image.resize(features, shape, 'linear', antialias=False).astype(self.dtype)
        maps = [x]
        for block in self.block:
            x = block(x)
            maps.append(self.map(x))
        first = proposals.reshape(len(features), 1, -1, self.width).astype(hidden.dtype)
        queries = self.query(jnp.concatenate([first, hidden], axis=1))
        stacked = jnp.stack(maps, axis=1)
        bias = jnp.broadcast_to(self.bias.astype(queries.dtype), (*queries.shape[:-1], 1))
        return {
            'mask_queries': jnp.concatenate([queries, bias], axis=-1),
            'mask_maps': jnp.concatenate([stacked, jnp.ones_like(stacked[..., :1])], axis=-1),
        }


class MaskBlock(nn.Module):
    """A depthwise convolution of 3 x 3, a norm, a dense layer and a GELU, added to the map."""

    dtype: Any

    @nn.compact
    def __call__(self, x: Float[Array, 'B h w D']) -> Float[Array, 'B h w D']:
        width = x.shape[-1]
        y = Depthwise(self.dtype, True, name='depthwise')(x)
        y = LayerNorm(_BLOCK_EPS, dtype=self.dtype, name='norm')(y)
        return x + GELUS['erf'](Dense(width, True, self.dtype, UNIFORM, ZEROS, name='dense')(y))


class MaskQuery(nn.Module):
    """Features of queries: an MLP `fc1`, `fc2` on normalized ones, added to them, and `out`."""

    mlp_dim: int
    dtype: Any

    @nn.compact
    def __call__(self, x: Float[Array, '*B D']) -> Float[Array, '*B D']:
        width = x.shape[-1]
        y = LayerNorm(_QUERY_EPS, dtype=self.dtype, name='norm')(x)
        y = GELUS['erf'](Dense(self.mlp_dim, True, self.dtype, UNIFORM, ZEROS, name='fc1')(y))
        x = x + Dense(width, True, self.dtype, UNIFORM, ZEROS, name='fc2')(y)
        return Dense(width, True, self.dtype, UNIFORM, ZEROS, name='out')(x)
