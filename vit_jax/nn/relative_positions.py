"""Biases of attention scores that are learned for each relative position of two patches."""

from __future__ import annotations

from typing import Any, NamedTuple

import flax.linen as nn
import jax.numpy as jnp
import numpy as np
from jax import Array

from vit_jax.array_types import Float, Int
from vit_jax.errors import UserError
from vit_jax.nn.rotary import Draw, Layout


class RelativeBias(nn.Module):
    """A bias for each head, row distance and column distance: BEiT, arXiv:2106.08254, section 2.5.

    Parameter `table` [2h-1 2w-1 H], from a key to its query. Tokens before the patches are taken
    alike: `prefix` [3 H] has the biases of their scores with patches, of patches with them, and of
    them with each other. All start at zero.

    Attributes:
      num_heads: H.
      grid: h rows and w columns of patches.
      prefix: number of tokens before the patches.
    """

    num_heads: int
    grid: tuple[int, int]
    prefix: int = 0

    @nn.compact
    def __call__(self) -> Float[Array, '1 H N N']:
        """The biases of all scores.

        Raises:
          UserError: if the table was made for another grid.
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
        """The row of the joined tables for each query and key."""
        own = relative_positions(*self.grid)
        count = int(own.max()) + 1
        rows = np.pad(own, ((self.prefix, 0), (self.prefix, 0)))
        rows[: self.prefix] = count
        rows[:, : self.prefix] = count + 1
        rows[: self.prefix, : self.prefix] = count + 2
        return rows

    def _require(self, found: tuple[int, ...], sides: tuple[int, ...]) -> None:
        if found != sides:
            made = ' x '.join(str((side + 1) // 2) for side in found)
            raise UserError(
                f'the relative positions are for {made} patches, but these images have '
                f'{self.grid[0]} x {self.grid[1]}: use the image size of the checkpoint, or resize '
                'the parameters'
            )


class Relative(NamedTuple):
    """The choice of relative positions.

    Attributes:
      layout: of the tokens.
      shared: whether all blocks have the same biases, instead of each its own.
    """

    layout: Layout
    shared: bool

    def bias(self, num_heads: int, **kwargs: Any) -> RelativeBias:
        """The layer of the biases."""
        prefix = self.layout.first + self.layout.registers
        return RelativeBias(num_heads, self.layout.grid, prefix, **kwargs)


def relative(
    layout: Layout, size: int, draw: Draw | None = None, *, shared: bool = False
) -> Relative:
    """Biases of scores by relative positions, see `RelativeBias`.

    Args:
      layout: of the tokens.
      size, draw: have no effect.
      shared: whether all blocks have the same biases, as in BEiT's pre-training, instead of each
        its own.
    """
    del size, draw
    return Relative(layout, shared)


def relative_positions(rows: int, columns: int) -> Int[np.ndarray, 'N N']:
    """The row, in a flat table [(2h-1) (2w-1)] of relative positions, of each query and key.

    For a key d rows above and e columns to the left of its query it is (d+h-1) (2w-1) + e+w-1.
    """
    row, column = (axis.ravel() for axis in np.mgrid[:rows, :columns])
    down = row[:, None] - row + rows - 1
    right = column[:, None] - column + columns - 1
    return down * (2 * columns - 1) + right
