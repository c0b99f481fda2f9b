"""Multi-head attention layer: heads of queries, keys and values around scaled dot products.

Arrays in heads are [B H N K]: batch, heads, tokens, width of a head. With heads before tokens both
matmuls are plain batched ones. There may be axes between batch and tokens, such as windows:
[B W N D] becomes [B W H N K].
"""

import itertools
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.ad_checkpoint import checkpoint_name

from vit_jax.array_types import Bool, Float, Int
from vit_jax.errors import check_multiple
from vit_jax.nn.attention import (
    ATTENDED,
    AttentionSpec,
    Segments,
    attend,
    attention_weights,
    both,
    causal_mask,
)
from vit_jax.nn.attention_choice import choose_for
from vit_jax.nn.dense import affine
from vit_jax.nn.kernels.interface import Inputs
from vit_jax.nn.maps import keep
from vit_jax.nn.rotary import Rotary
from vit_jax.nn.stochastic import Dropout


class KeyValue(NamedTuple):
    """Keys and values in heads."""

    key: Float[Array, '*B H M K']
    value: Float[Array, '*B H M K']

    def write(self, new: 'KeyValue', position: int | Int[Array, '']) -> 'KeyValue':
        """Replace the tokens from `position` on by `new`."""
        update = jax.lax.dynamic_update_slice_in_dim
        return KeyValue(*(update(a, b, position, axis=-2) for a, b in zip(self, new, strict=True)))


