"""Axial attention: the places of a grid attend along their row, or along their column.

Ho et al., 2019, arXiv:1912.12180. Two layers, one along either axis, connect all places of an
H x W grid at the cost of (H + W) instead of H W keys a query. Layers can be conditioned on a
context of every place (Kumar et al., 2021, arXiv:2102.04432, table 1), which scales and shifts
queries, keys and values, the output of the MLP, and layer norms.

Grids are [B H W D]; inside of a layer its axis comes last, [B L N D]: L lines of N tokens.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from vit_jax.array_types import Float, Int
from vit_jax.errors import UserError
from vit_jax.nn.attention import WindowSpec, attend, attention_weights, causal_mask
from vit_jax.nn.attention_choice import choose_for
from vit_jax.nn.blocks import XAVIER
from vit_jax.nn.encoder_decoder import FeedForward
from vit_jax.nn.kernels.interface import Inputs
from vit_jax.nn.maps import AttentionMap, keep
from vit_jax.nn.multi_head import Heads, KeyValue, MergeHeads
from vit_jax.nn.norms import LayerNorm


class ScaleShift(nn.Module):
    """x * scale(c) + shift(c), both linear in a context c.

    It starts near the identity: initial scales are around one, not around zero as in the authors'
    code.
    """

    dtype: Any = jnp.float32

    @nn.compact
    def __call__(self, x: Float[Array, '*B D'], context: Float[Array, '*#B C']) -> Array:
        options: dict[str, Any] = {'dtype': self.dtype, 'kernel_init': XAVIER}
        dense = nn.Dense(2 * x.shape[-1], bias_init=_ones_then_zeros, name='dense', **options)
        scale, shift = jnp.split(dense(context), 2, axis=-1)
        return x * scale + shift


def _ones_then_zeros(key: Array, shape: tuple[int], dtype: Any) -> Float[Array, 'D']:
    del key
    return (jnp.arange(shape[0]) < shape[0] // 2).astype(dtype)


class Summary(nn.Module):
    """Mean of the contexts of all places with learned weights."""

    dtype: Any = jnp.float32

    @nn.compact
    def __call__(self, context: Float[Array, 'B H W C']) -> Float[Array, 'B 1 1 C']:
        shape = (*context.shape[1:3], 1)
        weights = self.param('weights', nn.initializers.ones, shape).astype(self.dtype)
        return (context * weights).mean((1, 2), keepdims=True)


class Norm(nn.Module):
    """Layer norm, with scale and shift from a summary of the context if there is one."""

    eps: float
    dtype: Any = jnp.float32

    @nn.compact
    def __call__(
        self, x: Float[Array, 'B H W D'], summary: Float[Array, 'B 1 1 C'] | None = None
    ) -> Float[Array, 'B H W D']:
        plain = summary is None
        norm = LayerNorm(self.eps, self.dtype, use_bias=plain, use_scale=plain, name='norm')
        if summary is None:
            return norm(x)
        return ScaleShift(self.dtype, name='affine')(norm(x), summary)


class GridPositions(nn.Module):
    """Learned positions: the sum of a row vector and a column vector.

    Parameters `rows` [H 1 D] and `columns` [W D].

    Raises:
      UserError: if the parameters were made for a different grid.
    """

    @nn.compact
    def __call__(self, height: int, width: int, features: int) -> Float[Array, 'H W D']:
        self._require_grid(height, width)
        init = nn.initializers.normal(features**-0.5)
        rows = self.param('rows', init, (height, 1, features))
        return rows + self.param('columns', init, (width, features))

    def _require_grid(self, height: int, width: int) -> None:
        if not self.has_variable('params', 'rows'):
            return
        made_for = tuple(len(self.get_variable('params', name)) for name in ('rows', 'columns'))
        if made_for != (height, width):
            raise UserError(
                f'the model is for images of {made_for[1]} x {made_for[0]} pixels, not of '
                f'{width} x {height}: resize them'
            )


class AxialAttention(nn.Module):
    """Multi-head self-attention along one axis of a grid.

    A learned number of every head and distance, `relative_bias` [H 2N-1], is added to the scores.
    When the collection `intermediates` is mutable it receives the weights [B L H N N], named
    `attention`.

    Attributes:
      num_heads: H; divides the width.
      axis: 'row' for attention within rows, 'column' for attention within columns.
      causal: Whether places attend only to themselves and to earlier ones on their line.
      dtype: Computation dtype; the softmax stays float32.
      attention: Implementation: 'xla'; 'pallas', the TPU kernel of windows, which takes lines for
        windows; or 'auto', the kernel if it can be used.

    Raises:
      UserError: if 'pallas' is requested where the kernel cannot be used.
    """

    num_heads: int
    axis: str
    causal: bool = False
    dtype: Any = jnp.float32
    attention: str = 'xla'

    def setup(self) -> None:
        self.qkv = Heads(self.num_heads, self.dtype)
        self.out = MergeHeads(self.dtype)
        self.scale_shift = {name: ScaleShift(self.dtype) for name in 'qkv'}

    def __call__(
        self, x: Float[Array, 'B H W D'], context: Float[Array, 'B H W C'] | None = None
    ) -> Float[Array, 'B H W D']:
        """Attend from every place to its line.

        Args:
          x: Vectors of the places.
          context: Input of the scales and shifts of queries, keys and values; None for no
            conditioning.
        """
        projected = self._project(x, context)
        shape = projected[0].shape
        bias, mask = self._bias(shape[2]), causal_mask(shape[2]) if self.causal else None
        spec = WindowSpec(shape, self.num_heads, jnp.dtype(self.dtype).name, shifted=False)
        if (chosen := choose_for(self, spec)) is not None:
            if mask is not None:
                bias = jnp.where(mask[0], bias, jnp.finfo(bias.dtype).min)
            inputs = Inputs((jnp.concatenate(projected, axis=-1),), bias=bias)
            return self._lines(self.out(self._heads(chosen.attend(inputs))))
        query, *memory = map(self._heads, projected)
        return self._attend(query, KeyValue(*memory), mask, bias)

    def step(
        self,
        x: Float[Array, 'B h w D'],
        past: KeyValue,
        position: int | Int[Array, ''],
        context: Float[Array, 'B h w C'] | None = None,
    ) -> tuple[Float[Array, 'B h w D'], KeyValue]:
        """Attend from the places at `position` of all lines to themselves and earlier ones.

        Args:
          x: One place of each line: a grid of one row for attention within columns, a single place
            for attention within a row.
          past: Keys and values [B L H N K] of the lines up to here.
          position: Index of the places on their lines.
          context: Context of these places.

        Returns:
          The causal result of `__call__` for these places, and `past` with them.
        """
        query, *new = map(self._heads, self._project(x, context))
        memory = past.write(KeyValue(*new), position)
        tokens = past.key.shape[-2]
        bias = jax.lax.dynamic_slice_in_dim(self._bias(tokens), position, 1, axis=1)
        mask = (jnp.arange(tokens) <= position)[None, None]
        return self._attend(query, memory, mask, bias), memory

    def _lines(self, x: Array) -> Array:
        """Convert [B H W D] to [B L N D], and back."""
        return x if self.axis == 'row' else x.swapaxes(1, 2)

    def _project(self, x: Array, context: Array | None) -> list[Array]:
        """Project to queries, keys and values, [B L N D]."""
        x = self._lines(x)
        (qkv,) = (y for y in self.qkv(x, x, x, side_by_side=True) if y is not None)
        parts = jnp.split(qkv, 3, axis=-1)
        if context is None:
            return parts
        context = self._lines(context)
        pairs = zip('qkv', parts, strict=True)
        return [self.scale_shift[name](part, context) for name, part in pairs]

    def _heads(self, x: Array) -> Array:
        """Split [B L N D] into heads, [B L H N K]."""
        return x.reshape(*x.shape[:-1], self.num_heads, -1).swapaxes(-3, -2)

    @nn.compact
    def _bias(self, tokens: int) -> Float[Array, 'H N N']:
        """Make the bias of each head by the distance of query and key."""
        shape = (self.num_heads, 2 * tokens - 1)
        table = self.param('relative_bias', nn.initializers.zeros, shape)
        positions = jnp.arange(tokens)
        return table[:, positions[:, None] - positions + tokens - 1]

    def _attend(self, query: Array, memory: KeyValue, mask: Array | None, bias: Array) -> Array:
        weights = attention_weights(query, memory.key, mask, bias)
        keep(self, weights)
        return self._lines(self.out(attend(weights, memory.value)))


class Context(NamedTuple):
    """Conditioning of a layer.

    Attributes:
      places: Context of each place, for attention and MLP.
      summaries: Summary of the whole grid for each of the two norms; see `AxialLayer.summaries`.
    """

    places: Float[Array, 'B H W C'] | None = None
    summaries: tuple[Float[Array, 'B 1 1 E'] | None, ...] = (None, None)


NOTHING = Context()


class AxialLayer(nn.Module):
    """Attention along one axis and a feed-forward layer, each in a post-norm residual connection.

        y = LN(x + Attention(x))
        z = LN(y + MLP(y))

    Attributes:
      num_heads, axis, causal, dtype: Fields of the attention, see `AxialAttention`.
      attention_by: Its field `attention`.
      mlp_dim: Hidden width of the feed-forward layer.
      norm_eps: Value added to the variance in layer norms.
    """

    num_heads: int
    mlp_dim: int
    axis: str
    causal: bool = False
    norm_eps: float = 1e-3
    dtype: Any = jnp.float32
    attention_by: str = 'xla'

    def setup(self) -> None:
        self.attention = AxialAttention(
            self.num_heads, self.axis, self.causal, self.dtype, self.attention_by
        )
        self.mlp = FeedForward(self.mlp_dim, dtype=self.dtype)
        self.mlp_affine = ScaleShift(self.dtype)
        self.norms = [Norm(self.norm_eps, self.dtype) for _ in range(2)]
        self.sums = [Summary(self.dtype) for _ in range(2)]

    def __call__(
        self, x: Float[Array, 'B H W D'], context: Context = NOTHING
    ) -> Float[Array, 'B H W D']:
        """Apply the layer to a whole grid."""
        return self._finish(x, self.attention(x, context.places), context)

    def step(
        self,
        x: Float[Array, 'B h w D'],
        past: KeyValue,
        position: int | Int[Array, ''],
        context: Context = NOTHING,
    ) -> tuple[Float[Array, 'B h w D'], KeyValue]:
        """Apply the layer to one position of all lines; see `AxialAttention.step`."""
        branch, past = self.attention.step(x, past, position, context.places)
        return self._finish(x, branch, context), past

    def empty(self, batch: int, lines: int, tokens: int, width: int) -> KeyValue:
        """Make empty arrays for the keys and values of `step`."""
        shape = (batch, lines, self.num_heads, tokens, width // self.num_heads)
        return KeyValue(*(jnp.zeros(shape, self.dtype) for _ in range(2)))

    def summaries(self, context: Float[Array, 'B H W E']) -> tuple[Float[Array, 'B 1 1 E'], ...]:
        """Summarize the context of a whole grid, to condition the norms."""
        return tuple(summary(context) for summary in self.sums)

    def _finish(self, x: Array, branch: Array, context: Context) -> Array:
        """Add the output of the attention, and apply the rest of the layer."""
        x = self.norms[0](x + branch, context.summaries[0])
        y = self.mlp(x)
        y = y if context.places is None else self.mlp_affine(y, context.places)
        return self.norms[1](x + y, context.summaries[1])


class AxialEncoder(nn.Module):
    """Positions, and `depth` pairs of layers along rows and then along columns.

    Attributes:
      depth: Number of pairs.
      layer: Factory of layers, called with `axis`.
    """

    depth: int
    layer: Callable[..., AxialLayer]

    def setup(self) -> None:
        self.positions = GridPositions()
        self.rows = [self.layer(axis='row') for _ in range(self.depth)]
        self.columns = [self.layer(axis='column') for _ in range(self.depth)]

    def __call__(self, x: Float[Array, 'B H W D']) -> Float[Array, 'B H W D']:
        x = x + self.positions(*x.shape[1:]).astype(x.dtype)
        for row, column in zip(self.rows, self.columns, strict=True):
            x = column(row(x))
        return x


class AxialMap:
    """Weights [B H Q K] of all places of a grid, laid out only when numpy asks for them.

    They are zero outside of a line, and would take too much memory for all layers of a large grid.
    """

    def __init__(self, weights: Float[Array, 'B L H N N'], axis: str) -> None:
        self._weights, self._axis = weights, axis

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        weights = np.asarray(self._weights, dtype)
        batch, lines, heads, tokens, _ = weights.shape
        grid = (lines, tokens) if self._axis == 'row' else (tokens, lines)
        dense = np.zeros((batch, heads, *grid, *grid), weights.dtype)
        for line in range(lines):
            index = (line, slice(None)) if self._axis == 'row' else (slice(None), line)
            dense[(slice(None), slice(None), *index, *index)] = weights[:, line]
        return dense.reshape(batch, heads, lines * tokens, lines * tokens)


def axial_maps(
    intermediates: Mapping[str, Any], stacks: Sequence[str], grid: tuple[int, int], stride: int = 1
) -> list[AttentionMap]:
    """Collect the maps of the layers of stacks, named `encoder/row_0`, `encoder/column_0`, ...

    Args:
      intermediates: Collection that `model.apply(..., mutable='intermediates')` returns.
      stacks: Names of modules with the layers `rows_0`, `columns_0`, `rows_1`, ...
      grid: Rows and columns of places.
      stride: Number of grids of an example, of which the first is taken.

    Raises:
      ValueError: if nothing was kept.
    """
    maps = []
    for stack in stacks:
        for name, layer in sorted(intermediates.get(stack, {}).items(), key=_order):
            axis, number = _axis_and_number(name)
            weights = AxialMap(layer['attention']['attention'][0][::stride], axis)
            maps.append(AttentionMap(f'{stack}/{axis}_{number}', weights, grid, grid))
    if not maps:
        raise ValueError(f'no attention in {stacks}: apply the model with mutable intermediates')
    return maps


def _order(item: tuple[str, Any]) -> tuple[int, bool]:
    """Make a sorting key: by number, rows before columns."""
    axis, number = _axis_and_number(item[0])
    return number, axis == 'column'


def _axis_and_number(name: str) -> tuple[str, int]:
    """Parse `rows_1` to ('row', 1)."""
    axis, _, number = name.rpartition('_')
    return axis.removesuffix('s'), int(number)
