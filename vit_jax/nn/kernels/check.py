"""Numerical checks of the attention kernels against XLA's attention.

They run on the device that is about to run the kernel: both compute the result and the gradients of
a few random rows with the shapes, dtype and masks of the layer. A check compiles and runs one small
program for each kind of layer in a process.
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
    AttentionSpec,
    Segments,
    WindowSpec,
    attend,
    attention_weights,
    causal_mask,
)

_log = logging.getLogger(__name__)
ROWS = 2
# Relative to the largest value of an array. In bfloat16 the two differ by less than a fifth of it
# (`tests/nn/test_attention_check.py`); a wrong row, mask or scale exceeds it many times over.
TOLERANCE = 0.03

Measure = Callable[[Callable[[], float]], float]
_failures: dict[Hashable, str] = {}


def numerical_failure(spec: AttentionSpec, block: int, measure: Measure) -> str:
    """The reason not to trust the kernel with a layer; empty if it passes.

    Args:
      spec: of the layer.
      block: see `kernels.attention.fused_attention`.
      measure: see `attention_choice.Devices`.
    """
    spec = spec._replace(shape=(ROWS, *spec.shape[1:]))
    (_, queries, width), keys = spec.shape, spec.keys
    layer = f'{queries} queries, {keys} keys, width {width}, {spec.num_heads} heads, {spec.dtype}'
    return checked_once((spec, block), layer, lambda: largest_difference(spec, block), measure)


def checked_once(
    key: Hashable, layer: str, difference: Callable[[], float], measure: Measure
) -> str:
    """`numerical_failure` of any kernel; measured once in a process, the difference is logged.

    Args:
      key: of this kind of layer.
      layer: its sizes, for people.
      difference: of the kernel from XLA, as from `relative_difference`.
      measure: see `attention_choice.Devices`.
    """
    if key not in _failures:
        _failures[key] = _measured(layer, difference, measure)
    return _failures[key]


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
    if found > TOLERANCE:
        by = f'differs from the attention of XLA by up to {found:.2%} for {layer}'
        return f'{by}, more than {TOLERANCE:.0%}'
    _log.warning('an attention kernel is used: within %.2f%% of XLA for %s', 100 * found, layer)
    return ''


def numerical_failure_of_cudnn(spec: AttentionSpec, measure: Measure) -> str:
    """`numerical_failure` of cuDNN's kernel."""
    spec = spec._replace(shape=(ROWS, *spec.shape[1:]))
    (_, queries, width), keys = spec.shape, spec.keys
    layer = f'{queries} queries, {keys} keys, width {width}, {spec.num_heads} heads, {spec.dtype}'
    return checked_once((spec, 'cudnn'), layer, lambda: largest_cudnn_difference(spec), measure)


def largest_difference(spec: AttentionSpec, block: int = 0) -> float:
    """The largest difference of results or gradients, relative to the largest value of each array.

    NaN if any value is NaN.
    """
    from vit_jax.nn.kernels.attention import fused_attention

    def by_kernel(projected: Any, mask: Any, segments: Any, kept: Any) -> Array:
        options = (spec.causal, spec.rate, block)
        return fused_attention(projected, spec.num_heads, mask, segments, kept, *options)

    def by_xla(projected: Any, mask: Any, segments: Any, kept: Any) -> Array:
        seen = None if mask is None else mask[:, None, None]
        return _plain(spec, projected, seen, segments, kept)

    return relative_difference(by_kernel, by_xla, lambda: _inputs(spec))


def largest_cudnn_difference(spec: AttentionSpec, implementation: Any = 'cudnn') -> float:
    """`largest_difference` of cuDNN's kernel, also of the bias's gradient.

    `implementation` is that of `kernels.cudnn.fused_attention`.
    """
    from vit_jax.nn.kernels.cudnn import fused_attention

    def by_kernel(first: Any, mask: Any, segments: Any) -> Array:
        projected, bias = first
        options = (spec.num_heads, _spread(spec, mask), segments, bias, spec.causal)
        return fused_attention(projected, *options, implementation)

    def by_xla(first: Any, mask: Any, segments: Any) -> Array:
        projected, bias = first
        return _plain(spec, projected, _spread(spec, mask), segments, None, bias)

    def inputs() -> tuple[Any, ...]:
        projected, grad, mask, segments, _ = _inputs(spec)
        sizes = (1, spec.num_heads, spec.shape[1], spec.keys)
        bias = jax.random.normal(jax.random.key(1), sizes) if spec.bias_rows else None
        return (projected, bias), grad, mask, segments

    return relative_difference(by_kernel, by_xla, inputs)


def _spread(spec: AttentionSpec, mask: Array | None) -> Array | None:
    """A mask of keys [B M] in the shape that the layer has."""
    if mask is None:
        return None
    queries = spec.shape[1] if spec.mask_queries else 1
    return jnp.broadcast_to(mask[:, None, None], (len(mask), 1, queries, mask.shape[1]))