class Heads(nn.Module):
    """C projections of tokens to heads, with one kernel [D C H K] and one bias [C H K].

    Each projection is initialized as a separate Xavier-uniform matrix, so that a fused kernel
    starts like separate ones. Projections whose indices are in `no_bias` have no rows in the bias,
    which is absent if it would have none.
    """

    num_heads: int
    dtype: Any = jnp.float32
    no_bias: tuple[int, ...] = ()

    @nn.compact
    def __call__(
        self,
        *inputs: Float[Array, '*B _ D'] | None,
        side_by_side: bool = False,
        shared: bool = True,
    ) -> tuple[Float[Array, '*B H _ K'] | None, ...] | tuple[Float[Array, '*B _ _'], ...]:
        """Project each input to heads; None for inputs that are None.

        Consecutive inputs that are the same array share a matmul. With `side_by_side` its result is
        not split, [* N cHK] for c such inputs; without `shared` each input has a separate matmul.
        """
        (width,) = {x.shape[-1] for x in inputs if x is not None}
        check_multiple('width', width, 'num_heads', self.num_heads)
        shape = (len(inputs), self.num_heads, width // self.num_heads)
        init = nn.initializers.xavier_uniform(in_axis=0, out_axis=(2, 3), batch_axis=1)
        kernel = self.param('kernel', init, (width, *shape))
        biased = [i for i in range(len(inputs)) if i not in self.no_bias]
        bias = jnp.zeros(shape)  # rows of zeros for projections without one
        if biased:
            rows = self.param('bias', nn.initializers.zeros, (len(biased), *shape[1:]))
            bias = rows if len(biased) == len(inputs) else bias.at[np.array(biased)].set(rows)
        if side_by_side:
            runs = _runs(inputs)
            if not shared:
                runs = ((x, slice(i, i + 1)) for i, x in enumerate(inputs) if x is not None)
            flat = ((x, kernel[:, i].reshape(width, -1), bias[i].reshape(-1)) for x, i in runs)
            return tuple(affine(*part, self.dtype) for part in flat)
        heads: list[Array | None] = [None] * len(inputs)
        for x, places in _runs(inputs):
            rows = bias[places]
            y = affine(x, kernel[:, places].reshape(width, -1), rows.reshape(-1), self.dtype)
            # The gradient of a split is one concatenation, of indexing a sum of padded arrays.
            parts = jnp.split(y, len(rows), axis=-1)
            size = *x.shape[:-1], *rows.shape[1:]
            heads[places] = [part.reshape(size).swapaxes(-3, -2) for part in parts]
        return tuple(heads)


def _runs(inputs: tuple[Array | None, ...]) -> Iterator[tuple[Array, slice]]:
    """Yield each array among the inputs with its indices; equal neighbors are joined."""
    first = 0
    for _, group in itertools.groupby(inputs, key=id):
        x, *repeats = group
        last = first + 1 + len(repeats)
        if x is not None:
            yield x, slice(first, last)
        first = last


class MergeHeads(nn.Module):
    """Output projection W^O of the heads, after any norm. Kernel [H K D], bias [D] if any."""

    dtype: Any = jnp.float32
    use_bias: bool = True
    norm: Callable[..., nn.Module] | None = None

    @nn.compact
    def __call__(self, x: Float[Array, '*B H N K']) -> Float[Array, '*B N D']:
        *batch, heads, tokens, size = x.shape
        width = heads * size
        init = nn.initializers.xavier_uniform(in_axis=(0, 1), out_axis=2)
        kernel = self.param('kernel', init, (heads, size, width))
        bias = self.param('bias', nn.initializers.zeros, (width,)) if self.use_bias else None
        x = x.swapaxes(-3, -2).reshape(*batch, tokens, width).astype(self.dtype)
        x = checkpoint_name(x, ATTENDED)
        x = x if self.norm is None else self.norm(dtype=self.dtype, name='norm')(x)
        return affine(x, kernel.reshape(width, width), bias, self.dtype)


class MultiHeadAttention(nn.Module):
    """Multi-head self- or cross-attention, section 3.2.2 of Vaswani et al.

    When the collection `intermediates` is mutable it receives the weights [B H N M], named
    `attention`.

    Attributes:
      num_heads: H; divides the width.
      kernels: Names of the parameters that project queries, keys and values: ('qkv',) in one
        matmul, for self-attention; ('q', 'kv') for cross-attention. Besides these there is `out`.
      dropout: Dropout rate of the weights.
      dtype: Computation dtype; the softmax stays float32.
      attention: Implementation: 'xla'; 'pallas', a TPU kernel, which supports masks of keys,
        causal masks and segments, but no bias; 'cudnn', a kernel for NVIDIA GPUs in bfloat16 or
        float16, which supports masks or a bias, but no dropout of weights; or 'auto', the kernel
        of the device if it can be used. 'xla' and 'pallas' drop the same weights.
      no_bias: Projections without bias: some of 'query', 'key', 'value' and 'out'.
      qk_norm: Factory of the norms of the heads of queries and keys, `q_norm` and `k_norm`, called
        with `dtype` (Dehghani et al., 2023, arXiv:2302.05442, section 2); None omits them.
      inner_norm: Factory of the norm before the output projection, called likewise (sub-LN,
        arXiv:2210.06423); None omits it.
      relative: Factory of the layer `position_bias`, which returns [1 H N N] to add to the scores
        of self-attention; None omits it.

    Raises:
      UserError: if a kernel is requested by name for something that it does not support.
    """

    num_heads: int
    kernels: tuple[str, ...] = ('qkv',)
    dropout: float = 0.0
    dtype: Any = jnp.float32
    attention: str = 'xla'
    no_bias: tuple[str, ...] = ()
    qk_norm: Callable[..., nn.Module] | None = None
    relative: Callable[[], nn.Module] | None = None
    inner_norm: Callable[..., nn.Module] | None = None

    def setup(self) -> None:
        if self.relative is not None:
            self.position_bias = self.relative()
        if self.qk_norm is not None:
            self.q_norm, self.k_norm = (self.qk_norm(dtype=self.dtype) for _ in 'qk')
        without = {name[0] for name in self.no_bias if name != 'out'}
        for name in self.kernels:
            places = tuple(i for i, letter in enumerate(name) if letter in without)
            setattr(self, name, Heads(self.num_heads, self.dtype, places))
        self.out = MergeHeads(self.dtype, 'out' not in self.no_bias, self.inner_norm)

    def __call__(
        self,
        query: Float[Array, '*B N D'],
        key: Float[Array, '*B M D'] | None = None,
        value: Float[Array, '*B M D'] | None = None,
        *,
        mask: Bool[Array, '*#B #H #N #M'] | None = None,
        bias: Float[Array, '*#B #H #N #M'] | None = None,
        segments: Segments | None = None,
        rotary: Rotary | None = None,
        causal: bool = False,
        train: bool = False,
    ) -> Float[Array, '*B N D']:
        """Attend from each query to the keys.

        Args:
          query: Tokens of the queries.
          key: Tokens of the keys; by default the queries.
          value: Tokens of the values; by default the keys. Positions that should affect the weights
            but not the result are added to `query` and `key` only.
          mask: True where a query may attend to a key.
          bias: Bias of the scores before the softmax.
          segments: Sequences that share a row; a query attends to the keys of its sequence.
          rotary: Positions of the tokens, which rotate queries and keys; M is N then.
          causal: Whether queries attend to no keys after their own position; M is N then.
          train: Whether dropout acts.
        """
        key = query if key is None else key
        value = key if value is None else value
        if self.relative is not None:
            relative = self.position_bias()
            bias = relative if bias is None else bias + relative
        tokens = {'q': query, 'k': key, 'v': value}
        rate = self.dropout if train else 0.0
        spec = AttentionSpec(
            *(query.shape, key.shape[-2], self.num_heads, jnp.dtype(self.dtype).name),
            *(self._layout(tokens, rotary), mask is not None, segments is not None, causal),
            rate=rate,
            mask_queries=mask is not None and mask.shape[1:-1] != (1, 1),
            bias_rows=0 if bias is None else len(bias),
        )
        if (chosen := choose_for(self, spec)) is not None:
            columns = self._project_columns(tokens, rotary, chosen.packed)
            keep_mask = self._draw_keep_mask(spec) if rate else None
            y = chosen.attend(Inputs(columns, mask, segments, bias, keep_mask))
            return self.out(y.reshape(*y.shape[:-1], self.num_heads, -1).swapaxes(-3, -2))
        heads = self._project(query, key, value)
        if rotary is not None:
            heads |= {letter: rotary.rotate(heads[letter]) for letter in 'qk'}
        if segments is not None:
            mask = both(mask, segments.mask())
        if causal:
            mask = both(mask, causal_mask(query.shape[-2]))
        return self._attend(heads['q'], KeyValue(heads['k'], heads['v']), mask, bias, train)

    def project(
        self, key: Float[Array, '*B M D'], value: Float[Array, '*B M D'] | None = None
    ) -> KeyValue:
        """Project tokens to keys and values, for use with many queries; see `__call__`."""
        heads = self._project(None, key, key if value is None else value)
        return KeyValue(heads['k'], heads['v'])

    def attend(
        self,
        query: Float[Array, '*B N D'],
        memory: KeyValue,
        *,
        mask: Bool[Array, '*#B #H #N #M'] | None = None,
        bias: Float[Array, '*#B #H #N #M'] | None = None,
        train: bool = False,
    ) -> Float[Array, '*B N D']:
        """Attend from each query to projected keys and values; see `__call__`."""
        return self._attend(self._project(query, None, None)['q'], memory, mask, bias, train)

    def step(
        self, x: Float[Array, 'B 1 D'], past: KeyValue, position: int | Int[Array, '']
    ) -> tuple[Float[Array, 'B 1 D'], KeyValue]:
        """Attend from the token at `position` to itself and the tokens before it in `past`.

        Returns:
          The causal result of `__call__` for this token, and `past` with the token.
        """
        mask = jnp.arange(past.key.shape[-2]) <= position
        heads = self._project(x, x, x)
        tokens = past.write(KeyValue(heads['k'], heads['v']), position)
        return self._attend(heads['q'], tokens, mask[None, None, None], None, False), tokens

    def _layout(self, tokens: dict[str, Array], rotary: Rotary | None) -> tuple[int, ...]:
        """Count the queries, keys and values in each array of `_project_columns`."""
        if self.qk_norm is not None or rotary is not None:
            return (1, 1, 1)
        runs = (run for name in self.kernels for _, run in _runs(tuple(tokens[c] for c in name)))
        return tuple(run.stop - run.start for run in runs)

    def _project_columns(
        self, tokens: dict[str, Array], rotary: Rotary | None, packed: bool
    ) -> tuple[Array, ...]:
        """Project to queries, keys and values for a kernel, normed and rotated; see `Inputs`."""
        projected: tuple[Array, ...] = ()
        for name in self.kernels:
            inputs = (tokens[letter] for letter in name)
            projected += getattr(self, name)(*inputs, side_by_side=True, shared=packed)
        if self.qk_norm is None and rotary is None:
            return projected
        width = tokens['q'].shape[-1]
        parts = [y for x in projected for y in jnp.split(x, x.shape[-1] // width, axis=-1)]
        for i, letter in enumerate('qk'):
            x = self._normalize(letter, parts[i].reshape(*parts[i].shape[:-1], self.num_heads, -1))
            x = x if rotary is None else rotary.rotate(x, heads=-2)
            parts[i] = x.reshape(parts[i].shape)
        return tuple(parts)

    def _normalize(self, letter: str, heads: Array) -> Array:
        """Apply any norm of queries and keys to their heads; values stay unchanged."""
        if self.qk_norm is None or letter == 'v':
            return heads
        return self.q_norm(heads) if letter == 'q' else self.k_norm(heads)

    def _project(self, *inputs: Array | None) -> dict[str, Any]:
        """Project to the heads of queries, keys and values, by the letters `q`, `k` and `v`."""
        tokens = dict(zip('qkv', inputs, strict=True))
        heads: dict[str, Any] = {}
        for name in self.kernels:
            sources = [tokens[letter] for letter in name]
            if any(x is not None for x in sources):
                heads.update(zip(name, getattr(self, name)(*sources), strict=True))
        return {k: x if x is None else self._normalize(k, x) for k, x in heads.items()}

    def _draw_keep_mask(self, spec: AttentionSpec) -> Bool[Array, 'B H N M']:
        """Draw the mask of the weights that dropout keeps, the same as in `_attend`."""
        (batch, queries, _), keys = spec.shape, spec.keys
        return self._weight_dropout().draw((batch, self.num_heads, queries, keys))

    @nn.compact
    def _weight_dropout(self) -> Dropout:
        return Dropout(self.dropout)

    def _attend(
        self, query: Array, memory: KeyValue, mask: Array | None, bias: Array | None, train: bool
    ) -> Array:
        weights = attention_weights(query, memory.key, mask, bias)
        keep(self, weights)
        weights = self._weight_dropout()(weights, train)
        return self.out(attend(weights, memory.value))
