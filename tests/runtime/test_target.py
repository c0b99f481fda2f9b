"""Programs outside of a run say what they run on, so that attention is chosen as in training."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from vit_jax.models import vit
from vit_jax.nn.attention_choice import Devices
from vit_jax.nn.kernels import attention
from vit_jax.runtime import target

SIZE = {'patch_size': 8, 'width': 16, 'depth': 1, 'mlp_dim': 16, 'num_heads': 2}
IMAGES = jnp.linspace(-1, 1, 2 * 16 * 16 * 3).reshape(2, 16, 16, 3)


@pytest.fixture
def on_tpu(monkeypatch):
    """Every device is a TPU, on which the kernel runs as plain JAX."""
    monkeypatch.setattr(target, 'from_device', lambda device=None: Devices('TPU v5 lite'))
    real = functools.partial(attention.fused_attention, interpret=True)
    monkeypatch.setattr(attention, 'fused_attention', real)


def with_params(**fields):
    model = vit.Model(**SIZE, **fields)
    shapes = jax.eval_shape(model.init, jax.random.key(0), IMAGES)
    return model, jax.tree.map(lambda s: jnp.full(s.shape, 0.1), shapes)


def features(model):
    return lambda params, images: model.apply(params, images)['pre_logits']


def is_kernel(program, params):
    return 'pallas_call' in str(jax.make_jaxpr(program)(params, IMAGES))


@pytest.mark.slow
def test_a_model_that_is_placed_on_a_tpu_attends_in_the_kernel(on_tpu):
    model, params = with_params()
    own = target.on_device(model, jax.devices()[0])
    assert isinstance(own, vit.Model) and own.width == model.width
    assert own.stride == model.stride and str(own) == str(model)
    assert is_kernel(features(own), params) and not is_kernel(features(model), params)
    again = own.clone(width=16)
    assert is_kernel(features(again), params)
    shapes = jax.eval_shape(own.init, jax.random.key(0), IMAGES)
    assert jax.tree.map(jnp.shape, shapes) == jax.tree.map(jnp.shape, params)
    found, expected = (jax.jit(features(m))(params, IMAGES) for m in (own, model))
    np.testing.assert_allclose(found, expected, atol=1e-5)


def test_a_compiled_program_attends_in_the_kernel(on_tpu):
    model, params = with_params()
    assert is_kernel(target.compiled(features(model)), params)
    assert not is_kernel(jax.jit(features(model)), params)


def test_the_device_of_a_program_is_the_one_that_jax_computes_on():
    assert target.from_device() == Devices('cpu') == target.from_device(jax.devices()[1])
    model, params = with_params()
    assert not is_kernel(target.compiled(features(model)), params)
