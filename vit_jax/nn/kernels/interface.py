"""Kernels of attention behind one interface: `kernel.attend(spec, inputs)`.

Modules of kernels are imported when one is used, since Pallas takes a second to import.
"""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

import jax.numpy as jnp
from jax import Array

from vit_jax.array_types import Bool, Float, Int
from vit_jax.nn.attention import (
    APART,
    AttentionSpec,
    Segments,
    WindowSpec,
    attend,
    attention_weights,
    both,
    causal_mask,
)


class Inputs(NamedTuple):
    """What a kernel reads. The first axis of all arrays but `regions` counts the rows.

    Attributes:
      projected: Arrays whose columns, one array after the other, are queries, keys and values, D
        columns each, and within these the heads, K columns each.
      mask: True where a query may attend to a key; may be [1 ...] for all rows.
      segments: Sequences that share a row; a query attends only to keys of its sequence.
      bias: Added to the scores, the same for all rows.
      keep_mask: True for weights that dropout keeps; None without dropout.
      regions: Number of each token in windows; APART is added to the scores of tokens of
        different ones.
    """

    projected: tuple[Float[Array, 'B *N _'], ...]
    mask: Bool[Array, '_ _ _ M'] | None = None
    segments: Segments | None = None
    bias: Float[Array, '*_ N M'] | None = None
    keep_mask: Bool[Array, 'B H N M'] | None = None
    regions: Int[Array, 'W N'] | None = None


@dataclasses.dataclass(frozen=True)
class Pallas:
    """Kernel of TPUs; `block` queries in a program, 0 for all."""

    block: int = 0
    name = 'pallas'
    packed = True  # reads projections of one input side by side

    def attend(self, spec: AttentionSpec, x: Inputs) -> Float[Array, 'B N D']:
        from vit_jax.nn.kernels.attention import fused_attention

        mask = None if x.mask is None else x.mask[:, 0, 0]
        masks, options = (mask, x.segments, x.keep_mask), (spec.causal, spec.rate, self.block)
        return fused_attention(x.projected, spec.num_heads, *masks, *options)


@dataclasses.dataclass(frozen=True)
class Cudnn:
    """Kernel of NVIDIA GPUs."""

    name = 'cudnn'
    packed = False  # it would read copies of the parts of an array

    def attend(self, spec: AttentionSpec, x: Inputs) -> Float[Array, 'B N D']:
        from vit_jax.nn.kernels.cudnn import fused_attention

        masks = (x.mask, x.segments, x.bias)
        return fused_attention(x.projected, spec.num_heads, *masks, spec.causal)


@dataclasses.dataclass(frozen=True)
class PallasWindows:
    """Kernel of TPUs for attention in windows."""

    name = 'pallas'
    packed = True

    def attend(self, spec: WindowSpec, x: Inputs) -> Float[Array, 'B W N D']:
        from vit_jax.nn.kernels.windows import window_attention

        del spec
        (qkv,) = x.projected
        assert x.bias is not None
        return window_attention(qkv, x.bias, x.regions)


Kernel = Pallas | Cudnn | PallasWindows


def attend_plainly(spec: AttentionSpec | WindowSpec, x: Inputs) -> Float[Array, 'B *N D']:
    """What every kernel computes, by the functions of `nn/attention.py`, on any device."""
    width = spec.shape[-1]
    parts = [
        y for columns in x.projected for y in jnp.split(columns, columns.shape[-1] // width, -1)
    ]
    query, key, value = (
        y.reshape(*y.shape[:-1], spec.num_heads, -1).swapaxes(-3, -2) for y in parts
    )
    bias = x.bias
    if bias is not None and x.regions is not None:
        differs = x.regions[:, None, :, None] != x.regions[:, None, None, :]
        bias = bias + jnp.where(differs, APART, 0.0)
    mask = x.mask if x.segments is None else both(x.mask, x.segments.mask())
    if isinstance(spec, AttentionSpec) and spec.causal:
        mask = both(mask, causal_mask(query.shape[-2]))
    weights = attention_weights(query, key, mask, bias)
    if x.keep_mask is not None:
        weights = jnp.where(x.keep_mask, weights / (1 - spec.rate), 0.0)
    out = attend(weights, value).swapaxes(-3, -2)
    return out.reshape(*out.shape[:-2], width)
