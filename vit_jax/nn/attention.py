"""Scaled dot-product attention as pure functions, and the multi-head layers around it.

Vaswani et al., 2017, arXiv:1706.03762, section 3.2. Arrays are [B H N K]: batch, heads, tokens,
width of a head. With heads before tokens both products are plain batched matrix products.
"""

import math
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from vit_jax.errors import UserError
from vit_jax.nn.stochastic import Dropout


def attention_weights(
    query: Float[Array, 'B H N K'],
    key: Float[Array, 'B H M K'],
    mask: Bool[Array, '#B #H #N M'] | None = None,
) -> Float[Array, 'B H N M']:
    """softmax(Q K^T / sqrt(K)) over the keys (equation 1), in float32 whatever the inputs' dtype.

    `mask` is true where a query may look at a key.
    """
    scores = jnp.einsum('bhnk,bhmk->bhnm', query, key, preferred_element_type=jnp.float32)
    scores = scores / math.sqrt(query.shape[-1])
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
    weights: Float[Array, 'B H N M'], value: Float[Array, 'B H M K']
) -> Float[Array, 'B H N K']:
    """The values averaged by the weights, in the dtype of the values."""
    return jnp.einsum('bhnm,bhmk->bhnk', weights.astype(value.dtype), value)


def dot_product_attention(
    query: Float[Array, 'B H N K'],
    key: Float[Array, 'B H M K'],
    value: Float[Array, 'B H M K'],
    mask: Bool[Array, '#B #H #N M'] | None = None,
) -> Float[Array, 'B H N K']:
    """Attention(Q, K, V) = softmax(Q K^T / sqrt(K)) V, equation 1."""
    return attend(attention_weights(query, key, mask), value)


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
    """Multi-head self-attention, section 3.2.2: every token looks at every token.

    Parameters `qkv` (queries, keys and values in this order) and `out`. When the collection
    `intermediates` is mutable it receives the weights [B H N N], named `attention`.
    """

    num_heads: int
    dropout: float = 0.0
    dtype: Any = jnp.float32

    @nn.compact
    def __call__(
        self,
        x: Float[Array, 'B N D'],
        mask: Bool[Array, '#B #H #N N'] | None = None,
        train: bool = False,
    ) -> Float[Array, 'B N D']:
        query, key, value = Heads(3, self.num_heads, self.dtype, name='qkv')(x)
        weights = attention_weights(query, key, mask)
        sow_attention(self, weights)
        weights = Dropout(self.dropout)(weights, train)
        return MergeHeads(self.dtype, name='out')(attend(weights, value))


class CrossAttention(nn.Module):
    """Multi-head attention of one sequence to another. Parameters `q`, `kv` and `out`.

    When the collection `intermediates` is mutable it receives the weights [B H N M], named
    `attention`.
    """

    num_heads: int
    dropout: float = 0.0
    dtype: Any = jnp.float32

    @nn.compact
    def __call__(
        self,
        x: Float[Array, 'B N D'],
        memory: Float[Array, 'B M D'],
        mask: Bool[Array, '#B #H #N M'] | None = None,
        train: bool = False,
    ) -> Float[Array, 'B N D']:
        (query,) = Heads(1, self.num_heads, self.dtype, name='q')(x)
        key, value = Heads(2, self.num_heads, self.dtype, name='kv')(memory)
        weights = attention_weights(query, key, mask)
        sow_attention(self, weights)
        weights = Dropout(self.dropout)(weights, train)
        return MergeHeads(self.dtype, name='out')(attend(weights, value))


def sow_attention(module: nn.Module, weights: Float[Array, 'B H N M']) -> None:
    """Keeps the attention weights for whoever made `intermediates` mutable; else costs nothing."""
    if module.is_mutable_collection('intermediates'):
        module.sow('intermediates', 'attention', weights)
