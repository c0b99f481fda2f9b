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
from vit_jax.nn import device
from vit_jax.nn.attention import AttentionSpec, Segments, WindowSpec
from vit_jax.nn.kernels.interface import Inputs, Kernel, attend_plainly

_log = logging.getLogger(__name__)
ROWS = 2
MOST_WINDOWS = 8  # of an example of the check
# Relative to the largest value of an array. In bfloat16 the two differ by less than a fifth of it
# (`tests/nn/test_attention_check.py`); a wrong row, mask or scale exceeds it many times over.
TOLERANCE = 0.03

Spec = AttentionSpec | WindowSpec
_failures: dict[Hashable, str] = {}


def failure(kernel: Kernel, spec: Spec, kind: str, devices: int = 1) -> str:
    """Return why a kernel fails on a layer; empty if it passes or cannot be tried here.

    A process tries it once for each kind of layer, and logs the difference.

    Args:
      kernel: The kernel.
      spec: Layer to check.
      kind: JAX's name of the kind of device that the program will run on.
      devices: Their number; see `device.measure`.
    """
    accelerator = device.local_accelerator(kind)
    if accelerator is None:
        return ''
    spec = _small(spec)
    if (kernel, spec) not in _failures:
        _failures[kernel, spec] = _measure(kernel, spec, accelerator, devices)
    return _failures[kernel, spec]


def _small(spec: Spec) -> Spec:
    """Return the layer with as many rows and windows as the check has."""
    if isinstance(spec, AttentionSpec):
        return spec._replace(shape=(ROWS, *spec.shape[1:]))
    _, windows, *remaining = spec.shape
    return spec._replace(shape=(ROWS, min(windows, MOST_WINDOWS), *remaining))


def _measure(kernel: Kernel, spec: Spec, accelerator: jax.Device, devices: int) -> str:
    failures = []

    def difference() -> float:
        try:
            difference_found = largest_difference(kernel, spec)
        except Exception as e:  # of the compiler, too
            failures.append(one_line(str(e)))
            return float('inf')
        return difference_found if difference_found == difference_found else float('inf')

    difference_found = device.measure(difference, accelerator, devices)
    layer = _describe(spec)
    if failures:
        return f'fails on this device for {layer}: {failures[0]}'
    if difference_found > TOLERANCE:
        by = f'differs from the attention of XLA by up to {difference_found:.2%} for {layer}'
        return f'{by}, more than {TOLERANCE:.0%}'
    _log.warning(
        'an attention kernel is used: within %.2f%% of XLA for %s', 100 * difference_found, layer
    )
    return ''


def _describe(spec: Spec) -> str:
    tokens, width = spec.shape[-2:]
    remaining = f'width {width}, {spec.num_heads} heads, {spec.dtype}'
    if isinstance(spec, WindowSpec):
        return f'windows of {tokens} tokens, {remaining}'
    return f'{tokens} queries, {spec.keys} keys, {remaining}'


def largest_difference(kernel: Kernel, spec: Spec) -> float:
    """Return the largest error of results or gradients, relative to each array's maximum.

    NaN if any value is NaN.
    """

    @jax.jit
    def difference() -> Array:
        inputs, grad = _window_sample(spec) if isinstance(spec, WindowSpec) else _sample(spec)
        pairs = zip(
            *(_with_gradients(f, spec, inputs, grad) for f in (kernel.attend, attend_plainly)),
            strict=True,
        )
        return jnp.stack([jnp.abs(a - b).max() / jnp.abs(b).max() for a, b in pairs]).max()

    return float(difference())


def _with_gradients(
    function: Callable[..., Array], spec: Spec, inputs: Inputs, grad: Array
) -> list[Float[Array, '...']]:
    """Return the result, and the gradients of projections and bias."""

    def apply(projected: Any, bias: Any) -> Array:
        return function(spec, inputs._replace(projected=projected, bias=bias))

    out, pull = jax.vjp(apply, inputs.projected, inputs.bias)
    return [x.astype(jnp.float32) for x in (out, *jax.tree.leaves(pull(grad)))]


def _sample(spec: AttentionSpec) -> tuple[Inputs, Array]:
    """Random inputs and a gradient of the result."""
    (rows, queries, width), keys = spec.shape, spec.keys
    first, second, third = jax.random.split(jax.random.key(0), 3)

    def normal(key: Array, tokens: int, columns: int) -> Array:
        return jax.random.normal(key, (rows, tokens, columns)).astype(spec.dtype)

    projected = tuple(
        normal(jax.random.fold_in(first, i), keys if i else queries, n * width)
        for i, n in enumerate(spec.layout)
    )
    mask, segments, keep_mask, bias = None, None, None, None
    if spec.masked:
        # The last row of keys is as long as it can be, others are shorter.
        last = keys - keys // 3 * jnp.arange(rows)[::-1, None]
        mask = (jnp.arange(keys) < last)[:, None, None]
        spread = (rows, 1, queries if spec.mask_queries else 1, keys)
        mask = jnp.broadcast_to(mask, spread)
    if spec.segmented:
        segments = Segments(
            *(1 + 3 * jnp.arange(n)[None].repeat(rows, 0) // n for n in (queries, keys))
        )
    if spec.rate:
        weights = (rows, spec.num_heads, queries, keys)
        keep_mask = jax.random.bernoulli(third, 1 - spec.rate, weights)
    if spec.bias_rows:
        bias = jax.random.normal(jax.random.key(1), (1, spec.num_heads, queries, keys))
    return Inputs(projected, mask, segments, bias, keep_mask), normal(second, queries, width)


def _window_sample(spec: WindowSpec) -> tuple[Inputs, Array]:
    """`_sample` of attention in windows."""
    (_, windows, tokens, width), heads = spec.shape, spec.num_heads
    first, second, third = jax.random.split(jax.random.key(0), 3)
    qkv = jax.random.normal(first, (*spec.shape[:3], 3 * width)).astype(spec.dtype)
    bias = jax.random.normal(second, (heads, tokens, tokens))
    grad = jax.random.normal(third, spec.shape).astype(spec.dtype)
    # The first window is whole, the others are cut after some of their tokens.
    cut = jnp.arange(tokens) < jnp.arange(windows)[:, None] * tokens // (2 * windows)
    regions = cut.astype(jnp.int32) if spec.shifted else None
    return Inputs((qkv,), bias=bias, regions=regions), grad
