"""A check of the attention kernel on the device that is about to run it, against XLA's attention.

Both compute the result and the gradients of a few random rows with the shapes, dtype and masks of
the layer. The check compiles and runs one small program for each kind of layer.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Hashable
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from vit_jax.array_types import Float
from vit_jax.errors import one_line
from vit_jax.nn.attention import (
    APART,
    Call,
    Segments,
    WindowCall,
    attend,
    attention_weights,
    causal_mask,
)

_log = logging.getLogger(__name__)
ROWS = 2
# Of the largest value of an array. In bfloat16 the two differ by less than a fifth of it, as
# `tests/nn/test_attention_check.py` finds; a wrong row, mask or scale exceeds it many times over.
TOLERANCE = 0.03

Measure = Callable[[Callable[[], float]], float]
_doubts: dict[Hashable, str] = {}


def doubt(call: Call, block: int, measure: Measure) -> str:
    """The reason why the kernel is not trusted with a layer; empty if it is.

    Args:
      call: of the layer.
      block: see `attention_kernel.fused_attention`.
      measure: see `attention_choice.Devices`.
    """
    call = call._replace(shape=(ROWS, *call.shape[1:]))
    (_, queries, width), keys = call.shape, call.keys
    layer = f'{queries} queries, {keys} keys, width {width}, {call.num_heads} heads, {call.dtype}'
    return doubt_of((call, block), layer, lambda: largest_difference(call, block), measure)


def doubt_of(key: Hashable, layer: str, difference: Callable[[], float], measure: Measure) -> str:
    """`doubt` of any kernel, measured once in a process, with its largest difference logged.

    Args:
      key: of this kind of layer.
      layer: its sizes, for people.
      difference: of the kernel from XLA, as from `relative_difference`.
      measure: see `attention_choice.Devices`.
    """
    if key not in _doubts:
        _doubts[key] = _measured(layer, difference, measure)
    return _doubts[key]


def _measured(layer: str, difference: Callable[[], float], measure: Measure) -> str:
    failures = []

    def own() -> float:
        try:
            found = difference()
        except Exception as e:  # of the compiler, too
            failures.append(one_line(str(e)))
            return float('inf')
        return found if found == found else float('inf')

    found = measure(own)
    if failures:
        return f'fails on this device for {layer}: {failures[0]}'
    text = f'differs from the attention of XLA by up to {found:.2%} for {layer}'
    if found > TOLERANCE:
        return f'{text}, more than {TOLERANCE:.0%}'
    _log.warning('the attention kernel %s', text)
    return ''


def largest_difference(call: Call, block: int = 0) -> float:
    """The largest difference of results or gradients, as a share of the largest value of each.

    NaN if any value is.
    """
    from vit_jax.nn.kernels.attention import fused_attention

    def by_kernel(projected: Any, mask: Any, segments: Any, kept: Any) -> Array:
        options = (call.causal, call.rate, block)
        return fused_attention(projected, call.num_heads, mask, segments, kept, *options)

    def by_xla(projected: Any, mask: Any, segments: Any, kept: Any) -> Array:
        return _plain(call, projected, mask, segments, kept)

    return relative_difference(by_kernel, by_xla, lambda: _inputs(call))


def relative_difference(
    kernel: Callable[..., Array], xla: Callable[..., Array], inputs: Callable[[], tuple[Any, ...]]
) -> float:
    """The largest difference of two functions, as `largest_difference`.

    Args:
      kernel, xla: the functions.
      inputs: returns their first argument, by which they are differentiated, the gradient of the
        result, and their other arguments.
    """

    @jax.jit
    def difference() -> Array:
        first, grad, *others = inputs()
        pairs = zip(*(_with_gradients(f, first, grad, *others) for f in (kernel, xla)), strict=True)
        return jnp.stack([jnp.abs(a - b).max() / jnp.abs(b).max() for a, b in pairs]).max()

    return float(difference())


def _with_gradients(
    function: Callable[..., Array], first: Any, grad: Array, *others: Any
) -> list[Float[Array, '...']]:
    out, pull = jax.vjp(lambda x: function(x, *others), first)
    return [x.astype(jnp.float32) for x in (out, *jax.tree.leaves(pull(grad)))]


def _inputs(call: Call) -> tuple[Any, ...]:
    """Random projections and a gradient of the result; mask, segments and kept weights, if any."""
    (rows, queries, width), keys = call.shape, call.keys
    first, second, third = jax.random.split(jax.random.key(0), 3)

    def normal(key: Array, tokens: int, columns: int) -> Array:
        return jax.random.normal(key, (rows, tokens, columns)).astype(call.dtype)

    projected = tuple(
        normal(jax.random.fold_in(first, i), keys if i else queries, n * width)
        for i, n in enumerate(call.layout)
    )
    # The last row of keys is as long as it can be, others are shorter.
    last = keys - keys // 3 * jnp.arange(rows)[::-1, None]
    mask = jnp.arange(keys) < last if call.masked else None
    segments = None
    if call.segmented:
        segments = Segments(
            *(1 + 3 * jnp.arange(n)[None].repeat(rows, 0) // n for n in (queries, keys))
        )
    kept = None
    if call.rate:
        weights = (rows, call.num_heads, queries, keys)
        kept = jax.random.bernoulli(third, 1 - call.rate, weights)
    return projected, normal(second, queries, width), mask, segments, kept


def _plain(call: Call, projected: Any, mask: Any, segments: Any, kept: Any) -> Array:
    """`fused_attention` by the functions of `nn/attention.py`."""
    width = call.shape[-1]
    parts = [y for x in projected for y in jnp.split(x, x.shape[-1] // width, axis=-1)]
    query, key, value = (x.reshape(*x.shape[:2], call.num_heads, -1).swapaxes(1, 2) for x in parts)
    masks = [] if mask is None else [mask[:, None, None]]
    masks += [] if segments is None else [segments.mask()]
    masks += [causal_mask(query.shape[-2])] if call.causal else []
    seen = masks[0] if masks else None
    for other in masks[1:]:
        seen = seen & other
    weights = attention_weights(query, key, seen)
    if kept is not None:
        weights = jnp.where(kept, weights / (1 - call.rate), 0.0)
    out = attend(weights, value).swapaxes(1, 2)
    return out.reshape(*out.shape[:2], width)


MIB = 2**20
MOST_WINDOWS = 8  # of an example of the check


def excess(call: WindowCall, limit: float) -> str:
    """The reason why the kernel does not fit `limit` bytes of VMEM; empty if it does."""
    from vit_jax.nn.kernels.windows import program_of, vmem_bytes

    _, windows, tokens, width = call.shape
    itemsize = jnp.dtype(call.dtype).itemsize
    program = program_of(windows, tokens, width, itemsize)
    needed = vmem_bytes(program, tokens, width, call.num_heads, itemsize)
    if needed <= limit:
        return ''
    sizes = f'{needed / MIB:.0f} of {limit / MIB:.0f} MiB'
    return f'keeps windows in VMEM: {tokens} tokens of width {width} need {sizes}'


def window_doubt(call: WindowCall, measure: Measure) -> str:
    """See `attention_check.doubt`."""
    _, windows, tokens, width = call.shape
    call = call._replace(shape=(ROWS, min(windows, MOST_WINDOWS), tokens, width))
    layer = f'windows of {tokens} tokens, width {width}, {call.num_heads} heads, {call.dtype}'
    return doubt_of(call, layer, lambda: largest_window_difference(call), measure)


def largest_window_difference(call: WindowCall) -> float:
    """See `attention_check.largest_difference`."""
    from vit_jax.nn.kernels.windows import window_attention

    def by_kernel(first: Any, regions: Any) -> Array:
        qkv, bias = first
        return window_attention(qkv, bias, regions)

    def by_xla(first: Any, regions: Any) -> Array:
        qkv, bias = first
        return _plain_windows(call, qkv, bias, regions)

    return relative_difference(by_kernel, by_xla, lambda: _window_inputs(call))


def _window_inputs(call: WindowCall) -> tuple[Any, ...]:
    """(Projections, bias), a gradient of the result, and regions, if any."""
    (_, windows, tokens, width), heads = call.shape, call.num_heads
    first, second, third = jax.random.split(jax.random.key(0), 3)
    qkv = jax.random.normal(first, (*call.shape[:3], 3 * width)).astype(call.dtype)
    bias = jax.random.normal(second, (heads, tokens, tokens))
    grad = jax.random.normal(third, call.shape).astype(call.dtype)
    # The first window is whole, the others are cut after some of their tokens.
    cut = jnp.arange(tokens) < jnp.arange(windows)[:, None] * tokens // (2 * windows)
    return (qkv, bias), grad, cut.astype(jnp.int32) if call.shifted else None


def _plain_windows(call: WindowCall, qkv: Array, bias: Array, regions: Array | None) -> Array:
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
