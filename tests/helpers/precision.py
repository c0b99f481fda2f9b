"""How precisely the layers of a model in bfloat16 compute, seen from what comes out of them."""

from __future__ import annotations

import dataclasses
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np

from vit_jax.nn.norms import LayerNorm
from vit_jax.nn.resnet import StdConv
from vit_jax.tree_paths import path_name

NORMS = (LayerNorm, nn.GroupNorm)


def assert_bfloat16_is_close(
    full: nn.Module, params: Any, images: Any, tokens: str, most: float, norms: int, convs: int
) -> None:
    """In bfloat16 a model of so many norms and convolutions has logits within a share `most` of
    the largest, from parameters and statistics in float32; its output `tokens` is bfloat16.
    """
    half = dataclasses.replace(full, dtype='bfloat16')
    shapes = jax.eval_shape(half.init, jax.random.key(0), images)['params']
    assert {leaf.dtype for leaf in jax.tree.leaves(shapes)} == {jnp.dtype('float32')}
    both = jax.jit(lambda p: [m.apply({'params': p}, images) for m in (full, half)])
    truth, outputs = jax.device_get(both(params))
    expected = truth['logits']
    assert outputs[tokens].dtype == jnp.bfloat16
    assert outputs['logits'].dtype == jnp.float32
    error = np.abs(outputs['logits'] - expected).max() / np.abs(expected).max()
    assert 0 < error < most
    assert_norms_have_float32_statistics(half, params, images, norms)
    assert_convolutions_are_bfloat16_and_standardized_in_float32(half, params, images, convs)


def assert_gradients_reach_all(model: nn.Module, params: Any, images: Any) -> None:
    """Gradients of the logits are finite, and zero for no parameter."""

    @jax.jit
    @jax.grad
    def grad(params: Any) -> jax.Array:
        return (model.apply({'params': params}, images, train=True)['logits'] ** 2).sum()

    for path, g in jax.tree_util.tree_leaves_with_path(grad(params)):
        assert np.isfinite(g).all(), path
        assert np.abs(g).max() > 0, path


def assert_norms_have_float32_statistics(
    model: nn.Module, params: Any, images: Any, norms: int
) -> None:
    """Each of so many norms takes the mean and variance of its input without rounding them.

    Every norm is given values of mean 30 and variance 1. In bfloat16 their squares are known to
    about 4, so that the variance would be lost.
    """

    def run(params: Any) -> list[tuple[jax.Array, jax.Array]]:
        calls: list[Any] = []

        def intercept(call: Any, args: Any, kwargs: Any, context: Any) -> Any:
            if not isinstance(context.module, NORMS):
                return call(*args, **kwargs)
            x = 30 + jax.random.normal(jax.random.key(len(calls)), args[0].shape)
            x = x.astype(jnp.bfloat16)
            exact = context.module.clone(parent=None, name=None, dtype=jnp.float32)
            calls.append((exact, context.module.variables, x, call(x)))
            return calls[-1][-1]

        with nn.intercept_methods(intercept):
            model.apply({'params': params}, images)
        return [(half, exact.apply(v, x.astype(jnp.float32))) for exact, v, x, half in calls]

    results = jax.jit(run)(params)
    assert len(results) == norms
    for half, full in results:
        assert half.dtype == jnp.bfloat16
        np.testing.assert_allclose(half.astype(np.float32), full, rtol=2**-8, atol=1e-3)


def assert_convolutions_are_bfloat16_and_standardized_in_float32(
    model: nn.Module, params: Any, images: Any, convolutions: int
) -> None:
    """So many convolutions give bfloat16, and a constant added to all kernels changes nothing.

    The constant is far above the kernels' deviation: bfloat16 would round the latter away.
    """

    @jax.jit
    def run(params: Any) -> Any:
        return model.apply(
            {'params': params},
            images,
            capture_intermediates=lambda module, _: isinstance(module, StdConv),
            mutable='intermediates',
        )

    outputs, kept = run(params)
    named = jax.tree_util.tree_leaves_with_path(kept['intermediates'])
    results = {path_name(path): x for path, x in named if '__call__' in path_name(path)}
    assert len(results) == convolutions
    assert {x.dtype for x in results.values()} == {jnp.dtype('bfloat16')}
    assert all(name.endswith('__call__/0') for name in results)
    kernels = {name.replace('__call__/0', 'kernel') for name in results}

    def shifted(path: Any, p: jax.Array) -> jax.Array:
        return p + 8 if path_name(path) in kernels else p

    moved = jax.tree_util.tree_map_with_path(shifted, params)
    expected, found = outputs['logits'], run(moved)[0]['logits']
    assert np.abs(found - expected).max() < 0.03 * np.abs(expected).max()
