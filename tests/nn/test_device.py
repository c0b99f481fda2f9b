"""Programs outside of a run take the kernels of their device, as in training."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers.targets import pretend
from jax.sharding import AxisType, Mesh

from vit_jax.models import vit
from vit_jax.nn.attention_choice import Target, current_target
from vit_jax.nn.kernels import attention
from vit_jax.runtime import mesh as mesh_lib

SIZE = {'patch_size': 8, 'width': 16, 'depth': 1, 'mlp_dim': 16, 'num_heads': 2}
IMAGES = jnp.linspace(-1, 1, 2 * 16 * 16 * 3).reshape(2, 16, 16, 3)


@pytest.fixture
def on_tpu(monkeypatch):
    """Every device is a TPU, on which the kernel runs as plain JAX."""
    pretend(monkeypatch, 'TPU v5 lite')
    real = functools.partial(attention.fused_attention, interpret=True)
    monkeypatch.setattr(attention, 'fused_attention', real)


def features():
    model = vit.Model(**SIZE)
    shapes = jax.eval_shape(model.init, jax.random.key(0), IMAGES)
    params = jax.tree.map(lambda s: jnp.full(s.shape, 0.1), shapes)
    return lambda params, images: model.apply(params, images)['pre_logits'], params


@pytest.mark.slow
def test_a_program_attends_in_the_kernel_under_a_mesh_of_any_axes(on_tpu):
    """By `compiled`, and by a user's own `jit` and `set_mesh` on one device or several."""
    apply, params = features()
    program = mesh_lib.compile_on_default_device(apply)
    assert 'pallas_call' in str(jax.make_jaxpr(program)(params, IMAGES))
    expected = jax.jit(apply)(params, IMAGES)  # devices of which nothing is told
    np.testing.assert_allclose(program(params, IMAGES), expected, atol=1e-5)
    for devices in (1, 2):
        mesh = Mesh(np.array(jax.devices()[:devices]), ('x',), axis_types=(AxisType.Auto,))
        with jax.set_mesh(mesh):
            compiled = jax.jit(apply)
            assert 'pallas_call' in str(compiled.trace(params, IMAGES).jaxpr)
            np.testing.assert_allclose(compiled(params, IMAGES), expected, atol=1e-5)


def test_the_mesh_of_a_program_is_the_device_that_jax_computes_on():
    seen = []
    mesh_lib.compile_on_default_device(lambda: seen.append(current_target()))()
    assert seen == [Target('cpu', 1, ('data',))]
