"""Dense layers in float16: one rounding, and gradients by matmuls of float16."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from vit_jax.nn.dense import Dense, affine

DOT = 'dot_general'


@pytest.fixture(scope='module')
def arrays():
    rng = np.random.default_rng(0)
    shapes = (3, 5, 64), (64, 8), (8,)
    return [jnp.asarray(rng.normal(size=shape), jnp.float16) for shape in shapes]


def test_a_sum_is_rounded_once(arrays):
    x, kernel, bias = arrays
    found = Dense(8, dtype=jnp.float16).apply({'params': {'kernel': kernel, 'bias': bias}}, x)
    wide = [np.asarray(array, np.float64) for array in arrays]
    expected = (wide[0] @ wide[1] + wide[2]).astype(np.float16)
    assert found.dtype == jnp.float16
    np.testing.assert_array_equal(found, expected)
    assert (np.asarray(x @ kernel + bias) != expected).any()


def equations(jaxpr):
    """Those of a program and of the functions that it calls."""
    for eqn in jaxpr.eqns:
        yield eqn
        for value in eqn.params.values():
            inner = getattr(value, 'jaxpr', value)
            if hasattr(inner, 'eqns'):
                yield from equations(inner)


def dots(function, *args):
    """The dtypes of the inputs and the output of each matmul of a function."""
    return [
        [str(v.aval.dtype) for v in (*eqn.invars, *eqn.outvars)]
        for eqn in equations(jax.make_jaxpr(function)(*args).jaxpr)
        if eqn.primitive.name == DOT
    ]


def test_gradients_are_those_of_a_product_by_matmuls_of_float16(arrays):
    x, kernel, _ = arrays

    def gradients(multiply):
        return jax.grad(lambda *args: jnp.sin(multiply(*args)).sum(), argnums=(0, 1))

    def product(x, kernel):
        return affine(x, kernel, None, x.dtype)

    found = gradients(product)(x, kernel)
    wide = x.astype(jnp.float32), kernel.astype(jnp.float32)
    for one, other in zip(found, gradients(jnp.matmul)(*wide), strict=True):
        assert one.dtype == jnp.float16
        np.testing.assert_allclose(one, other, atol=0.02)
    forward, *backward = dots(gradients(product), x, kernel)
    assert forward == ['float16', 'float16', 'float32']
    assert backward == [['float16'] * 3] * 2


def test_other_dtypes_are_multiplied_as_they_are(arrays):
    for dtype in ('bfloat16', 'float32'):
        layer = Dense(8, dtype=dtype)
        variables = {'params': dict(zip(('kernel', 'bias'), arrays[1:], strict=True))}
        assert dots(layer.apply, variables, arrays[0]) == [[dtype] * 3]
