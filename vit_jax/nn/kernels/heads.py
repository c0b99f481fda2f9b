"""Attention of one head inside of a TPU kernel, whose heads stay side by side along the lanes.

The matmuls of a head run over whole registers of 128 lanes, with the lanes of neighboring heads
set to zero: matrix units are that wide anyway, and nothing has to be moved to the first lane.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array
from jax.experimental import pallas as pl

from vit_jax.array_types import Float
from vit_jax.nn.attention import Segments

LANES, SUBLANES = 128, 16
# Float32 matrices [N M] that the backward pass of a head needs, some of which are spilled.
SCORES = 6
# The score of masked keys, as in `attention.masked_softmax`.
LOWEST = float(jnp.finfo(jnp.float32).min)

Projected = tuple[Float[Array, 'B _ _'], ...]
# The masks of a program, None for none: a row [1 M] that is zero for keys that are masked, and rows
# [1 N] and [1 M] with the segments of queries and keys.
Masks = tuple[Any, Segments | None]


class Options(NamedTuple):
    """Static options of a program; see `kernels.attention.fused_attention`."""

    num_heads: int
    causal: bool
    rate: float
    interpret: bool
    block: int


class Head(NamedTuple):
    """Columns of a head within its group, and of the whole registers around them."""

    first: int
    last: int
    low: int
    high: int

    @property
    def size(self) -> int:
        return self.last - self.first

    def own(self) -> Array:
        """Mask [1 R], true for the head's own columns of its registers."""
        column = self.low + jax.lax.broadcasted_iota(jnp.int32, (1, self.high - self.low), 1)
        return (column >= self.first) & (column < self.last)

    def columns(self, offset: Any = 0) -> Any:
        """Return the registers in an array whose group begins at column `offset`."""
        return pl.ds(offset + self.low, self.high - self.low)


