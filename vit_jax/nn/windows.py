"""Swin's layers: attention inside the windows of a feature map, in blocks and stages.

Liu et al., 2021, arXiv:2103.14030, sections 3.1 and 3.2. Feature maps are [B H W D]. A map that
the windows do not divide is padded with zeros at the bottom and at the right, which are attended to
like any other token, as in transformers; the paper does not specify it. The layers between stages
are in `nn.merging`.
"""

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.ad_checkpoint import checkpoint_name

from vit_jax.array_types import Float, Int
from vit_jax.nn.attention import (
    APART,
    ATTENDED,
    WindowSpec,
    attend,
    attention_weights,
    recompute_in_backward,
)
from vit_jax.nn.attention_choice import Choice, choose_for
from vit_jax.nn.blocks import Mlp
from vit_jax.nn.kernels.interface import Inputs
from vit_jax.nn.maps import keep
from vit_jax.nn.norms import LayerNorm
from vit_jax.nn.positions import relative_positions
from vit_jax.nn.stochastic import Dropout, add_branch

# The initialization of all kernels, as in the authors' code.
INIT = nn.initializers.normal(0.02)
TILE_ROWS = 8  # rows of a tile of a TPU's arrays
UNSEEN = -1e30  # bias of the scores of tokens that nothing attends to


