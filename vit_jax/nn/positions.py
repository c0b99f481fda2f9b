"""Position embeddings for a sequence of tokens and for a grid of patches."""

from __future__ import annotations

from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from vit_jax.array_types import Bool, Float, Float32, Int
from vit_jax.errors import UserError, check_choice
from vit_jax.nn.rotary import Layout

LAYOUTS = ('interleaved', 'concatenated')


def sincos1d(
    tokens: int, dim: int, layout: str = 'interleaved', temperature: float = 10_000.0
) -> Float32[np.ndarray, 'N D']:
    """Compute the sine-cosine embedding of Vaswani et al., 2017, arXiv:1706.03762, section 3.5.

    The angles of position p are p / temperature^(2i / dim). In the layout 'interleaved', as in the
    paper, feature 2i is the sine and 2i + 1 the cosine; 'concatenated' has the sines in the first
    half and the cosines in the second.

    Raises:
      UserError: if `dim` is odd, or there is no such layout.
    """
    check_choice('positions', layout, LAYOUTS)
    if dim % 2:
        raise UserError(f'sine-cosine positions need an even width, not {dim}')
    angles = np.outer(np.arange(tokens), temperature ** -(np.arange(0, dim, 2) / dim))
    pairs = np.stack([np.sin(angles), np.cos(angles)], axis=-1)
    if layout == 'concatenated':
        pairs = pairs.swapaxes(1, 2)
    return pairs.reshape(tokens, dim).astype(np.float32)


