"""Attention as pure functions.

A query looks at M keys and gets the average of their values:

    additive            v^T tanh(W s + U h)  Bahdanau et al., 2015, arXiv:1409.0473, appendix A.1.2
    dot_product         s^T h                Luong et al., 2015, arXiv:1508.04025, equation 7
    scaled_dot_product  q^T k / sqrt(K)      Vaswani et al., 2017, arXiv:1706.03762, equation 1

are the scores whose softmax over the keys are the weights. Each function returns (context,
weights), and takes a mask that is true where a query may look at a key.
"""

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int


def attention_weights(
    query: Float[Array, '*B N K'],
    key: Float[Array, '*B M K'],
    mask: Bool[Array, '*#B #N #M'] | None = None,
    bias: Float[Array, '*#B #N #M'] | None = None,
) -> Float[Array, '*B N M']:
    """softmax(Q K^T / sqrt(K) + bias) over the keys (equation 1), in float32 whatever the inputs'
    dtype. `mask` is true where a query may look at a key.
    """
    scores = _products(query, key) / math.sqrt(query.shape[-1])
    return masked_softmax(scores if bias is None else scores + bias, mask)


def _products(query: Array, key: Array) -> Array:
    return jnp.einsum('...nk,...mk->...nm', query, key, preferred_element_type=jnp.float32)


def masked_softmax(
    scores: Float[Array, '*B N M'], mask: Bool[Array, '*#B #N #M'] | None = None
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
    mask: Bool[Array, '*#B #N #M'] | None = None,
    bias: Float[Array, '*#B #N #M'] | None = None,
) -> tuple[Float[Array, '*B N D'], Float[Array, '*B N M']]:
    """Attention(Q, K, V) = softmax(Q K^T / sqrt(K) + bias) V, equation 1 of Vaswani et al."""
    weights = attention_weights(query, key, mask, bias)
    return attend(weights, value), weights


def dot_product(
    query: Float[Array, '*B N K'],
    key: Float[Array, '*B M K'],
    value: Float[Array, '*B M D'],
    mask: Bool[Array, '*#B #N #M'] | None = None,
) -> tuple[Float[Array, '*B N D'], Float[Array, '*B N M']]:
    """softmax(Q K^T) V, Luong's `dot`; with keys W h it is his `general`."""
    weights = masked_softmax(_products(query, key), mask)
    return attend(weights, value), weights


def additive(
    query: Float[Array, '*B N K'],
    key: Float[Array, '*B M K'],
    value: Float[Array, '*B M D'],
    v: Float[Array, 'K'],
    mask: Bool[Array, '*#B #N #M'] | None = None,
) -> tuple[Float[Array, '*B N D'], Float[Array, '*B N M']]:
    """softmax(v^T tanh(q + k)) V of Bahdanau et al., for queries W s and keys U h.

    The keys are the same at every step of a decoder, so they come in projected.
    """
    hidden = jnp.tanh(query[..., :, None, :] + key[..., None, :, :])
    scores = jnp.einsum('...k,k->...', hidden, v, preferred_element_type=jnp.float32)
    weights = masked_softmax(scores, mask)
    return attend(weights, value), weights


class Segments(NamedTuple):
    """The sequence of each token, where a row holds several: queries see the keys of their own.

    Numbers count from 1, and 0 is padding, which sees nothing but padding. A row of one padded
    sequence is the mask of its tokens, as integers.

    Attributes:
      query: of the tokens that look.
      key: of those that are looked at.
    """

    query: Int[Array, '*B N']
    key: Int[Array, '*B M']

    def mask(self) -> Bool[Array, '*B 1 N M']:
        """True where a query may look at a key, for all heads."""
        return (self.query[..., :, None] == self.key[..., None, :])[..., None, :, :]


def padding_mask(tokens: Int[Array, 'B M'], pad: int = 0) -> Bool[Array, 'B 1 1 M']:
    """True where a token is not padding, for all heads and queries."""
    return (tokens != pad)[:, None, None]


def causal_mask(tokens: int) -> Bool[Array, '1 1 N N']:
    """True where the key does not come after the query."""
    return jnp.tril(jnp.ones((1, 1, tokens, tokens), bool))
