"""Parts of the detectors' ResNet that are written otherwise than Flax has them give the same."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from vit_jax.nn import resnet


@pytest.mark.slow
@pytest.mark.parametrize('size', [(8, 6), (7, 9)])
def test_pooling_and_its_gradient_are_those_of_flax(size):
    rng = np.random.default_rng(0)
    # Few values, so that most windows have ties, of which one value alone gets the gradient.
    x = jnp.asarray(rng.integers(-1, 3, (2, *size, 3)), jnp.float32)
    padding = [(1, 1), (1, 1)]
    expected, back = jax.vjp(lambda x: nn.max_pool(x, (3, 3), (2, 2), padding), x)
    found, own_back = jax.vjp(resnet.max_pool, x)
    np.testing.assert_array_equal(found, expected)
    slope = jnp.asarray(rng.normal(size=expected.shape), jnp.float32)
    np.testing.assert_allclose(own_back(slope)[0], back(slope)[0], atol=1e-6)


@pytest.mark.parametrize('stride', [1, 2])
@pytest.mark.parametrize('size', [1, 3])
def test_a_convolution_is_one_of_flax(size, stride):
    x = jnp.asarray(np.random.default_rng(0).normal(size=(2, 7, 6, 3)), jnp.float32)
    layer = resnet.Conv(5, size, stride)
    options = {'use_bias': False, 'kernel_init': resnet.KERNEL}
    theirs = nn.Conv(5, (size, size), stride, size // 2, **options)
    variables = theirs.init(jax.random.key(0), x)
    own = layer.init(jax.random.key(0), x)
    jax.tree.map(np.testing.assert_array_equal, own, variables)
    expected = theirs.apply(own, x)
    np.testing.assert_allclose(layer.apply(own, x), expected, atol=1e-5)
    scale = jnp.asarray([-1.0, 0.0, 0.5, 2.0, 3.0])
    for rows in (x[:1, :2, :2], jnp.tile(x, (4, 1, 1, 1))):  # scaled after, and before
        found = layer.apply(own, rows, scale)
        assert found.dtype == x.dtype
        np.testing.assert_allclose(found, theirs.apply(own, rows) * scale, atol=1e-5)


@pytest.mark.parametrize('dtype', ['float32', 'bfloat16'])
def test_the_gradient_of_relu_is_that_of_flax(dtype):
    x = jnp.asarray([-2.0, -0.0, 0.0, 1e-30, 3.0, jnp.inf], dtype)
    expected, back = jax.vjp(nn.relu, x)
    found, own_back = jax.jit(lambda x: jax.vjp(resnet.relu_by_result, x))(x)
    np.testing.assert_array_equal(found, expected)
    np.testing.assert_array_equal(own_back(x + 1)[0], back(x + 1)[0])