def sincos2d(
    height: int, width: int, dim: int, temperature: float = 10_000.0, *, endpoint: bool = True
) -> Float32[np.ndarray, 'N D']:
    """Compute the two-dimensional sine-cosine embedding of MoCo v3, arXiv:2104.02057.

    The four quarters of the features are sin x, cos x, sin y, cos y at `dim / 4` frequencies, a
    geometric series from 1 to 1 / temperature. Without `endpoint` the last is left out, so that
    the frequencies are temperature^(-4i / dim), as in MAE. Rows run over the grid line by line.

    Raises:
      UserError: unless `dim` is a multiple of 4 and at least 8.
    """
    if dim % 4 or dim < 8:
        raise UserError(
            f'posemb sincos2d needs a width that is a multiple of 4 from 8 up, not {dim}'
        )
    frequency = temperature ** -np.linspace(0.0, 1.0, dim // 4, endpoint=endpoint)
    y, x = np.mgrid[:height, :width]
    angles = [np.outer(axis.ravel(), frequency) for axis in (x, y)]
    table = np.concatenate([f(a) for a in angles for f in (np.sin, np.cos)], axis=1)
    return table.astype(np.float32)


def masked_sine2d(
    mask: Bool[Array, 'B H W'], dim: int, temperature: float = 10_000.0
) -> Float[Array, 'B H W D']:
    """Compute the sine-cosine embedding of padded images: DETR, arXiv:2005.12872, A.4.

    Rows and columns of the real cells are counted from 1 and scaled so that the last one is at
    2 pi. Half of the features are of y, half of x, sines and cosines interleaved.

    Args:
      mask: True for real cells, false for padding, which is at the right and the bottom.
      dim: D, a multiple of 4.
      temperature: Frequencies fall from 1 to nearly 1 / temperature.

    Raises:
      UserError: if `dim` is not a multiple of 4.
    """
    if dim % 4:
        raise UserError(
            f'two-dimensional sine positions need a multiple of 4, not a width of {dim}'
        )
    frequency = temperature ** -(np.arange(0, dim // 2, 2) / (dim // 2))
    halves = []
    for axis in (1, 2):
        count = mask.cumsum(axis, dtype=jnp.float32)
        last = jax.lax.slice_in_dim(count, -1, None, axis=axis)
        angles = (2 * np.pi * count / (last + 1e-6))[..., None] * frequency.astype(np.float32)
        pairs = jnp.stack([jnp.sin(angles), jnp.cos(angles)], axis=-1)
        halves.append(pairs.reshape(*mask.shape, dim // 2))
    return jnp.concatenate(halves, axis=-1)


def learned(
    module: nn.Module, tokens: int, dim: int, std: float = 0.02, name: str = 'pos_embed'
) -> Float[Array, '1 N D']:
    """Make the parameter `name` of `module`: a row for every token, E_pos of arXiv:2010.11929.

    It is initialized from a normal distribution with standard deviation `std`.

    Raises:
      UserError: if the parameter was made for a different number of tokens.
    """
    _require_rows(module, tokens, name)
    return module.param(name, nn.initializers.normal(std), (1, tokens, dim))


def resized(
    table: Float[Array, 'h w D'], grid: Int[Array, 'B 2'], tokens: int
) -> Float[Array, 'B N D']:
    """Stretch one table of positions over the grid of each image.

    Linear between the centers of cells, and antialiased where the grid is coarser than the table,
    like `ops.resize.bilinear_half_pixel`; but grids may be traced values.

    Args:
      table: Vectors of a grid.
      grid: Rows and columns of patches of each image; 0 counts as 1.
      tokens: N; tokens beyond rows * columns get undefined positions.
    """
    rows, columns = jnp.maximum(grid[:, :1], 1), jnp.maximum(grid[:, 1:], 1)
    position = jnp.arange(tokens)
    weights = jnp.einsum(
        'bni,bnj->bnij',
        _hat(jnp.minimum(position // columns, rows - 1), rows, table.shape[0]),
        _hat(position % columns, columns, table.shape[1]),
    )
    # One matmul of a [N, h w] matrix costs less than the [N, h, D] between two would hold.
    return jnp.einsum('bnij,ijd->bnd', weights, table, preferred_element_type=jnp.float32)


def _hat(position: Int[Array, 'B N'], new: Int[Array, 'B 1'], old: int) -> Float[Array, 'B N i']:
    """Compute the weight of each of `old` cells in the cells `position` of `new`."""
    scale = old / new.astype(jnp.float32)
    centers = (position + 0.5) * scale - 0.5
    distance = jnp.abs(centers[..., None] - jnp.arange(old))
    weights = jnp.maximum(1 - distance / jnp.maximum(scale, 1)[..., None], 0)
    return weights / weights.sum(axis=-1, keepdims=True)


def fixed(module: nn.Module, table: Float[np.ndarray, 'N D']) -> Float[Array, '1 N D']:
    """Make the parameter `pos_embed` of `module`, fixed to `table`, without a gradient.

    It is a parameter so that models that learn their positions can start from this one.

    Raises:
      UserError: if the parameter was made for a different number of tokens.
    """
    _require_rows(module, len(table))
    value = module.param('pos_embed', lambda _: jnp.asarray(table)[None])
    return jax.lax.stop_gradient(value)


def _require_rows(module: nn.Module, tokens: int, name: str = 'pos_embed') -> None:
    if not module.has_variable('params', name):
        return
    made_for: int = module.get_variable('params', name).shape[1]
    if made_for != tokens:
        raise UserError(
            f'{name} has rows for {made_for} tokens, but these images have {tokens}: '
            f'use the image size of the checkpoint, or resize {name}'
        )


class RelativeBias(nn.Module):
    """A bias for each head, row distance and column distance: BEiT, arXiv:2106.08254, section 2.5.

    Parameter `table` [2h-1 2w-1 H], from a key to its query. Tokens before the patches share
    biases: `prefix` [3 H] for their scores with patches, of patches with them, and with each other.
    All start at zero.

    Attributes:
      num_heads: H.
      grid: H rows and w columns of patches.
      prefix: Number of tokens before the patches.
    """

    num_heads: int
    grid: tuple[int, int]
    prefix: int = 0

    @nn.compact
    def __call__(self) -> Float[Array, '1 H N N']:
        """Compute the biases of all scores.

        Raises:
          UserError: if the table was made for a different grid.
        """
        sides = tuple(2 * side - 1 for side in self.grid)
        if self.has_variable('params', 'table'):
            self._require(self.get_variable('params', 'table').shape[:2], sides)
        zeros = nn.initializers.zeros
        table = self.param('table', zeros, (*sides, self.num_heads)).reshape(-1, self.num_heads)
        if self.prefix:
            rows = self.param('prefix', zeros, (3, self.num_heads))
            table = jnp.concatenate([table, rows])
        return table[self._rows()].transpose(2, 0, 1)[None]

    def _rows(self) -> Int[np.ndarray, 'N N']:
        """Index the joined tables by query and key."""
        of_patches = relative_positions(*self.grid)
        count = int(of_patches.max()) + 1
        rows = np.pad(of_patches, ((self.prefix, 0), (self.prefix, 0)))
        rows[: self.prefix] = count
        rows[:, : self.prefix] = count + 1
        rows[: self.prefix, : self.prefix] = count + 2
        return rows

    def _require(self, stored: tuple[int, ...], sides: tuple[int, ...]) -> None:
        if stored != sides:
            old = ' x '.join(str((side + 1) // 2) for side in reversed(stored))
            raise UserError(
                f'the relative positions are for {old} patches, but these images have '
                f'{self.grid[1]} x {self.grid[0]}: use the image size of the checkpoint, or resize '
                'the parameters'
            )


class Relative(NamedTuple):
    """Relative positions as learned biases.

    Attributes:
      layout: Layout of the tokens.
      shared: Whether all blocks have the same biases.
    """

    layout: Layout
    shared: bool

    def bias(self, num_heads: int, **kwargs: Any) -> RelativeBias:
        """Make the layer of the biases."""
        prefix = self.layout.first + self.layout.registers
        return RelativeBias(num_heads, self.layout.grid, prefix, **kwargs)


def relative_positions(rows: int, columns: int) -> Int[np.ndarray, 'N N']:
    """Index a flat table [(2h-1) (2w-1)] of relative positions by query and key.

    A key d rows above and e columns to the left of its query has index (d+h-1) (2w-1) + e+w-1.
    """
    row, column = (axis.ravel() for axis in np.mgrid[:rows, :columns])
    down = row[:, None] - row + rows - 1
    right = column[:, None] - column + columns - 1
    return down * (2 * columns - 1) + right
