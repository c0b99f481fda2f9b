"""Whether the kernel of attention in windows fits a device, and computes the same there as XLA."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from vit_jax.nn import attention_check
from vit_jax.nn.attention import APART, WindowCall, attend, attention_weights
from vit_jax.nn.attention_check import ROWS, Measure

MIB = 2**20
MOST_WINDOWS = 8  # of an example of the check


def excess(call: WindowCall, limit: float) -> str:
    """The reason why the kernel does not fit `limit` bytes of VMEM; empty if it does."""
    from vit_jax.nn.window_kernel import program_of, vmem_bytes

    _, windows, tokens, width = call.shape
    itemsize = jnp.dtype(call.dtype).itemsize
    program = program_of(windows, tokens, width, itemsize)
    needed = vmem_bytes(program, tokens, width, call.num_heads, itemsize)
    if needed <= limit:
        return ''
    sizes = f'{needed / MIB:.0f} of {limit / MIB:.0f} MiB'
    return f'keeps windows in VMEM: {tokens} tokens of width {width} need {sizes}'


def doubt(call: WindowCall, measure: Measure) -> str:
    """See `attention_check.doubt`."""
    _, windows, tokens, width = call.shape
    call = call._replace(shape=(ROWS, min(windows, MOST_WINDOWS), tokens, width))
    layer = f'windows of {tokens} tokens, width {width}, {call.num_heads} heads, {call.dtype}'
    return attention_check.doubt_of(call, layer, lambda: largest_difference(call), measure)


def largest_difference(call: WindowCall) -> float:
    """See `attention_check.largest_difference`."""
    from vit_jax.nn.window_kernel import window_attention

    def by_kernel(first: Any, regions: Any) -> Array:
        qkv, bias = first
        return window_attention(qkv, bias, regions)

    def by_xla(first: Any, regions: Any) -> Array:
        qkv, bias = first
        return _plain(call, qkv, bias, regions)

    return attention_check.relative_difference(by_kernel, by_xla, lambda: _inputs(call))


def _inputs(call: WindowCall) -> tuple[Any, ...]:
    """(Projections, bias), a gradient of the result, and regions, if any."""
    (_, windows, tokens, width), heads = call.shape, call.num_heads
    first, second, third = jax.random.split(jax.random.key(0), 3)
    qkv = jax.random.normal(first, (*call.shape[:3], 3 * width)).astype(call.dtype)
    bias = jax.random.normal(second, (heads, tokens, tokens))
    grad = jax.random.normal(third, call.shape).astype(call.dtype)
    # The first window is whole, the others are cut after some of their tokens.
    cut = jnp.arange(tokens) < jnp.arange(windows)[:, None] * tokens // (2 * windows)
    return (qkv, bias), grad, cut.astype(jnp.int32) if call.shifted else None


def _plain(call: WindowCall, qkv: Array, bias: Array, regions: Array | None) -> Array:
    """`window_attention` by the functions of `nn/attention.py`."""
    query, key, value = (
        x.reshape(*x.shape[:3], call.num_heads, -1).swapaxes(2, 3)
        for x in jnp.split(qkv, 3, axis=-1)
    )
    if regions is not None:
        apart = regions[:, None, :, None] != regions[:, None, None, :]
        bias = bias + jnp.where(apart, APART, 0.0)
    out = attend(attention_weights(query, key, bias=bias), value).swapaxes(2, 3)
    return out.reshape(*out.shape[:3], -1)
