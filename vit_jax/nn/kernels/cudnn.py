"""Attention as one GPU kernel of cuDNN, by `jax.nn.dot_product_attention`.

The scores never leave the chip's shared memory, and the backward pass recomputes the probabilities
(Dao et al., 2022, arXiv:2205.14135). JAX refuses odd numbers of tokens, so these are padded by one
token that the lengths of the sequences leave out.
"""

from __future__ import annotations

from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax import Array

from vit_jax.array_types import Bool, Float
from vit_jax.nn.attention import Segments


def fused_attention(
    projected: tuple[Float[Array, 'B _ _'], ...],
    num_heads: int,
    mask: Bool[Array, 'B #H #N M'] | None = None,
    segments: Segments | None = None,
    bias: Float[Array, '1 #H #N M'] | None = None,
    causal: bool = False,
    implementation: Literal['cudnn', 'xla'] = 'cudnn',
) -> Float[Array, 'B N D']:
    """softmax(Q K^T / sqrt(K) + bias) V of every head, with the softmax in float32.

    Args:
      projected: Queries, keys and values as `kernels.attention.fused_attention` takes them.
      num_heads: H; divides D.
      mask: True where a query may attend to a key.
      segments: Sequences that share a row; a query attends only to keys of its sequence.
      bias: Added to the scores.
      causal: Whether a query attends to no keys after its own position.
      implementation: `xla` computes the same on any device.
    """
    width = sum(x.shape[-1] for x in projected) // 3
    parts = [x for columns in projected for x in jnp.split(columns, columns.shape[-1] // width, -1)]
    query, key, value = (x.reshape(*x.shape[:2], num_heads, -1) for x in parts)
    rows, queries, keys = len(query), query.shape[1], key.shape[1]
    if segments is not None:
        mask_of_segments = segments.mask()
        mask = mask_of_segments if mask is None else mask & mask_of_segments
    if mask is not None:
        # JAX does not spread a mask over the queries: github.com/jax-ml/jax/issues/28974.
        mask = _even(jnp.broadcast_to(mask, (*mask.shape[:2], queries, keys)), 2, 3)
    if bias is not None:
        bias = jnp.broadcast_to(bias, (1, num_heads, queries, keys)).astype(query.dtype)
        bias = _even(bias, 2, 3)
    lengths: dict[str, Any] = {}
    if queries % 2 or keys % 2:
        sizes = {'query_seq_lengths': queries, 'key_value_seq_lengths': keys}
        lengths = {name: jnp.full((rows,), n, jnp.int32) for name, n in sizes.items()}
    output = jax.nn.dot_product_attention(
        _even(query, 1),
        _even(key, 1),
        _even(value, 1),
        bias,
        mask,
        is_causal=causal,
        implementation=implementation,
        **lengths,
    )
    return output[:, :queries].reshape(rows, queries, width)


def _even(x: Array, *axes: int) -> Array:
    """Return an array with a last row of zeros along those axes whose size is odd."""
    if not any(x.shape[axis] % 2 for axis in axes):
        return x
    return jnp.pad(x, [(0, n % 2 if axis in axes else 0) for axis, n in enumerate(x.shape)])