@dataclasses.dataclass(frozen=True)
class Windows:
    """Layout of windows on a feature map of a known size.

    Attributes:
      height, width: Sides of the map in tokens.
      side: M, side of a window in tokens.
      shift: Rows and columns by which the map is rolled up and to the left before it is cut.
    """

    height: int
    width: int
    side: int
    shift: int = 0

    @classmethod
    def over(cls, height: int, width: int, window: int, shifted: bool) -> 'Windows':
        """Lay out windows of `window` x `window` tokens, shifted by half of it.

        If the map is not larger than a window along an axis, the window has the size of the map
        there, and is not shifted.
        """
        side = min(window, height, width)
        shift = window // 2 if shifted and window < min(height, width) else 0
        return cls(height, width, side, shift)

    @property
    def grid(self) -> tuple[int, int]:
        """Rows and columns of windows."""
        return -(-self.height // self.side), -(-self.width // self.side)

    def place(self, x: Float[Array, 'B H W D']) -> Float[Array, 'B h w D']:
        """Pad the map to whole windows, and shift it."""
        rows, columns = (n * self.side for n in self.grid)
        if (rows, columns) != (self.height, self.width):
            below, right = rows - self.height, columns - self.width
            x = jnp.pad(x, ((0, 0), (0, below), (0, right), (0, 0)))
        return jnp.roll(x, (-self.shift, -self.shift), (1, 2)) if self.shift else x

    def restore(self, x: Float[Array, 'B h w *D']) -> Float[Array, 'B H W *D']:
        """Invert `place`."""
        if self.shift:
            x = jnp.roll(x, (self.shift, self.shift), (1, 2))
        return x[:, : self.height, : self.width]

    def cut_tokens(self, x: Float[Array, 'B h w D'], padding: int = 0) -> Float[Array, 'B W N D']:
        """Cut the map after `place` into the tokens of each window.

        Every row of a window ends with `padding` tokens of zeros.
        """
        batch, _, _, width = x.shape
        (rows, columns), side = self.grid, self.side
        x = pad_end(x.reshape(batch, rows, side, columns, side, width), 4, padding).swapaxes(2, 3)
        return x.reshape(batch, rows * columns, side * (side + padding), width)

    def join_tokens(self, x: Float[Array, 'B W N D'], padding: int = 0) -> Float[Array, 'B h w D']:
        """Invert `cut_tokens`."""
        batch, _, _, width = x.shape
        (rows, columns), side = self.grid, self.side
        x = x.reshape(batch, rows, columns, side, side + padding, width)[..., :side, :]
        return x.swapaxes(2, 3).reshape(batch, rows * side, columns * side, width)

    @property
    def tile_padding(self) -> int:
        """Number of tokens to add to each row of a window to fill a tile of a TPU's arrays.

        Then XLA copies a map to windows, and back, once instead of twice: 49 tokens take as many
        rows of memory as 7 x 8. The number is 0 where windows would take more rows.
        """
        added = -self.side % TILE_ROWS
        fits = self.side * (self.side + added) <= self.side**2 + -(self.side**2) % TILE_ROWS
        return added if fits else 0

    def pad_bias(self, bias: Float[Array, 'H N N'], padding: int) -> Float[Array, 'H M M']:
        """Pad a bias to the tokens from `cut_tokens`, which do not attend to padding."""
        side, heads = self.side, len(bias)
        bias = pad_end(bias.reshape(heads, side, side, side, side), 4, padding, UNSEEN)
        return pad_end(bias, 2, padding).reshape(heads, *(side * (side + padding),) * 2)

    def cut(self, x: Float[Array, 'B h w H K']) -> Float[Array, 'B W H N K']:
        """Cut the heads of the map after `place` into the heads of each window."""
        batch, _, _, heads, size = x.shape
        (rows, columns), side = self.grid, self.side
        x = x.reshape(batch, rows, side, columns, side, heads, size)
        return x.transpose(0, 1, 3, 5, 2, 4, 6).reshape(
            batch, rows * columns, heads, side * side, size
        )

    def join(self, x: Float[Array, 'B W H N K']) -> Float[Array, 'B h w H K']:
        """Invert `cut`."""
        batch, _, heads, _, size = x.shape
        (rows, columns), side = self.grid, self.side
        x = x.reshape(batch, rows, columns, heads, side, side, size)
        return x.transpose(0, 1, 4, 2, 5, 3, 6).reshape(
            batch, rows * side, columns * side, heads, size
        )

    def tokens(self) -> Int[np.ndarray, 'W N']:
        """Index the map, row by row, by the tokens of the windows; -1 for padding."""
        rows, columns = (n * self.side for n in self.grid)
        numbers = np.full((rows, columns), -1)
        numbers[: self.height, : self.width] = np.arange(self.height * self.width).reshape(
            self.height, self.width
        )
        return self.cut_plain(np.roll(numbers, (-self.shift, -self.shift), (0, 1)))

    def regions(self, padding: int = 0) -> Int[np.ndarray, 'W N']:
        """Number the parts of each window whose tokens are neighbors in the map.

        Rows of windows are padded as by `cut_tokens`. Shifted maps wrap around. Rows of the map
        then fall into three parts: before the last window, still in order within it, and wrapped
        around from the top; so do columns.
        """

        def parts(count: int) -> np.ndarray:
            i = np.arange(count * self.side)
            return (i >= i.size - self.side).astype(int) + (i >= i.size - self.shift)

        rows, columns = (parts(count) for count in self.grid)
        numbers = self.cut_plain(3 * rows[:, None] + columns).reshape(-1, self.side, self.side)
        return np.pad(numbers, ((0, 0), (0, 0), (0, padding))).reshape(len(numbers), -1)

    def cut_plain(self, x: np.ndarray) -> np.ndarray:
        """Cut [h w] into windows, [W N]."""
        (rows, columns), side = self.grid, self.side
        x = x.reshape(rows, side, columns, side).swapaxes(1, 2)
        return x.reshape(rows * columns, side * side)


class Projection(nn.Module):
    """Dense layer on flat tokens, with axes for heads in kernel [*I *O] and bias [*O].

    On TPUs, arrays of tokens whose last axis is a head of 32 take four times their memory.
    """

    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    kernel_init: Callable[..., Any]
    dtype: Any = jnp.float32
    use_bias: bool = True

    @nn.compact
    def __call__(self, x: Float[Array, '*B I']) -> Float[Array, '*B O']:
        sizes = math.prod(self.inputs), math.prod(self.outputs)

        def init(key: Array) -> Array:
            return self.kernel_init(key, sizes).reshape(*self.inputs, *self.outputs)

        if self.use_bias:
            bias = self.param('bias', nn.initializers.zeros, self.outputs)
        kernel = self.param('kernel', init).reshape(sizes)
        x = x.astype(self.dtype) @ kernel.astype(self.dtype)
        return x + bias.reshape(-1).astype(self.dtype) if self.use_bias else x


class WindowAttention(nn.Module):
    """Multi-head self-attention in windows, with a bias for each relative position.

    SoftMax(Q K^T / sqrt(K) + B) V, equation 4. `position_bias` [2M-1 2M-1 H] has B by the rows and
    columns from a key to its query; a window smaller than M uses its middle. In shifted windows
    -100 is added for tokens that are not neighbors in the map. Kernels `qkv` [D 3 H K] and `out`
    [H K D].

    When the collection `intermediates` is mutable it receives the weights [B W H N N], named
    `attention`.

    Attributes:
      num_heads: H; divides the width.
      window: M, side of a window in tokens.
      shifted: Whether the windows are shifted by half of their side.
      dropout: Dropout rate of the weights.
      kernel_init: Initializer of both projections.
      dtype: Computation dtype; the softmax stays float32.
      attention: Implementation: 'xla'; 'pallas', a TPU kernel without dropout; or 'auto',
        the kernel if it can be used.
      qkv_bias: Whether queries, keys and values have biases.

    Raises:
      UserError: if 'pallas' is requested for something that the kernel does not support.
    """

    num_heads: int
    window: int
    shifted: bool = False
    dropout: float = 0.0
    kernel_init: Callable[..., Any] = nn.initializers.normal(0.02)
    dtype: Any = jnp.float32
    attention: str = 'xla'
    qkv_bias: bool = True

    @nn.compact
    def __call__(self, x: Float[Array, 'B H W D'], train: bool = False) -> Float[Array, 'B H W D']:
        _, height, width, features = x.shape
        windows = self._windows(height, width)
        heads = (self.num_heads, features // self.num_heads)
        project = self._projection(features, heads)
        merge = self._dense(heads, (features,), name='out')
        if (chosen := self._choose(x.shape, windows, train)) is not None:
            padding = windows.tile_padding
            x = jax.lax.optimization_barrier(x)  # XLA would copy its gradient to the map in float32
            tokens = windows.cut_tokens(windows.place(x), padding)
            bias = windows.pad_bias(self._relative_bias(windows), padding)
            regions = jnp.asarray(windows.regions(padding)) if windows.shift else None
            inputs = Inputs((project(tokens),), bias=bias, regions=regions)
            y = merge(checkpoint_name(chosen.attend(inputs), ATTENDED))
            # Without the barriers XLA copies the sums of the matmul to the map, in float32.
            y = windows.join_tokens(jax.lax.optimization_barrier(y), padding)
            return jax.lax.optimization_barrier(windows.restore(y))
        qkv = project(windows.place(x))
        qkv = qkv.reshape(*qkv.shape[:-1], 3, *heads)
        # One transposition to windows and heads, instead of one to windows before the matmul.
        query, key, value = (windows.cut(part.squeeze(-3)) for part in jnp.split(qkv, 3, axis=-3))
        weights = attention_weights(query, key, bias=self._bias(windows))
        keep(self, weights)
        weights = Dropout(self.dropout)(weights, train)
        y = windows.restore(windows.join(attend(weights, value)))
        y = checkpoint_name(y, ATTENDED)
        return merge(y.reshape(*y.shape[:-2], -1))

    def _windows(self, height: int, width: int) -> Windows:
        return Windows.over(height, width, self.window, self.shifted)

    def _dense(
        self, inputs: tuple[int, ...], outputs: tuple[int, ...], **kwargs: Any
    ) -> Projection:
        return Projection(inputs, outputs, self.kernel_init, self.dtype, **kwargs)

    def _projection(self, features: int, heads: tuple[int, int]) -> Callable[[Array], Array]:
        """Make a function from tokens [B ... D] to queries, keys and values [B ... 3HK]."""
        return self._dense((features,), (3, *heads), use_bias=self.qkv_bias, name='qkv')

    def _choose(self, shape: tuple[int, ...], windows: Windows, train: bool) -> Choice | None:
        count = windows.side * (windows.side + windows.tile_padding)
        tokens = (shape[0], math.prod(windows.grid), count, shape[-1])
        dtype, rate = jnp.dtype(self.dtype).name, self.dropout if train else 0.0
        return choose_for(self, WindowSpec(tokens, self.num_heads, dtype, windows.shift > 0, rate))

    def _relative_bias(self, windows: Windows) -> Float[Array, 'H N N']:
        """Make the bias of relative positions."""
        sides = 2 * self.window - 1
        table = self.param(
            'position_bias', nn.initializers.normal(0.02), (sides, sides, self.num_heads)
        )
        first, last = self.window - windows.side, self.window + windows.side - 1
        return gather_biases(table[first:last, first:last])

    def _bias(self, windows: Windows) -> Float[Array, '_ H N N']:
        """Make the bias of the scores, one for all windows or one for each."""
        bias = self._relative_bias(windows)[None]
        if not windows.shift:
            return bias
        regions = jnp.asarray(windows.regions())
        are_apart = regions[:, None, :, None] != regions[:, None, None, :]
        return bias + jnp.where(are_apart, APART, 0.0)


def gather_biases(table: Float[Array, 'R R H']) -> Float[Array, 'H N N']:
    """Look up the bias of each head, query and key of a window in a table by relative position."""
    side = (len(table) + 1) // 2
    rows = table.reshape(-1, table.shape[-1])
    return rows[relative_positions(side, side)].transpose(2, 0, 1)


class WindowMap:
    """Weights [B H Q K] of the tokens of a map, laid out only when numpy asks for them.

    They are zero outside of a window, and would take too much memory for all layers of a large map.
    If the map has been padded, a first key has the weight of the padding.
    """

    def __init__(self, weights: Float[Array, 'B W H N N'], windows: Windows) -> None:
        self._weights, self._windows = weights, windows

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        weights = np.asarray(self._weights, dtype)
        tokens, size = self._windows.tokens(), self._windows.height * self._windows.width
        padded = int((tokens < 0).any())
        dense = np.zeros((*weights.shape[0:3:2], size, padded + size), weights.dtype)
        for i, window in enumerate(tokens):
            is_inside = window >= 0
            rows = weights[:, i][:, :, is_inside]
            queries, keys = window[is_inside], padded + window[is_inside]
            dense[:, :, queries[:, None], keys] = rows[..., is_inside]
            if padded:
                dense[:, :, queries, 0] = rows[..., ~is_inside].sum(axis=-1)
        return dense


class Stage(nn.Module):
    """Blocks with plain and shifted windows in turn, followed by `merge` except in the last stage.

    Attributes:
      block: Factory of blocks, called with `shifted` and `name`.
      drop_paths: Rate of each block.
      merging: Factory of the layer that merges four neighbors into one token; None for the last
        stage.
      remat: Recomputation in the backward pass; see `vit_jax.nn.attention`.
      norm_eps: Value added to the variance in the norm of the merging.
      dtype: Computation dtype.
    """

    block: Callable[..., nn.Module]
    drop_paths: tuple[float, ...]
    merging: Callable[..., nn.Module] | None
    remat: bool | str = False
    norm_eps: float = 1e-5
    dtype: Any = jnp.float32

    @nn.compact
    def __call__(self, x: Float[Array, 'B H W D'], train: bool = False) -> Float[Array, 'B h w _']:
        def apply(block: nn.Module, x: Array, rate: float) -> Array:
            return block(x, train, rate)

        apply = recompute_in_backward(apply, self.remat, static_argnums=2)
        for j, rate in enumerate(self.drop_paths):
            x = apply(self.block(shifted=is_shifted(j), name=f'block_{j}'), x, rate)
        return self.merging(self.norm_eps, self.dtype, name='merge')(x) if self.merging else x


class WindowBlock(nn.Module):
    """A pre-norm block whose attention stays in windows, equation 3 of arXiv:2103.14030.

        z' = W-MSA(LN(z)) + z, or SW-MSA if windows are shifted
        z  = MLP(LN(z')) + z'

    Each sum is preceded by dropout and, with probability `drop_path`, by dropping the whole branch.
    `attention_by` is the `attention` of `WindowAttention`.
    """

    num_heads: int
    window: int
    shifted: bool
    mlp_ratio: float = 4.0
    dropout: float = 0.0
    attention_dropout: float = 0.0
    gelu: str = 'erf'
    norm_eps: float = 1e-5
    dtype: Any = jnp.float32
    attention_by: str = 'xla'
    qkv_bias: bool = True

    @nn.compact
    def __call__(
        self, x: Float[Array, 'B H W D'], train: bool = False, drop_path: float = 0.0
    ) -> Float[Array, 'B H W D']:
        norm = LayerNorm(self.norm_eps, dtype=self.dtype, name='norm1')
        y = self._attention(WindowAttention)(norm(x), train)
        x = add_branch(x, y, self.dropout, drop_path, train)
        norm = LayerNorm(self.norm_eps, dtype=self.dtype, name='norm2')
        y = self._mlp(x.shape[-1])(norm(x), train)
        return add_branch(x, y, self.dropout, drop_path, train)

    def _attention(self, kind: Callable[..., nn.Module], **options: Any) -> nn.Module:
        return kind(
            self.num_heads,
            self.window,
            self.shifted,
            self.attention_dropout,
            dtype=self.dtype,
            attention=self.attention_by,
            qkv_bias=self.qkv_bias,
            name='attention',
            **options,
        )

    def _mlp(self, width: int) -> Mlp:
        hidden = int(self.mlp_ratio * width)
        return Mlp(hidden, self.dropout, self.gelu, self.dtype, INIT, name='mlp')


def pad_end(x: Array, axis: int, count: int, value: float = 0.0) -> Array:
    """Pad the end of an axis by `count` values."""
    widths = [(0, count if i == axis else 0) for i in range(x.ndim)]
    return jnp.pad(x, widths, constant_values=value) if count else x


def pad_to_multiple(x: Float[Array, 'B H W C'], multiple: int) -> Float[Array, 'B h w C']:
    """Pad with rows of zeros at the bottom and columns at the right to multiples."""
    below, right = (-side % multiple for side in x.shape[1:3])
    return jnp.pad(x, ((0, 0), (0, below), (0, right), (0, 0))) if below or right else x


def is_shifted(block: int) -> bool:
    """Return whether a stage's block has shifted windows; every second block has."""
    return block % 2 == 1
