"""Blocks of the encoder-decoder Transformer, for whole sequences or token by token.

Vaswani et al., 2017, arXiv:1706.03762, section 3.1; pre-norm blocks are from Xiong et al.,
2020, arXiv:2002.04745.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax import Array

from vit_jax.array_types import Bool, Float, Int
from vit_jax.nn.blocks import erf_gelu
from vit_jax.nn.dense import Dense
from vit_jax.nn.multi_head import KeyValue, MultiHeadAttention
from vit_jax.nn.norms import LayerNorm
from vit_jax.nn.stochastic import Dropout

NORMS = ('post', 'pre')
ACTIVATIONS: dict[str, Callable[[Array], Array]] = {
    'relu': jax.nn.relu,
    'gelu': erf_gelu,
    'swish': jax.nn.swish,
}


class Memory(NamedTuple):
    """Encoded source that the decoder attends to.

    Attributes:
      tokens: Outputs of the encoder.
      mask: True where the source is not padding.
      positions: Added to the tokens as keys, not as values; None for none.
    """

    tokens: Float[Array, 'B S D']
    mask: Bool[Array, 'B 1 1 S']
    positions: Float[Array, '#B S D'] | None = None


class Past(NamedTuple):
    """Keys and values of the target so far and of the source, for one block of the decoder."""

    target: KeyValue
    source: KeyValue


class Cache(NamedTuple):
    """Decoder's state between steps. Axis 0 of every array is the sentence.

    Attributes:
      blocks: One `Past` a block.
      mask: True where the source is not padding.
    """

    blocks: tuple[Past, ...]
    mask: Bool[Array, 'B 1 1 S']

    @property
    def max_len(self) -> int:
        """Most tokens of the target, the capacity of the cache."""
        return self.blocks[0].target.key.shape[2]


class FeedForward(nn.Module):
    """Two dense layers with an activation between them, equation 2. Parameters `fc1` and `fc2`.

    Dropout acts on the activation.
    """

    hidden_dim: int
    activation: str = 'relu'
    dropout: float = 0.0
    dtype: Any = jnp.float32

    @nn.compact
    def __call__(self, x: Float[Array, '*B D'], train: bool = False) -> Float[Array, '*B D']:
        y = Dense(self.hidden_dim, dtype=self.dtype, name='fc1')(x)
        y = Dropout(self.dropout)(ACTIVATIONS[self.activation](y), train)
        return Dense(x.shape[-1], dtype=self.dtype, name='fc2')(y)


class _Block(nn.Module):
    """Parts of a block, each a function f in a residual connection.

        post-norm: LN(x + f(x))
        pre-norm:  x + f(LN(x))

    f(x) goes through dropout before it is added. Positions, where there are any, are added to
    queries and keys in every block, but not to values (Carion et al., 2020, arXiv:2005.12872,
    appendix A.3). `attention_by` is the `attention` of `MultiHeadAttention`.
    """

    num_heads: int
    mlp_dim: int
    norm: str = 'post'
    dropout: float = 0.0
    attention_dropout: float = 0.0
    activation_dropout: float = 0.0
    activation: str = 'relu'
    norm_eps: float = 1e-6
    dtype: Any = jnp.float32
    attention_by: str = 'xla'

    def setup(self) -> None:
        self.attention = self._make_attention(('qkv',))
        self.attention_norm = LayerNorm(self.norm_eps, dtype=self.dtype)
        self.mlp = FeedForward(self.mlp_dim, self.activation, self.activation_dropout, self.dtype)
        self.mlp_norm = LayerNorm(self.norm_eps, dtype=self.dtype)
        self.drop = Dropout(self.dropout)

    def _make_attention(self, kernels: tuple[str, ...]) -> MultiHeadAttention:
        return MultiHeadAttention(
            self.num_heads, kernels, self.attention_dropout, self.dtype, self.attention_by
        )

    def _attend_to_itself(
        self, x: Array, positions: Array | None, train: bool, **options: Any
    ) -> Array:
        value = self._enter(x, self.attention_norm)
        query = _add_positions(value, positions)
        y = self.attention(query, query, value, train=train, **options)
        return self._leave(x, y, self.attention_norm, train)

    def _feed_forward(self, x: Array, train: bool) -> Array:
        y = self.mlp(self._enter(x, self.mlp_norm), train)
        return self._leave(x, y, self.mlp_norm, train)

    def _enter(self, x: Array, norm: LayerNorm) -> Array:
        """Return the input of f."""
        return norm(x) if self.norm == 'pre' else x

    def _leave(self, x: Array, y: Array, norm: LayerNorm, train: bool) -> Array:
        """Return the output of the residual connection, given x and y = f(...)."""
        x = x + self.drop(y, train)
        return x if self.norm == 'pre' else norm(x)


def _add_positions(x: Array, positions: Array | None) -> Array:
    return x if positions is None else x + positions.astype(x.dtype)


class EncoderBlock(_Block):
    """Self-attention and a feed-forward layer."""

    def __call__(
        self,
        x: Float[Array, 'B N D'],
        mask: Bool[Array, '#B 1 #N N'] | None = None,
        train: bool = False,
        positions: Float[Array, '#B N D'] | None = None,
    ) -> Float[Array, 'B N D']:
        x = self._attend_to_itself(x, positions, train, mask=mask)
        return self._feed_forward(x, train)


class DecoderBlock(_Block):
    """Self-attention, attention to the source, and a feed-forward layer.

    With `causal`, a token attends only to itself and earlier ones.
    """

    causal: bool = False

    def setup(self) -> None:
        super().setup()
        self.cross = self._make_attention(('q', 'kv'))
        self.cross_norm = LayerNorm(self.norm_eps, dtype=self.dtype)

    def __call__(
        self,
        x: Float[Array, 'B T D'],
        memory: Memory,
        train: bool = False,
        positions: Float[Array, '#B T D'] | None = None,
    ) -> Float[Array, 'B T D']:
        x = self._attend_to_itself(x, positions, train, causal=self.causal)
        query = _add_positions(self._enter(x, self.cross_norm), positions)
        key = _add_positions(memory.tokens, memory.positions)
        y = self.cross(query, key, memory.tokens, mask=memory.mask, train=train)
        return self._finish(x, y, train)

    def start(self, memory: Float[Array, 'B S D'], max_len: int) -> Past:
        """Compute the source's keys and values, and empty ones for `max_len` target tokens."""
        source = self.cross.project(memory)
        batch, heads, _, size = source.key.shape
        empty = jnp.zeros((batch, heads, max_len, size), source.key.dtype)
        return Past(KeyValue(empty, empty), source)

    def step(
        self,
        x: Float[Array, 'B 1 D'],
        past: Past,
        mask: Bool[Array, 'B 1 1 S'],
        position: int | Int[Array, ''],
    ) -> tuple[Float[Array, 'B 1 D'], Past]:
        """Apply `__call__` causally to the token at `position`, given earlier tokens."""
        y = self._enter(x, self.attention_norm)
        y, target = self.attention.step(y, past.target, position)
        x = self._leave(x, y, self.attention_norm, train=False)
        y = self.cross.attend(self._enter(x, self.cross_norm), past.source, mask=mask)
        return self._finish(x, y, train=False), Past(target, past.source)

    def _finish(self, x: Array, y: Array, train: bool) -> Array:
        """Apply the block after the attention to the source, whose output is y."""
        return self._feed_forward(self._leave(x, y, self.cross_norm, train), train)


