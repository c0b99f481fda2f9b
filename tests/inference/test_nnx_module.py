"""NNX modules compute and train as the Linen modules that they hold."""

from __future__ import annotations

import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import vit_jax

GOLDEN = pathlib.Path(__file__).parents[1] / 'golden'
RATE = 0.1


@pytest.fixture(scope='module')
def batch():
    rng = np.random.default_rng(0)
    return jnp.asarray(rng.normal(size=(4, 8, 8, 1)), jnp.float32), jnp.arange(4)


def loss_of(logits, labels):
    return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()


@pytest.mark.slow
def test_an_nnx_module_trains_as_its_linen_module(batch):
    images, labels = batch
    model, variables = vit_jax.load(GOLDEN / 'run_vit')
    module = vit_jax.to_nnx(model, variables)
    apply, call = jax.jit(model.apply), nnx.jit(lambda module: module(images)['logits'])
    np.testing.assert_allclose(call(module), apply(variables, images)['logits'], atol=1e-6)

    optimizer = nnx.Optimizer(module, optax.sgd(RATE), wrt=nnx.Param)

    @nnx.jit
    def step(module, optimizer):
        loss, gradients = nnx.value_and_grad(lambda m: loss_of(m(images)['logits'], labels))(module)
        optimizer.update(module, gradients)
        return loss

    def linen_loss(params):
        return loss_of(model.apply({'params': params}, images)['logits'], labels)

    loss, gradients = jax.jit(jax.value_and_grad(linen_loss))(variables['params'])
    np.testing.assert_allclose(step(module, optimizer), loss, rtol=1e-6)
    moved = jax.tree.map(lambda p, g: np.asarray(p) - RATE * g, variables['params'], gradients)
    expected = apply({'params': moved}, images)['logits']
    np.testing.assert_allclose(call(module), expected, atol=1e-5)


@pytest.mark.slow
def test_other_collections_and_random_streams(batch):
    from vit_jax.models import lejepa

    model = lejepa.Model(
        patch_size=4, width=8, depth=1, mlp_dim=8, num_heads=2, dropout=0.5, projector=(8, 4)
    )
    images, _ = batch
    variables = jax.jit(model.init)(jax.random.key(0), images)
    assert 'batch_stats' in variables
    module = vit_jax.to_nnx(model, variables, nnx.Rngs(dropout=0))
    kinds = {type(leaf) for _, leaf in nnx.to_flat_state(nnx.state(module))}
    assert {nnx.Param, nnx.BatchStat} <= kinds
    call = nnx.jit(lambda m: m(images, train=True, mutable=['batch_stats'])['pre_logits'])
    first, second = call(module), call(module)
    assert np.any(first != second)
