"""Attention to a few sampled points of a map, and blocks of a decoder with it.

Zhu et al., 2021, Deformable DETR, arXiv:2010.04159, section 4.1, with one map. Queries may form
groups, which do not see each other (Group DETR, Chen et al., 2023, arXiv:2207.13085).
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from vit_jax.array_types import Bool, Float
from vit_jax.nn.dense import Dense
from vit_jax.nn.encoder_decoder import EncoderBlock
from vit_jax.nn.maps import keep
from vit_jax.nn.norms import LayerNorm
from vit_jax.ops.masks import corners

_zeros = nn.initializers.zeros


@dataclasses.dataclass(frozen=True)
class DeformableFields:
    """Attention of queries to points of a map.

    Attributes:
      heads: Heads of the attention.
      points: Points that each head samples.
      sampling: How points are sampled: by 'gather', or by a 'product' with the weights of all
        cells.
    """

    heads: int = 16
    points: int = 2
    sampling: str = 'gather'


class Cells(NamedTuple):
    """A map that queries attend to.

    Attributes:
      tokens: Cells row by row.
      mask: True for cells that are not padding.
      size: Rows and columns.
    """

    tokens: Float[Array, 'B N D']
    mask: Bool[Array, 'B N']
    size: tuple[int, int]


def sample_by_gather(
    values: Float[Array, 'B N H K'],
    size: tuple[int, int],
    points: Float[Array, 'B Q H P 2'],
    weights: Float[Array, 'B Q H P'],
) -> Float[Array, 'B Q H K']:
    """Add up values at points, each interpolated from the four cells around it.

    Args:
      values: Values of the cells of a map for each head.
      size: Rows and columns of the map.
      points: Points (x, y) of each query and head, relative to the sides of the map; cells outside
        of the map are zero.
      weights: Weights of the points.
    """
    batch, queries, heads, count, _ = points.shape
    at = corners(points.swapaxes(1, 2).reshape(batch, heads, queries * count, 2), size)
    cells = jnp.take_along_axis(values.swapaxes(1, 2)[None], at.pixel[..., None], axis=-2)
    shares = at.weight.reshape(4, batch, heads, queries, count) * weights.swapaxes(1, 2)
    cells = cells.reshape(*shares.shape, -1)
    return jnp.einsum(
        'cbhqpk,cbhqp->bqhk',
        *(cells, shares.astype(values.dtype)),
        preferred_element_type=jnp.float32,
    )


def sample_by_product(
    values: Float[Array, 'B N H K'],
    size: tuple[int, int],
    points: Float[Array, 'B Q H P 2'],
    weights: Float[Array, 'B Q H P'],
) -> Float[Array, 'B Q H K']:
    """Compute `sample_by_gather` as a matrix product with `cell_weights`."""
    shares = cell_weights(size, points, weights).astype(values.dtype)
    return jnp.einsum('bhqn,bnhk->bqhk', shares, values, preferred_element_type=jnp.float32)


def cell_weights(
    size: tuple[int, int], points: Float[Array, 'B Q H P 2'], weights: Float[Array, 'B Q H P']
) -> Float[Array, 'B H Q N']:
    """Compute the weight of each cell of a map for each query and head; see `sample_by_gather`."""
    height, width = size

    def near(place: Array, side: int) -> Array:
        return jnp.maximum(1 - jnp.abs(place[..., None] * side - 0.5 - jnp.arange(side)), 0)

    rows = near(points[..., 1], height) * weights[..., None]
    columns = near(points[..., 0], width)
    shares = jnp.einsum('bqhpi,bqhpj->bhqij', rows, columns, precision='high')
    return shares.reshape(*shares.shape[:3], height * width)


SAMPLINGS = {'gather': sample_by_gather, 'product': sample_by_product}


def _directions(num_heads: int, points: int) -> np.ndarray:
    """Return initial offsets [H P 2]: each head looks in a direction, its points at 1, 2, ..."""
    angles = np.arange(num_heads) * (2 * math.pi / num_heads)
    units = np.stack([np.cos(angles), np.sin(angles)], axis=-1)
    units /= np.abs(units).max(-1, keepdims=True)
    return units[:, None] * np.arange(1, points + 1)[:, None]


class DeformableAttention(nn.Module):
    """Each head of a query adds up a map at a few points around the query's box.

    Points are offsets, `offsets`, from the center of the box, in half sides of the box divided by
    the number of points; their weights are a softmax of `scores`. `values` and `out` are the
    projections. If `intermediates` is mutable, it receives the weights of the cells.

    Attributes:
      num_heads: H; divides the width.
      points: P, points of each head.
      sampling: 'gather' or 'product', a key of SAMPLINGS; the results are the same.
      dtype: Computation dtype; points, weights and sums are float32.
    """

    num_heads: int
    points: int
    sampling: str = 'gather'
    dtype: Any = jnp.float32

    @nn.compact
    def __call__(
        self, queries: Float[Array, 'B Q D'], boxes: Float[Array, 'B Q 4'], cells: Cells
    ) -> Float[Array, 'B Q D']:
        """Attend from each query to the map around its box.

        Args:
          queries: Queries, with their positions.
          boxes: Centered boxes (x, y, w, h), relative to the sides of the map.
          cells: The map; padding is zero.
        """
        heads, count, width = self.num_heads, self.points, queries.shape[-1]
        shape = (*queries.shape[:2], heads, count)
        values = Dense(width, dtype=self.dtype, bias_init=_zeros, name='values')(cells.tokens)
        values = jnp.where(cells.mask[..., None], values, 0)
        values = values.reshape(*values.shape[:2], heads, width // heads)

        def start(key: Array, shape: Any, dtype: Any = jnp.float32) -> Array:
            del key
            return jnp.asarray(_directions(heads, count), dtype).reshape(shape)

        offsets = Dense(2 * heads * count, True, self.dtype, _zeros, start, name='offsets')
        scores = Dense(heads * count, True, self.dtype, _zeros, _zeros, name='scores')
        moved = offsets(queries).astype(jnp.float32).reshape(*shape, 2) / count
        boxes = boxes[:, :, None, None]
        points = boxes[..., :2] + moved * boxes[..., 2:] * 0.5
        weights = jax.nn.softmax(scores(queries).astype(jnp.float32).reshape(shape))
        if self.is_mutable_collection('intermediates'):
            keep(self, cell_weights(cells.size, points, weights))
        x = SAMPLINGS[self.sampling](values, cells.size, points, weights)
        x = x.reshape(*queries.shape).astype(self.dtype)
        return Dense(width, dtype=self.dtype, bias_init=_zeros, name='out')(x)


class DeformableBlock(EncoderBlock):
    """Attention among the queries of a group, to points of a map, and a feed-forward layer.

    Attributes:
      cross_heads, points, sampling: See `DeformableAttention`.

    Other attributes: see `EncoderBlock`.
    """

    cross_heads: int = 16
    points: int = 4
    sampling: str = 'gather'

    def setup(self) -> None:
        super().setup()
        self.deformable = DeformableAttention(
            self.cross_heads, self.points, self.sampling, self.dtype
        )
        self.cross_norm = LayerNorm(self.norm_eps, dtype=self.dtype)

    def __call__(  # type: ignore[override]  # other inputs
        self,
        x: Float[Array, 'B Q D'],
        cells: Cells,
        boxes: Float[Array, 'B Q 4'],
        positions: Float[Array, 'B Q D'],
        train: bool = False,
        groups: int = 1,
    ) -> Float[Array, 'B Q D']:
        """Apply the block to the queries of `groups` groups, one after the other."""
        shape = x.shape
        folded = (len(x) * groups, -1, shape[-1])
        x = self._attend_to_itself(x.reshape(folded), positions.reshape(folded), train)
        x = x.reshape(shape)
        queries = self._enter(x, self.cross_norm)
        y = self.deformable(queries + positions.astype(x.dtype), boxes, cells)
        return self._feed_forward(self._leave(x, y, self.cross_norm, train), train)


def sine_boxes(boxes: Float[Array, '*B 4'], dim: int) -> Float[Array, '*B D']:
    """Compute sine-cosine features of boxes (x, y, w, h), a quarter of them for y, x, w and h.

    Liu et al., 2022, DAB-DETR, arXiv:2201.12329, section 4.2. Sines and cosines are interleaved.
    """
    frequency = 10_000.0 ** -(np.arange(0, dim // 4, 2) / (dim // 4))
    angles = 2 * np.pi * boxes[..., np.array([1, 0, 2, 3]), None] * frequency.astype(np.float32)
    pairs = jnp.stack([jnp.sin(angles), jnp.cos(angles)], axis=-1)
    return pairs.reshape(*boxes.shape[:-1], dim)


def move_boxes(boxes: Float[Array, '*B 4'], changes: Float[Array, '*C 4']) -> Float[Array, '*D 4']:
    """Move centered boxes by shares of their sides, and scale the sides by an exponential.

    Leading axes are broadcast.
    """
    centers = boxes[..., :2] + changes[..., :2] * boxes[..., 2:]
    sides = boxes[..., 2:] * jnp.exp(changes[..., 2:])
    return jnp.concatenate([centers, sides], axis=-1)
