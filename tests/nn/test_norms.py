"""Norms far from a mean of zero, lengths of zeros, and that models take both from one place."""

import ast
import functools
import pathlib

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import vit_jax
from vit_jax.models import dinov2, swin_v2, vit
from vit_jax.nn import norms
from vit_jax.ops import self_distillation

PACKAGE = pathlib.Path(vit_jax.__file__).parent
FLAX = {'LayerNorm', 'GroupNorm', 'BatchNorm', 'InstanceNorm'}  # that subtract a mean
NORMS = {
    'layer': (norms.LayerNorm(1e-6), -1),
    'group': (norms.GroupNorm(1, epsilon=1e-6), (1, 2, 3)),
    'batch': (norms.BatchNorm(use_running_average=False, epsilon=1e-6), (0, 1, 2)),
}


@pytest.mark.parametrize('mean', [300, 3000])
@pytest.mark.parametrize('name', NORMS)
def test_the_variance_is_that_around_the_mean(name, mean):
    norm, axes = NORMS[name]
    x = (mean + np.random.default_rng(0).normal(size=(4, 6, 6, 64))).astype(np.float32)
    exact = x.astype(np.float64) - x.mean(axes, np.float64, keepdims=True)
    exact /= np.sqrt(np.square(exact).mean(axes, keepdims=True) + 1e-6)
    found, _ = jax.jit(norm.init_with_output)(jax.random.key(0), x)
    # A mean in float32 is known to about 1e-7 of itself.
    np.testing.assert_allclose(found, exact, atol=1e-6 * mean)


def test_a_constant_added_to_all_positions_changes_no_logits():
    """The norms remove it; logits differed by a quarter."""
    model = vit.Model(num_classes=10, width=64, depth=2, mlp_dim=128, num_heads=2, patch_size=8)
    images = jnp.asarray(np.random.default_rng(0).normal(size=(2, 32, 32, 3)), jnp.float32)
    rng = np.random.default_rng(1)  # the head is 0 at first
    params = jax.tree.map(
        lambda x: jnp.asarray(0.1 * rng.normal(size=x.shape), jnp.float32),
        jax.eval_shape(model.init, jax.random.key(0), images)['params'],
    )
    apply = jax.jit(model.apply)
    expected = apply({'params': params}, images)['logits']
    params = params | {'pos_embed': params['pos_embed'] + 100}
    found = apply({'params': params}, images)['logits']
    assert np.abs(found - expected).max() < 2e-3 * np.abs(expected).max()


@pytest.mark.slow
def test_models_take_no_norm_of_flax_that_subtracts_a_mean():
    """By default those of Flax compute the variance as E[x^2] - E[x]^2."""
    found = []
    for path in sorted(PACKAGE.rglob('*.py')):
        nodes = [] if path.name == 'norms.py' else ast.walk(ast.parse(path.read_text()))
        found += [
            f'{path.relative_to(PACKAGE)}:{node.lineno}'
            for node in nodes
            if (isinstance(node, ast.Attribute) and node.attr in FLAX)
            or (
                isinstance(node, ast.ImportFrom)
                and str(node.module).startswith('flax')
                and FLAX & {alias.name for alias in node.names}
            )
        ]
    assert not found, 'take them from vit_jax.nn.norms'
    kinds = [x for x in vars(norms).values() if isinstance(x, type) and issubclass(x, nn.Module)]
    fast = {kind.__name__ for kind in kinds if getattr(kind, 'use_fast_variance', False)}
    assert fast == {'RMSNorm'}, 'it subtracts no mean'


@pytest.mark.slow
@pytest.mark.parametrize('fields', [{}, {'use_bias': False}, {'use_scale': False}])
@pytest.mark.parametrize('dtype', ['float32', 'bfloat16'])
def test_the_layer_norm_and_its_gradients_are_those_of_flax(dtype, fields):
    x, grad = np.random.default_rng(0).normal(size=(2, 3, 5, 16)).astype(np.float32)
    x, grad = jnp.asarray(2 * x + 1, dtype), jnp.asarray(grad, dtype)
    both = []
    for kind in (norms.LayerNorm, functools.partial(nn.LayerNorm, use_fast_variance=False)):
        norm = kind(1e-6, dtype=dtype, **fields)
        params = jax.tree.map(lambda p: p + jnp.linspace(0, 1, 16), norm.init(jax.random.key(0), x))
        out, pull = jax.vjp(norm.apply, params, x)
        both.append(jax.tree.leaves((out, pull(grad))))
    for found, expected in zip(*both, strict=True):
        assert (found.shape, found.dtype) == (expected.shape, expected.dtype)
        atol = 1e-5 if dtype == 'float32' else 0.02 * float(jnp.abs(expected).max())
        np.testing.assert_allclose(found, expected, atol=atol, rtol=0)


def gradient(function, *args):
    return jax.jit(jax.grad(lambda *x: function(*x).sum()))(*args)


@pytest.mark.slow
@pytest.mark.parametrize('zeros', [1, 2, 4])
def test_rows_of_zeros_have_a_finite_gradient_and_stay(zeros):
    x = jnp.asarray(np.random.default_rng(0).normal(size=(4, 6)), jnp.float32).at[:zeros].set(0)
    for function in (
        norms.unit,
        functools.partial(norms.unit, axis=0),
        lambda x: self_distillation.koleo(x, jnp.ones(4)),
        lambda x: self_distillation.koleo(x, jnp.arange(4) < 2),
    ):
        assert np.isfinite(gradient(function, x)).all()
    np.testing.assert_array_equal(norms.unit(x)[:zeros], 0)


def test_layers_that_divide_by_a_length_have_finite_gradients_at_zero():
    """A head of DINOv2 and cosine attention, all of whose parameters are 0."""
    layers = {
        'head': (dinov2.Head(8, 4, 6), (2, 5)),
        'attention': (swin_v2.CosineWindowAttention(2, 2), (1, 4, 4, 8)),
    }
    for layer, shape in layers.values():
        x = jnp.ones(shape)
        shapes = jax.eval_shape(layer.init, jax.random.key(0), x)['params']
        params = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape), shapes)
        grads = gradient(
            lambda params, layer=layer, x=x: layer.apply({'params': params}, x), params
        )
        assert all(np.isfinite(grad).all() for grad in jax.tree.leaves(grads))
