"""Attention as pure functions, its masks, and recomputation of blocks.

A query attends to M keys and gets the weighted mean of their values. The scores

    additive            v^T tanh(W s + U h)  Bahdanau et al., 2015, arXiv:1409.0473, appendix A.1.2
    dot_product         s^T h                Luong et al., 2015, arXiv:1508.04025, equation 7
    scaled_dot_product  q^T k / sqrt(K)      Vaswani et al., 2017, arXiv:1706.03762, equation 1

give the weights by a softmax over the keys. Each function returns (context, weights), and takes a
mask that is true where a query may attend to a key.

Blocks may be recomputed in the backward pass (Chen et al., 2016, arXiv:1604.06174). A block always
keeps its input; `remat` selects the other values that it keeps:

    False      all that the backward pass needs
    'dots'     matmuls with kernels, but not those between tokens: only attention and elementwise
               operations are recomputed
    'names'    the heads' results and the hidden layer of the MLP before its activation: the
               projections around attention are recomputed too, a third of the matmuls
    'nothing'  nothing; also written True
    'offload'  as 'names', in the memory of the host, which the device copies them to and from
"""

import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax import Array

from vit_jax.array_types import Bool, Float, Int
from vit_jax.errors import UserError, nearest


def attention_weights(
    query: Float[Array, '*B N K'],
    key: Float[Array, '*B M K'],
    mask: Bool[Array, '*#B #N #M'] | None = None,
    bias: Float[Array, '*#B #N #M'] | None = None,
) -> Float[Array, '*B N M']:
    """softmax(Q K^T / sqrt(K) + bias) over the keys (equation 1), in float32 for any input dtype.

    `mask` is true where a query may attend to a key.
    """
    scores = _scores(query, key) / math.sqrt(query.shape[-1])
    if bias is not None:
        scores = scores + bias
        if query.dtype != scores.dtype:
            scores = _round_gradient(scores, query.dtype)
    return masked_softmax(scores, mask)


@jax.custom_jvp
def _scores(query: Array, key: Array) -> Array:
    return jnp.einsum('...nk,...mk->...nm', query, key, preferred_element_type=jnp.float32)


@_scores.defjvp
def _scores_jvp(primals: tuple[Array, Array], tangents: tuple[Array, Array]) -> tuple[Array, Array]:
    # In the dtype of queries and keys: otherwise their gradients would be float32 matmuls of
    # copies of them.
    (query, key), (dquery, dkey) = primals, tangents
    product = functools.partial(jnp.einsum, '...nk,...mk->...nm')
    tangent = product(dquery, key) + product(query, dkey)
    return _scores(query, key), tangent.astype(jnp.float32)


@functools.partial(jax.custom_jvp, nondiff_argnums=(1,))
def _round_gradient(scores: Array, dtype: Any) -> Array:
    """Return the scores [*B N M], with a derivative that is rounded to `dtype`.

    Queries and keys read the rounded derivative. For the bias's gradient, a sum over it, XLA would
    also keep it in float32, the largest array of attention in windows.
    """
    del dtype
    return scores


@_round_gradient.defjvp
def _round_tangent(
    dtype: Any, primals: tuple[Array], tangents: tuple[Array]
) -> tuple[Array, Array]:
    # Without the barrier XLA leaves the rounding out.
    (scores,), (tangent,) = primals, tangents
    return scores, jax.lax.optimization_barrier(tangent.astype(dtype)).astype(tangent.dtype)


def masked_softmax(
    scores: Float[Array, '*B N M'], mask: Bool[Array, '*#B #N #M'] | None = None
) -> Float[Array, '*B N M']:
    """Softmax over the keys where `mask` is true; uniform if all keys are masked, to avoid NaN."""
    if mask is not None:
        scores = jnp.where(mask, scores, jnp.finfo(scores.dtype).min)
    return softmax(scores)


