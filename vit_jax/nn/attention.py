"""Attention as pure functions, and the multi-head layers around scaled dot products.

A query looks at M keys and gets the average of their values:

    additive            v^T tanh(W s + U h)  Bahdanau et al., 2015, arXiv:1409.0473, appendix A.1.2
    dot_product         s^T h                Luong et al., 2015, arXiv:1508.04025, equation 7
    scaled_dot_product  q^T k / sqrt(K)      Vaswani et al., 2017, arXiv:1706.03762, equation 1

are the scores whose softmax over the keys are the weights. Each function returns (context,
weights), and takes a mask that is true where a query may look at a key.

Layers hold arrays as [B H N K]: batch, heads, tokens, width of a head. With heads before tokens
both products are plain batched matrix products.
"""

import math
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from vit_jax.errors import UserError
from vit_jax.nn.stochastic import Dropout


def attention_weights(
    query: Float[Array, '*B N K'],
    key: Float[Array, '*B M K'],
    mask: Bool[Array, '*#B #N M'] | None = None,
) -> Float[Array, '*B N M']:
    """softmax(Q K^T / sqrt(K)) over the keys (equation 1), in float32 whatever the inputs' dtype.

    `mask` is true where a query may look at a key.
    """
    return masked_softmax(_products(query, key) / math.sqrt(query.shape[-1]), mask)


def _products(query: Array, key: Array) -> Array:
    return jnp.einsum('...nk,...mk->...nm', query, key, preferred_element_type=jnp.float32)


def masked_softmax(
    scores: Float[Array, '*B N M'], mask: Bool[Array, '*#B #N M'] | None = None
) -> Float[Array, '*B N M']:
    """Softmax over the keys where `mask` is true; a query that may look nowhere looks everywhere
    alike, so that nothing becomes NaN.
    """
    if mask is not None:
        scores = jnp.where(mask, scores, jnp.finfo(scores.dtype).min)
    return softmax(scores)


@jax.custom_jvp
def softmax(x: Float[Array, '*B N']) -> Float[Array, '*B N']:
    """Softmax over the last axis, whose derivative needs nothing but the result.

    Plain differentiation keeps the exponentials and their sums as well, and passes over these
    arrays, the largest of a Transformer, several times more.
    """
    exps = jnp.exp(x - x.max(axis=-1, keepdims=True))
    return exps / exps.sum(axis=-1, keepdims=True)


@softmax.defjvp
def _softmax_jvp(primals: tuple[Array], tangents: tuple[Array]) -> tuple[Array, Array]:
    y, t = softmax(*primals), tangents[0]
    return y, y * (t - (y * t).sum(axis=-1, keepdims=True))


def attend(
    weights: Float[Array, '*B N M'], value: Float[Array, '*B M K']
) -> Float[Array, '*B N K']:
    """The values averaged by the weights, in the dtype of the values."""
    return jnp.einsum('...nm,...mk->...nk', weights.astype(value.dtype), value)


def scaled_dot_product(
    query: Float[Array, '*B N K'],
    key: Float[Array, '*B M K'],
    value: Float[Array, '*B M D'],
    mask: Bool[Array, '*#B #N M'] | None = None,
) -> tuple[Float[Array, '*B N D'], Float[Array, '*B N M']]:
    """Attention(Q, K, V) = softmax(Q K^T / sqrt(K)) V, equation 1 of Vaswani et al."""
    weights = attention_weights(query, key, mask)
    return attend(weights, value), weights


def dot_product(
    query: Float[Array, '*B N K'],
    key: Float[Array, '*B M K'],
    value: Float[Array, '*B M D'],
    mask: Bool[Array, '*#B #N M'] | None = None,
) -> tuple[Float[Array, '*B N D'], Float[Array, '*B N M']]:
    """softmax(Q K^T) V, Luong's `dot`; with keys W h it is his `general`."""
    weights = masked_softmax(_products(query, key), mask)
    return attend(weights, value), weights


def additive(
    query: Float[Array, '*B N K'],
    key: Float[Array, '*B M K'],
    value: Float[Array, '*B M D'],
    v: Float[Array, 'K'],
    mask: Bool[Array, '*#B #N M'] | None = None,
) -> tuple[Float[Array, '*B N D'], Float[Array, '*B N M']]:
    """softmax(v^T tanh(q + k)) V of Bahdanau et al., for queries W s and keys U h.

    The keys are the same at every step of a decoder, so they come in projected.
    """
    hidden = jnp.tanh(query[..., :, None, :] + key[..., None, :, :])
    scores = jnp.einsum('...k,k->...', hidden, v, preferred_element_type=jnp.float32)
    weights = masked_softmax(scores, mask)
    return attend(weights, value), weights


def padding_mask(tokens: Int[Array, 'B M'], pad: int = 0) -> Bool[Array, 'B 1 1 M']:
    """True where a token is not padding, for all heads and queries."""
    return (tokens != pad)[:, None, None]


def causal_mask(tokens: int) -> Bool[Array, '1 1 N N']:
    """True where the key does not come after the query."""
    return jnp.tril(jnp.ones((1, 1, tokens, tokens), bool))


class KeyValue(NamedTuple):
    """What queries look at, in heads."""

    key: Float[Array, 'B H M K']
    value: Float[Array, 'B H M K']

    def write(self, new: 'KeyValue', position: int | Int[Array, '']) -> 'KeyValue':
        """With `new` in the places of the tokens from `position` on."""
        update = jax.lax.dynamic_update_slice_in_dim
        return KeyValue(*(update(a, b, position, axis=2) for a, b in zip(self, new, strict=True)))