class Stack(nn.Module):
    """Blocks `block_0`, `block_1`, ..., followed by a layer norm `norm` if they are pre-norm."""

    make_block: Callable[[], Any]
    depth: int

    def setup(self) -> None:
        self.block = [self.make_block() for _ in range(self.depth)]
        last = self.block[-1]
        pre = last.norm == 'pre'
        self.norm = LayerNorm(last.norm_eps, dtype=last.dtype) if pre else None

    def __call__(self, x: Float[Array, 'B N D'], *inputs: Any) -> Float[Array, 'B N D']:
        for block in self.block:
            x = block(x, *inputs)
        return self._end(x)

    def start(self, memory: Memory, max_len: int) -> Cache:
        """See `DecoderBlock.start`."""
        blocks = tuple(block.start(memory.tokens, max_len) for block in self.block)
        return Cache(blocks, memory.mask)

    def step(
        self, x: Float[Array, 'B 1 D'], cache: Cache, position: int | Int[Array, '']
    ) -> tuple[Float[Array, 'B 1 D'], Cache]:
        """See `DecoderBlock.step`."""
        blocks = []
        for block, past in zip(self.block, cache.blocks, strict=True):
            x, past = block.step(x, past, cache.mask, position)
            blocks.append(past)
        return self._end(x), Cache(tuple(blocks), cache.mask)

    def _end(self, x: Array) -> Array:
        return x if self.norm is None else self.norm(x)


class LayerOutputs(nn.Module):
    """Blocks `block_0`, `block_1`, ..., and the layer norm `norm` on the output of each of them."""

    make_block: Callable[[], Any]
    depth: int

    def setup(self) -> None:
        self.block = [self.make_block() for _ in range(self.depth)]
        last = self.block[-1]
        self.norm = LayerNorm(last.norm_eps, dtype=last.dtype)

    def __call__(self, x: Float[Array, 'B Q D'], *inputs: Any) -> Float[Array, 'B L Q D']:
        """Stack the outputs of all blocks, which get further inputs."""
        outputs = []
        for block in self.block:
            x = block(x, *inputs)
            outputs.append(self.norm(x))
        return jnp.stack(outputs, axis=1)


class Embeddings(nn.Module):
    """Vectors of the source's and the target's tokens, and the matrix before the softmax.

    Tied, they are one matrix, Press and Wolf, 2017, arXiv:1608.05859: parameter `shared` [V D].
    Otherwise three: `source`, `target` and `output`. Entries start with variance 1 / D.
    """

    vocab_size: int
    width: int
    tied: bool = True
    dtype: Any = jnp.float32

    def setup(self) -> None:
        def table(name: str) -> Array:
            init = nn.initializers.normal(self.width**-0.5)
            return self.param(name, init, (self.vocab_size, self.width))

        names = ('shared',) if self.tied else ('source', 'target', 'output')
        tables = [table(name) for name in names]
        self.tables = tables * 3 if self.tied else tables

    def source(self, tokens: Int[Array, '*B']) -> Float[Array, '*B D']:
        """Return the vectors of tokens of the source."""
        return jnp.take(self.tables[0], tokens, axis=0).astype(self.dtype)

    def target(self, tokens: Int[Array, '*B']) -> Float[Array, '*B D']:
        """Return the vectors of tokens of the target."""
        return jnp.take(self.tables[1], tokens, axis=0).astype(self.dtype)

    def logits(self, x: Float[Array, '*B D']) -> Float[Array, '*B V']:
        """Return the scores of the next token, in float32."""
        table = self.tables[2].astype(self.dtype)
        return jnp.einsum(
            '...d,vd->...v', x.astype(self.dtype), table, preferred_element_type=jnp.float32
        )
