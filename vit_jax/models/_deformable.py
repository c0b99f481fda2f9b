"""Attention to a few sampled points of one map or several, and a decoder with it.

Zhu et al., 2021, Deformable DETR, arXiv:2010.04159, section 4.1. Queries may form groups, which do
not see each other (Group DETR, Chen et al., 2023, arXiv:2207.13085).
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from vit_jax.array_types import Bool, Float
from vit_jax.nn.dense import Dense
from vit_jax.nn.detection import Layers
from vit_jax.nn.encoder_decoder import EncoderBlock, LayerOutputs
from vit_jax.nn.maps import keep
from vit_jax.nn.norms import LayerNorm
from vit_jax.ops.masks import corners

_zeros = nn.initializers.zeros


@dataclasses.dataclass(frozen=True)
class DeformableFields:
    """Attention of queries to points of maps.

    Attributes:
      heads: Heads of the attention.
      points: Points of each map that each head samples.
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

    @property
    def real(self) -> Bool[Array, 'B h w']:
        """The mask as a map."""
        return self.mask.reshape(-1, *self.size)

    @property
    def shares(self) -> Float[Array, 'B 1 4']:
        """Shares (x, y, x, y) of the sides that are not padding."""
        rows, columns = self.real[:, :, 0].mean(1), self.real[:, 0, :].mean(1)
        return jnp.stack([columns, rows] * 2, axis=-1)[:, None]


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


def weights_of_patches(
    weights: Float[Array, 'B H Q N'], sizes: Sequence[tuple[int, int]], grid: tuple[int, int]
) -> Float[Array, 'B H Q P']:
    """Spread the weights of the cells of maps, one map after the other, over the patches of a grid.

    Each patch gets the weights of the parts of cells inside it.
    """
    ends = np.cumsum([height * width for height, width in sizes])
    total = jnp.zeros((*weights.shape[:-1], *grid))
    for of_map, size in zip(jnp.split(weights, ends[:-1], axis=-1), sizes, strict=True):
        rows, columns = map(_shares_of_patches, size, grid)
        of_cells = of_map.reshape(*of_map.shape[:-1], *size)
        total += jnp.einsum('bhqij,ik,jl->bhqkl', of_cells, rows, columns, precision='high')
    return total.reshape(*weights.shape[:-1], -1)


def _shares_of_patches(cells: int, patches: int) -> np.ndarray:
    """Return the share of each cell's side in each patch [cells patches]."""
    low, high = np.arange(cells)[:, None] / cells, np.arange(1, cells + 1)[:, None] / cells
    start, end = np.arange(patches) / patches, np.arange(1, patches + 1) / patches
    return (np.minimum(high, end) - np.maximum(low, start)).clip(0) * cells


SAMPLINGS = {'gather': sample_by_gather, 'product': sample_by_product}


def _directions(num_heads: int, points: int, maps: int) -> np.ndarray:
    """Return initial offsets [H P 2]: each head looks in a direction, its points at 1, 2, ..., the
    same in all maps.
    """
    angles = np.arange(num_heads) * (2 * math.pi / num_heads)
    units = np.stack([np.cos(angles), np.sin(angles)], axis=-1)
    units /= np.abs(units).max(-1, keepdims=True)
    steps = np.tile(np.arange(1, points + 1), maps)
    return units[:, None] * steps[:, None]


class DeformableAttention(nn.Module):
    """Each head of a query adds up maps at a few points of each around the query's box.

    Points are offsets, `offsets`, from the center of the box, in half sides of the box divided by
    the number of points; their weights are a softmax of `scores` over the points of all maps.
    `values` and `out` are the projections. If `intermediates` is mutable, it receives the weights
    of the cells, one map after the other.

    Attributes:
      num_heads: H; divides the width.
      points: P, points of each head in each map.
      sampling: 'gather' or 'product', a key of SAMPLINGS; the results are the same.
      dtype: Computation dtype; points, weights and sums are float32.
    """

    num_heads: int
    points: int
    sampling: str = 'gather'
    dtype: Any = jnp.float32

    @nn.compact
    def __call__(
        self,
        queries: Float[Array, 'B Q D'],
        boxes: Sequence[Float[Array, 'B Q 4']],
        maps: Sequence[Cells],
    ) -> Float[Array, 'B Q D']:
        """Attend from each query to the maps around its box.

        Args:
          queries: Queries, with their positions.
          boxes: For each map, centered boxes (x, y, w, h), relative to its sides.
          maps: Maps; padding is zero.
        """
        heads, count, width = self.num_heads, len(maps) * self.points, queries.shape[-1]
        project = Dense(width, dtype=self.dtype, bias_init=_zeros, name='values')

        def start(key: Array, shape: Any, dtype: Any = jnp.float32) -> Array:
            del key
            return jnp.asarray(_directions(heads, self.points, len(maps)), dtype).reshape(shape)

        offsets = Dense(2 * heads * count, True, self.dtype, _zeros, start, name='offsets')
        scores = Dense(heads * count, True, self.dtype, _zeros, _zeros, name='scores')
        shape = (*queries.shape[:2], heads, count)
        moved = offsets(queries).astype(jnp.float32).reshape(*shape, 2) / self.points
        weights = jax.nn.softmax(scores(queries).astype(jnp.float32).reshape(shape))
        sums, of_cells = [], []
        for i, (cells, around) in enumerate(zip(maps, boxes, strict=True)):
            own = slice(i * self.points, (i + 1) * self.points)
            around = around[:, :, None, None]
            points = around[..., :2] + moved[..., own, :] * around[..., 2:] * 0.5
            values = jnp.where(cells.mask[..., None], project(cells.tokens), 0)
            values = values.reshape(*values.shape[:2], heads, width // heads)
            sampled = cells.size, points, weights[..., own]
            sums.append(SAMPLINGS[self.sampling](values, *sampled))
            if self.is_mutable_collection('intermediates'):
                of_cells.append(cell_weights(*sampled))
        if of_cells:
            keep(self, jnp.concatenate(of_cells, axis=-1))
        x = functools.reduce(jnp.add, sums).reshape(queries.shape).astype(self.dtype)
        return Dense(width, dtype=self.dtype, bias_init=_zeros, name='out')(x)


class DeformableBlock(EncoderBlock):
    """Attention among the queries of a group, to points of maps, and a feed-forward layer.

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
        maps: Sequence[Cells],
        boxes: Sequence[Float[Array, 'B Q 4']],
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
        y = self.deformable(queries + positions.astype(x.dtype), boxes, maps)
        return self._feed_forward(self._leave(x, y, self.cross_norm, train), train)


class Decoder(LayerOutputs):
    """Blocks that read the maps around each query's box.

    `positions` makes positions of the queries from their boxes, which stay the same for all blocks.
    """

    @nn.compact
    def __call__(
        self,
        x: Float[Array, 'B Q D'],
        maps: Sequence[Cells],
        boxes: Float[Array, 'B Q 4'],
        train: bool,
        groups: int,
    ) -> Float[Array, 'B L Q D']:
        """Stack the outputs of all blocks.

        Args:
          x: Queries.
          maps: Maps of the image; positions are relative to the sides of the first.
          boxes: Boxes, relative to the real part of the image.
          train: Whether dropout acts.
          groups: Number of groups of the queries.
        """
        width, dtype = x.shape[-1], self.block[-1].dtype
        places = [boxes * cells.shares for cells in maps]
        features = sine_boxes(places[0], 2 * width)
        positions = Layers((width, width), dtype, name='positions')(features)
        return super().__call__(x.astype(dtype), maps, places, positions, train, groups)


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