class Heads(nn.Module):
    """`count` projections of the same tokens to heads, as one matrix product.

    Kernel [D count H K] and bias [count H K]. Each projection starts as a Xavier-uniform matrix of
    its own, so that a fused kernel begins like separate ones.
    """

    count: int
    num_heads: int
    dtype: Any = jnp.float32

    @nn.compact
    def __call__(self, x: Float[Array, 'B N D']) -> tuple[Float[Array, 'B H N K'], ...]:
        width = x.shape[-1]
        if width % self.num_heads:
            raise UserError(f'width {width} is not a multiple of num_heads {self.num_heads}')
        shape = (self.count, self.num_heads, width // self.num_heads)
        init = nn.initializers.xavier_uniform(in_axis=0, out_axis=(2, 3), batch_axis=1)
        kernel = self.param('kernel', init, (width, *shape))
        bias = self.param('bias', nn.initializers.zeros, shape)
        x, kernel, bias = (a.astype(self.dtype) for a in (x, kernel, bias))
        y = x @ kernel.reshape(width, -1) + bias.reshape(-1)
        # A split's gradient is one concatenation; that of indexing is a sum of padded arrays.
        parts = jnp.split(y, self.count, axis=-1)
        return tuple(part.reshape(*x.shape[:2], *shape[1:]).swapaxes(1, 2) for part in parts)


class MergeHeads(nn.Module):
    """The output projection W^O of the concatenated heads. Kernel [H K D], bias [D]."""

    dtype: Any = jnp.float32

    @nn.compact
    def __call__(self, x: Float[Array, 'B H N K']) -> Float[Array, 'B N D']:
        batch, heads, tokens, size = x.shape
        width = heads * size
        init = nn.initializers.xavier_uniform(in_axis=(0, 1), out_axis=2)
        kernel = self.param('kernel', init, (heads, size, width))
        bias = self.param('bias', nn.initializers.zeros, (width,))
        x = x.swapaxes(1, 2).reshape(batch, tokens, width).astype(self.dtype)
        return x @ kernel.reshape(width, width).astype(self.dtype) + bias.astype(self.dtype)


class SelfAttention(nn.Module):
    """Multi-head self-attention, section 3.2.2 of Vaswani et al.

    Parameters `qkv` (queries, keys and values in this order) and `out`. When the collection
    `intermediates` is mutable it receives the weights [B H N N], named `attention`.
    """

    num_heads: int
    dropout: float = 0.0
    dtype: Any = jnp.float32

    def __call__(
        self,
        x: Float[Array, 'B N D'],
        mask: Bool[Array, '#B #H #N N'] | None = None,
        train: bool = False,
    ) -> Float[Array, 'B N D']:
        return self._attend(x, mask, train)[0]

    def step(
        self, x: Float[Array, 'B 1 D'], past: KeyValue, position: int | Int[Array, '']
    ) -> tuple[Float[Array, 'B 1 D'], KeyValue]:
        """The token at `position`, which looks at itself and at the tokens before it in `past`.

        Returns:
          what `__call__` under a causal mask gives for this token, and `past` with the token.
        """
        seen = jnp.arange(past.key.shape[2]) <= position
        return self._attend(x, seen[None, None, None], False, past, position)

    @nn.compact
    def _attend(
        self,
        x: Array,
        mask: Array | None,
        train: bool,
        past: KeyValue | None = None,
        position: int | Array = 0,
    ) -> tuple[Array, KeyValue]:
        query, key, value = Heads(3, self.num_heads, self.dtype, name='qkv')(x)
        tokens = KeyValue(key, value)
        if past is not None:
            tokens = past.write(tokens, position)
        weights = attention_weights(query, tokens.key, mask)
        sow_attention(self, weights)
        weights = Dropout(self.dropout)(weights, train)
        return MergeHeads(self.dtype, name='out')(attend(weights, tokens.value)), tokens


class CrossAttention(nn.Module):
    """Multi-head attention of one sequence to another. Parameters `q`, `kv` and `out`.

    When the collection `intermediates` is mutable it receives the weights [B H N M], named
    `attention`.
    """

    num_heads: int
    dropout: float = 0.0
    dtype: Any = jnp.float32

    def setup(self) -> None:
        self.q = Heads(1, self.num_heads, self.dtype)
        self.kv = Heads(2, self.num_heads, self.dtype)
        self.out = MergeHeads(self.dtype)
        self.drop = Dropout(self.dropout)

    def __call__(
        self,
        x: Float[Array, 'B N D'],
        memory: Float[Array, 'B M D'],
        mask: Bool[Array, '#B #H #N M'] | None = None,
        train: bool = False,
    ) -> Float[Array, 'B N D']:
        return self.attend(x, self.project(memory), mask, train)

    def project(self, memory: Float[Array, 'B M D']) -> KeyValue:
        """The keys and values of a sequence, which many queries may share."""
        return KeyValue(*self.kv(memory))

    def attend(
        self,
        x: Float[Array, 'B N D'],
        memory: KeyValue,
        mask: Bool[Array, '#B #H #N M'] | None = None,
        train: bool = False,
    ) -> Float[Array, 'B N D']:
        """`__call__` for a sequence that is projected already."""
        (query,) = self.q(x)
        weights = attention_weights(query, memory.key, mask)
        sow_attention(self, weights)
        return self.out(attend(self.drop(weights, train), memory.value))


def sow_attention(module: nn.Module, weights: Float[Array, 'B H N M']) -> None:
    """Keeps the attention weights for whoever made `intermediates` mutable; else costs nothing."""
    if module.is_mutable_collection('intermediates'):
        module.sow('intermediates', 'attention', weights)