@jax.custom_jvp
def softmax(x: Float[Array, '*B N']) -> Float[Array, '*B N']:
    """Softmax over the last axis, with a derivative that needs only the result.

    Automatic differentiation also keeps the exponentials and their sums, and makes more passes over
    these arrays, the largest of a Transformer.
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
    """Average the values by the weights, in the dtype of the values."""
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
    """softmax(Q K^T) V, Luong's `dot`; with keys W h, Luong's `general`."""
    weights = masked_softmax(_scores(query, key), mask)
    return attend(weights, value), weights


def additive(
    query: Float[Array, '*B N K'],
    key: Float[Array, '*B M K'],
    value: Float[Array, '*B M D'],
    v: Float[Array, 'K'],
    mask: Bool[Array, '*#B #N #M'] | None = None,
) -> tuple[Float[Array, '*B N D'], Float[Array, '*B N M']]:
    """softmax(v^T tanh(q + k)) V of Bahdanau et al., for queries W s and keys U h.

    The caller projects the keys, which are the same at every step of a decoder.
    """
    hidden = jnp.tanh(query[..., :, None, :] + key[..., None, :, :])
    scores = jnp.einsum('...k,k->...', hidden, v, preferred_element_type=jnp.float32)
    weights = masked_softmax(scores, mask)
    return attend(weights, value), weights


class Segments(NamedTuple):
    """Sequence numbers of tokens in rows of several sequences: queries attend within theirs.

    Sequences are numbered from 1; 0 is padding, which attends to padding only. For a row of a
    single sequence the numbers are the mask of its tokens.

    Attributes:
      query: Sequence of each query.
      key: Sequence of each key.
    """

    query: Int[Array, '*B N']
    key: Int[Array, '*B M']

    def mask(self) -> Bool[Array, '*B 1 N M']:
        """Make a mask that is true where a query may attend to a key, for all heads."""
        return (self.query[..., :, None] == self.key[..., None, :])[..., None, :, :]


class AttentionSpec(NamedTuple):
    """Sizes and masks of a layer's attention, from which its implementation is chosen.

    Attributes:
      shape: Shape of the queries, [B N D].
      keys: M.
      num_heads: H.
      dtype: Name of the type of queries, keys and values.
      layout: Number of queries, keys and values in each array, see `fused_attention`.
      masked, segmented, causal: Whether there is such a mask.
      rate: Share of weights that are dropped.
      mask_queries: Whether the mask differs between queries or heads, instead of [B 1 1 M].
      bias_rows: First size of the bias of the scores; 0 without a bias.
    """

    shape: tuple[int, ...]
    keys: int
    num_heads: int
    dtype: str
    layout: tuple[int, ...] = (3,)
    masked: bool = False
    segmented: bool = False
    causal: bool = False
    rate: float = 0.0
    mask_queries: bool = False
    bias_rows: int = 0


# Added to the score of two tokens that are in one window only because of its shift.
APART = -100.0


class WindowSpec(NamedTuple):
    """Sizes of a layer's attention in windows, from which its implementation is chosen.

    Attributes:
      shape: Shape of the tokens, [B W N D].
      num_heads: H.
      dtype: Name of the type of queries, keys and values.
      shifted: Whether some tokens of a window are not neighbors in the map.
      rate: Share of weights that are dropped.
    """

    shape: tuple[int, ...]
    num_heads: int
    dtype: str
    shifted: bool
    rate: float = 0.0


def padding_mask(tokens: Int[Array, 'B M'], pad: int = 0) -> Bool[Array, 'B 1 1 M']:
    """Make a mask that is true where a token is not padding, for all heads and queries."""
    return (tokens != pad)[:, None, None]


def causal_mask(tokens: int) -> Bool[Array, '1 1 N N']:
    """Make a mask that is true where the key does not come after the query."""
    return jnp.tril(jnp.ones((1, 1, tokens, tokens), bool))


def both(mask: Array | None, other: Array) -> Array:
    """Intersect two masks; without a first one, return the other."""
    return other if mask is None else mask & other


ATTENDED, HIDDEN = 'attended', 'hidden'  # arrays that `remat='names'` keeps
_policies = jax.checkpoint_policies
# The first keeps most.
POLICIES: dict[str, Callable[..., Any]] = {
    'dots': _policies.dots_with_no_batch_dims_saveable,
    'names': _policies.save_only_these_names(ATTENDED, HIDDEN),
    'nothing': _policies.nothing_saveable,
}
OFFLOAD = {
    'offload': _policies.save_and_offload_only_these_names(
        names_which_can_be_saved=[],
        names_which_can_be_offloaded=[ATTENDED, HIDDEN],
        offload_src='device',
        offload_dst='pinned_host',
    )
}


def check_remat(remat: bool | str) -> None:
    """Raise UserError unless `remat` is a bool or one of POLICIES and OFFLOAD."""
    names = (*POLICIES, *OFFLOAD)
    if not isinstance(remat, bool) and remat not in names:
        raise UserError(nearest('remat', str(remat), ['False', 'True', *names]))


def recompute_in_backward(apply: Callable, remat: bool | str, **options: Any) -> Callable:
    """Wrap a function of a module and arrays to recompute values in the backward pass.

    Args:
      apply: Function to wrap.
      remat: Values to keep, see the module's docstring.
      options: Further arguments of `nn.remat`.
    """
    if remat is False:
        return apply
    policy = (POLICIES | OFFLOAD)['nothing' if remat is True else remat]
    return nn.remat(apply, policy=policy, **options)
