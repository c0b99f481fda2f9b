"""Rotary positions of tokens in two dimensions.

Su et al., 2021, arXiv:2104.09864, section 3.2: pairs of channels of queries and keys are rotated by
angles that grow with the position, so that a score depends on the difference of two positions. Half
of the pairs turn with the row, half with the column, at K / 4 frequencies theta^(-4i / K) each.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from vit_jax.array_types import Float, Key
from vit_jax.errors import UserError, check_choice

ORDERS = ('yx', 'xy')
NORMALIZED = ('separate', 'max', 'min')
PERIODS = ('float32', 'bfloat16', 'float16')
KeySource = Callable[[], Key[Array, '']]


@flax.struct.dataclass
class Rotary:
    """Rotations of the heads of every token.

    Attributes:
      cos, sin: Cosines and sines of the angles, [N K/2], or [B N K/2] if rows differ.
      neighbors: Whether channels 2i and 2i + 1 are a pair, instead of i and i + K/2.
    """

    cos: Float[Array, '*B N k']
    sin: Float[Array, '*B N k']
    neighbors: bool = flax.struct.field(pytree_node=False, default=False)

    def rotate(self, x: Float[Array, '*B _ _ K'], heads: int = -3) -> Float[Array, '*B _ _ K']:
        """Rotate queries or keys, in float32; `heads` is the axis of the heads, -3 or -2."""
        cos, sin = (jnp.expand_dims(table, heads) for table in (self.cos, self.sin))
        y = x.astype(jnp.float32)
        if self.neighbors:
            a, b = y[..., 0::2], y[..., 1::2]
            rotated = jnp.stack([a * cos - b * sin, b * cos + a * sin], axis=-1).reshape(x.shape)
        else:
            a, b = jnp.split(y, 2, axis=-1)
            rotated = jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1)
        return rotated.astype(x.dtype)


class Layout(NamedTuple):
    """Layout of a row: tokens without a place, registers, and the patches line by line.

    Attributes:
      grid: Rows and columns of patches.
      first: Number of tokens before the registers.
      registers: Number of registers.
    """

    grid: tuple[int, int]
    first: int = 0
    registers: int = 0


@dataclasses.dataclass(frozen=True)
class Rope:
    """Positions counted in patches: EVA-02, Fang et al., 2023, arXiv:2303.11331, section 2.1.

    Attributes:
      theta: Range of the frequencies, which fall from 1 to nearly 1 / theta.
      reference: Side of the grid of the pre-training, to which larger and smaller grids are scaled;
        0 to count patches of any grid.
      offset: Number added to each row and column before they are scaled (1 in PE).
      order: 'yx', or 'xy' if the first half of the pairs turns with the column (PE).
      registers: Theta of the registers, which then form a separate square grid (ViT-5); 0 leaves
        them unrotated.
    """

    theta: float = 10_000.0
    reference: int = 0
    offset: float = 0.0
    order: str = 'yx'
    registers: float = 0.0

    def __call__(self, layout: Layout, size: int, next_key: KeySource | None = None) -> Rotary:
        """Compute the rotations of all tokens.

        Args:
          layout: Arrangement of the tokens.
          size: K, width of a head.
          next_key: Has no effect.

        Raises:
          UserError: if a head's width is not a multiple of 4, the order does not exist, or the
            registers do not form a square.
        """
        del next_key
        check_choice('order', self.order, ORDERS)
        parts = [np.zeros((layout.first, size // 2)), np.zeros((layout.registers, size // 2))]
        if self.registers and layout.registers:
            side = math.isqrt(layout.registers)
            if side**2 != layout.registers:
                raise UserError(
                    f'positions of registers need a square number of them, not {layout.registers}'
                )
            axes = [np.arange(side, dtype=float)] * 2
            parts[1] = _angles(_places(*axes), size, self.registers, self.order)
        parts.append(_angles(self._places(layout.grid), size, self.theta, self.order))
        return _rotary(np.concatenate(parts), neighbors=True)

    def _places(self, grid: tuple[int, int]) -> np.ndarray:
        scales = [self.reference / side if self.reference else 1.0 for side in grid]
        axes = zip(grid, scales, strict=True)
        return _places(*((np.arange(side) + self.offset) * scale for side, scale in axes))


@dataclasses.dataclass(frozen=True)
class RopeDinov3:
    """Positions from -1 to 1 on any grid, changed at random in training: DINOv3, arXiv:2508.10104.

    The changes are drawn once for a batch, so that all blocks and images of a call share them.

    Attributes:
      theta: Range of the periods, which rise from 1 to nearly theta.
      normalize: Side that is 2 long: 'separate' for both, 'max' or 'min' for the longer or the
        shorter one.
      shift: Largest shift of each axis.
      jitter: Largest factor of each axis, log-uniform.
      rescale: Largest factor of both axes together, log-uniform.
      periods: Dtype to which the periods are rounded; 'bfloat16' in the authors' files.
    """

    theta: float = 100.0
    normalize: str = 'separate'
    shift: float = 0.0
    jitter: float = 1.0
    rescale: float = 1.0
    periods: str = 'float32'

    def __call__(self, layout: Layout, size: int, next_key: KeySource | None = None) -> Rotary:
        """Compute the rotations of all tokens.

        Args:
          layout: Arrangement of the tokens; tokens before the patches are not rotated.
          size: K, width of a head.
          next_key: Source of the key of the changes; None for no changes, as in evaluation.

        Raises:
          UserError: for a head's width that is not a multiple of 4, or an invalid field.
        """
        check_choice('normalize', self.normalize, NORMALIZED)
        check_choice('periods', self.periods, PERIODS)
        if self.shift < 0 or min(self.jitter, self.rescale) < 1:
            raise UserError('positions: shift must be at least 0, jitter and rescale at least 1')
        sides = {'separate': layout.grid, 'max': 2 * (max(layout.grid),)}
        sides['min'] = 2 * (min(layout.grid),)
        axes = [
            2 * (np.arange(n) + 0.5) / side - 1
            for n, side in zip(layout.grid, sides[self.normalize], strict=True)
        ]
        places: Any = _places(*axes)
        if next_key is not None and (self.shift or self.jitter > 1 or self.rescale > 1):
            places = jnp.asarray(places, jnp.float32)
            places = _change_at_random(places, next_key(), self.shift, self.jitter, self.rescale)
        angles = _angles(2 * math.pi * places, size, self.theta, 'yx', self.periods)
        xp = jnp if isinstance(angles, jax.Array) else np
        prefix = layout.first + layout.registers
        return _rotary(xp.pad(angles, ((prefix, 0), (0, 0))), neighbors=False)


def rope(layout: Layout, size: int, next_key: KeySource | None = None, **options: Any) -> Rotary:
    """Compute rotations by `Rope`, with its fields as keywords."""
    return Rope(**options)(layout, size, next_key)


def rope_dinov3(
    layout: Layout, size: int, next_key: KeySource | None = None, **options: Any
) -> Rotary:
    """Compute rotations by `RopeDinov3`, with its fields as keywords."""
    return RopeDinov3(**options)(layout, size, next_key)


def rising_periods(size: int, theta: float, dtype: str = 'float32') -> Float[np.ndarray, 'k']:
    """Compute the K / 4 periods of heads of width K, from 1 to nearly theta, rounded to `dtype`."""
    periods: np.ndarray = theta ** (np.arange(size // 4) * 4 / size)
    return periods if dtype == 'float32' else periods.astype(jnp.dtype(dtype)).astype(np.float64)


def _change_at_random(
    positions: Array, key: Array, shift: float, jitter: float, rescale: float
) -> Array:
    """Shift the places, stretch them along each axis, and scale them, in this order."""
    keys = jax.random.split(key, 3)
    positions = positions + jax.random.uniform(keys[0], (2,), minval=-shift, maxval=shift)
    for key, largest, shape in ((keys[1], jitter, (2,)), (keys[2], rescale, (1,))):
        limit = math.log(largest)
        positions = positions * jnp.exp(jax.random.uniform(key, shape, minval=-limit, maxval=limit))
    return positions


def _places(rows: np.ndarray, columns: np.ndarray) -> np.ndarray:
    """List the row and the column [N 2] of each cell, line by line."""
    return np.stack(np.meshgrid(rows, columns, indexing='ij'), axis=-1).reshape(-1, 2)


def _angles(positions: Any, size: int, theta: float, order: str, periods: str = 'float32') -> Any:
    """Compute angles [N K/2] of places [N 2]."""
    if size % 4:
        raise UserError(f'rotary positions need heads that are a multiple of 4 wide, not {size}')
    frequencies = 1 / rising_periods(size, theta, periods)
    positions = positions if order == 'yx' else positions[:, ::-1]
    return (positions[:, :, None] * frequencies).reshape(len(positions), -1)


def _rotary(angles: Any, neighbors: bool) -> Rotary:
    if isinstance(angles, np.ndarray):  # rounded once, after the sines
        cos, sin = (jnp.asarray(f(angles), jnp.float32) for f in (np.cos, np.sin))
        return Rotary(cos, sin, neighbors)
    return Rotary(jnp.cos(angles), jnp.sin(angles), neighbors)