def relative_difference(
    kernel: Callable[..., Array], xla: Callable[..., Array], inputs: Callable[[], tuple[Any, ...]]
) -> float:
    """The largest relative difference of two functions, as in `largest_difference`.

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


def _inputs(spec: AttentionSpec) -> tuple[Any, ...]:
    """Random projections and a gradient of the result; mask, segments and kept weights, if any."""
    (rows, queries, width), keys = spec.shape, spec.keys
    first, second, third = jax.random.split(jax.random.key(0), 3)

    def normal(key: Array, tokens: int, columns: int) -> Array:
        return jax.random.normal(key, (rows, tokens, columns)).astype(spec.dtype)

    projected = tuple(
        normal(jax.random.fold_in(first, i), keys if i else queries, n * width)
        for i, n in enumerate(spec.layout)
    )
    # The last row of keys is as long as it can be, others are shorter.
    last = keys - keys // 3 * jnp.arange(rows)[::-1, None]
    mask = jnp.arange(keys) < last if spec.masked else None
    segments = None
    if spec.segmented:
        segments = Segments(
            *(1 + 3 * jnp.arange(n)[None].repeat(rows, 0) // n for n in (queries, keys))
        )
    kept = None
    if spec.rate:
        weights = (rows, spec.num_heads, queries, keys)
        kept = jax.random.bernoulli(third, 1 - spec.rate, weights)
    return projected, normal(second, queries, width), mask, segments, kept


def _plain(
    spec: AttentionSpec, projected: Any, mask: Any, segments: Any, kept: Any, bias: Any = None
) -> Array:
    """`fused_attention` by the functions of `nn/attention.py`; `mask` is true where it attends."""
    width = spec.shape[-1]
    parts = [y for x in projected for y in jnp.split(x, x.shape[-1] // width, axis=-1)]
    query, key, value = (x.reshape(*x.shape[:2], spec.num_heads, -1).swapaxes(1, 2) for x in parts)
    masks = [] if mask is None else [mask]
    masks += [] if segments is None else [segments.mask()]
    masks += [causal_mask(query.shape[-2])] if spec.causal else []
    seen = masks[0] if masks else None
    for other in masks[1:]:
        seen = seen & other
    weights = attention_weights(query, key, seen, bias)
    if kept is not None:
        weights = jnp.where(kept, weights / (1 - spec.rate), 0.0)
    out = attend(weights, value).swapaxes(1, 2)
    return out.reshape(*out.shape[:2], width)


MIB = 2**20
MOST_WINDOWS = 8  # of an example of the check


def vmem_shortage(spec: WindowSpec, limit: float) -> str:
    """The reason why the kernel does not fit `limit` bytes of VMEM; empty if it does."""
    from vit_jax.nn.kernels.windows import vmem_bytes, windows_per_program

    _, windows, tokens, width = spec.shape
    itemsize = jnp.dtype(spec.dtype).itemsize
    program = windows_per_program(windows, tokens, width, itemsize)
    needed = vmem_bytes(program, tokens, width, spec.num_heads, itemsize)
    if needed <= limit:
        return ''
    sizes = f'{needed / MIB:.0f} of {limit / MIB:.0f} MiB'
    return f'keeps windows in VMEM: {tokens} tokens of width {width} need {sizes}'


def numerical_failure_in_windows(spec: WindowSpec, measure: Measure) -> str:
    """`numerical_failure` of the kernel for windows."""
    _, windows, tokens, width = spec.shape
    spec = spec._replace(shape=(ROWS, min(windows, MOST_WINDOWS), tokens, width))
    layer = f'windows of {tokens} tokens, width {width}, {spec.num_heads} heads, {spec.dtype}'
    return checked_once(spec, layer, lambda: largest_window_difference(spec), measure)


def largest_window_difference(spec: WindowSpec) -> float:
    """`largest_difference` of the kernel for windows."""
    from vit_jax.nn.kernels.windows import window_attention

    def by_kernel(first: Any, regions: Any) -> Array:
        qkv, bias = first
        return window_attention(qkv, bias, regions)

    def by_xla(first: Any, regions: Any) -> Array:
        qkv, bias = first
        return _plain_windows(spec, qkv, bias, regions)

    return relative_difference(by_kernel, by_xla, lambda: _window_inputs(spec))


def _window_inputs(spec: WindowSpec) -> tuple[Any, ...]:
    """(Projections, bias), a gradient of the result, and regions, if any."""
    (_, windows, tokens, width), heads = spec.shape, spec.num_heads
    first, second, third = jax.random.split(jax.random.key(0), 3)
    qkv = jax.random.normal(first, (*spec.shape[:3], 3 * width)).astype(spec.dtype)
    bias = jax.random.normal(second, (heads, tokens, tokens))
    grad = jax.random.normal(third, spec.shape).astype(spec.dtype)
    # The first window is whole, the others are cut after some of their tokens.
    cut = jnp.arange(tokens) < jnp.arange(windows)[:, None] * tokens // (2 * windows)
    return (qkv, bias), grad, cut.astype(jnp.int32) if spec.shifted else None


def _plain_windows(spec: WindowSpec, qkv: Array, bias: Array, regions: Array | None) -> Array:
    """`window_attention` by the functions of `nn/attention.py`."""
    query, key, value = (
        x.reshape(*x.shape[:3], spec.num_heads, -1).swapaxes(2, 3)
        for x in jnp.split(qkv, 3, axis=-1)
    )
    if regions is not None:
        apart = regions[:, None, :, None] != regions[:, None, None, :]
        bias = bias + jnp.where(apart, APART, 0.0)
    out = attend(attention_weights(query, key, bias=bias), value).swapaxes(2, 3)
    return out.reshape(*out.shape[:3], -1)