def heads_in_group(group: int, size: int) -> Iterator[Head]:
    """Yield the heads of a group of so many columns."""
    for first in range(0, group, size):
        high = min(round_up(first + size, LANES), group)
        yield Head(first, first + size, first // LANES * LANES, high)


def group_width(width: int, num_heads: int, most: int = 0) -> int:
    """Return a group's columns: as many heads as fill whole registers, up to `most` heads.

    Return `width` if it cannot be split into such groups.
    """
    size = width // num_heads
    min_width = math.lcm(size, LANES)
    if width % min_width:
        return width
    groups = (n for n in range(min_width, most * size + 1, min_width) if width % n == 0)
    return max(groups, default=min_width)


def total_width(projected: tuple[Any, ...]) -> int:
    """Return D of arrays with queries, keys and values."""
    return sum(x.shape[-1] for x in projected) // 3


def first_columns(projected: tuple[Any, ...]) -> list[tuple[Any, int]]:
    """Return the array that holds queries, keys and values, and the first column of each."""
    width = total_width(projected)
    return [(x, first) for x in projected for first in range(0, x.shape[-1], width)]


class Visible:
    """Keys that the queries of a program may attend to.

    Args:
      masks: Masks of keys and segments.
      causal: Whether only those up to their own position.
      keys: Axis of the keys in matrices of scores.
      first: Position of the first query.
    """

    def __init__(self, masks: Masks, causal: bool, keys: int, first: Any = 0):
        mask, segments = masks
        self._causal, self._keys, self._first = causal, keys, first
        self._masks = [] if mask is None else [along(keys, mask[...]) > 0]
        if segments is not None:
            query, key = along(1 - keys, segments.query[...]), along(keys, segments.key[...])
            self._masks.append(query == key)

    def scores(self, x: Array) -> Array:
        """Scores, with the lowest of all for keys that are hidden."""
        return self._where(x, LOWEST)

    def gradients(self, x: Array) -> Array:
        """Gradients of the scores.

        If all keys of a query are masked, weights are not zero, but no score has a gradient.
        """
        return self._where(x, 0.0) if self._masks else x

    def _where(self, x: Array, other: float) -> Array:
        for mask in self._masks:
            x = jnp.where(mask, x, other)
        if self._causal:
            key, query = (
                jax.lax.broadcasted_iota(jnp.int32, x.shape, axis)
                for axis in (self._keys, 1 - self._keys)
            )
            x = jnp.where(key <= query + self._first, x, other)
        return x


def along(axis: int, row: Array) -> Array:
    """Return a row [1 M] along the lanes, axis 1, or along axis 0 as [M 1]."""
    return row if axis else jnp.broadcast_to(row, (SUBLANES, row.shape[1])).T[:, :1]


Scores = Callable[[Array], Array]


def attend(
    q: Array, k: Array, v: Array, size: int, scored: Scores, factors: Any = None
) -> Float[Array, 'N R']:
    """Return the result of a head, in float32.

    Args:
      q: Queries, zero outside of the head's columns.
      k, v: Keys and values.
      size: K, columns of the head.
      scored: Masks scores [N M], or adds a bias.
      factors: Dropout factors [N M]; None without dropout.
    """
    scores = scored(dot(q, k, (1, 1)) * (1 / math.sqrt(size)))
    exps = jnp.exp(scores - scores.max(axis=1, keepdims=True))
    total = exps.sum(axis=1, keepdims=True)
    if factors is not None:
        exps = exps * factors
    return dot(exps.astype(v.dtype), v, (1, 0)) / total


def gradients(
    q: Array,
    k: Array,
    v: Array,
    grad: Array,
    size: int,
    scored: Scores,
    through: Scores,
    factors: Any = None,
) -> tuple[Float[Array, 'N R'], Float[Array, 'M R'], Float[Array, 'M R']]:
    """Gradients of queries, keys and values of a head, in float32.

    Args:
      q, grad: Queries and the gradient of the result, zero outside of the head's columns.
      k, v: Keys and values.
      size: K, columns of the head.
      scored: See `attend`; its scores are [M N].
      through: Backward pass of `scored`: from the gradient of its result to its argument's.
      factors: Dropout factors [N M]; None without dropout.
    """
    scale = 1 / math.sqrt(size)
    # [keys queries], so that two of the last three matmuls need no transposed matrix.
    scores = scored(dot(k, q, (1, 1)) * scale)
    exps = jnp.exp(scores - scores.max(axis=0, keepdims=True))
    weights = exps * (1 / exps.sum(axis=0, keepdims=True))
    of_weights = dot(v, grad, (1, 1))
    left = weights
    if factors is not None:
        factors = factors.T
        left, of_weights = weights * factors, of_weights * factors
    mean = (weights * of_weights).sum(axis=0, keepdims=True)
    of_scores = (through(weights * (of_weights - mean)) * scale).astype(k.dtype)
    of_values = dot(left.astype(v.dtype), grad, (1, 0))
    return dot(of_scores, k, (0, 0)), dot(of_scores, q, (1, 0)), of_values


def write(ref: Any, head: Head, in_head: Array, value: Array, offset: Any = 0) -> None:
    """Write a head's columns of a group, keeping those that earlier heads have written.

    Args:
      ref: [N _] of a program.
      head: Number in a group that begins at column `offset`.
      in_head: Mask of its columns, see `Head.own`.
      value: [N R], its registers.
      offset: See `head`.
    """
    value, columns = value.astype(ref.dtype), head.columns(offset)
    if head.first > head.low:
        value = jnp.where(in_head, value, ref[:, columns])
    ref[:, columns] = value


def dropout_factors(keep_mask: Array, rate: float) -> Float[Array, 'N M']:
    """Factors of dropout for the weights of a head."""
    return keep_mask.astype(jnp.float32) * (1 / (1 - rate))


def dot(a: Array, b: Array, contracted: tuple[int, int]) -> Array:
    """Return a matmul over one axis of each, in float32."""
    dims = (((contracted[0],), (contracted[1],)), ((), ()))
    return jax.lax.dot_general(a, b, dims, preferred_element_type=jnp.float32)


def score_bytes(queries: int, keys: int) -> int:
    """Bytes of a matrix of scores, with queries or keys along the lanes."""
    return 4 * max(
        round_up(rows, SUBLANES) * round_up(columns, LANES)
        for rows, columns in ((queries, keys), (keys, queries))
    )


def round_up(n: int, multiple: int) -> int:
    """Return the next multiple."""
    return -(-n // multiple) * multiple
