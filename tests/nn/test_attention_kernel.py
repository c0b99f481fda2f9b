"""The attention kernel of TPUs, run as plain JAX: equal to attention's own functions."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from vit_jax.nn.attention import scaled_dot_product
from vit_jax.nn.attention_kernel import self_attention, vmem_bytes

kernel = functools.partial(self_attention, interpret=True)


def plain(qkv, num_heads):
    heads = qkv.reshape(*qkv.shape[:2], 3, num_heads, -1).transpose(2, 0, 3, 1, 4)
    return scaled_dot_product(*heads)[0].swapaxes(1, 2).reshape(*qkv.shape[:2], -1)


def value_and_gradient(function, qkv, num_heads):
    def run(qkv):
        out, pull = jax.vjp(lambda x: function(x, num_heads), qkv)
        weights = np.random.default_rng(1).normal(size=out.shape)
        return out, pull(jnp.asarray(weights, out.dtype))[0]

    return jax.tree.map(lambda x: np.asarray(x, np.float32), jax.jit(run)(qkv))


def random(batch, tokens, num_heads, size, dtype=jnp.float32):
    qkv = np.random.default_rng(0).normal(size=(batch, tokens, 3 * num_heads * size))
    return jnp.asarray(qkv, dtype)


@pytest.mark.slow
@pytest.mark.parametrize(
    ('tokens', 'num_heads', 'size'),
    [
        (1, 2, 64),
        (49, 5, 32),
        (50, 2, 64),
        (50, 3, 128),
        (50, 12, 32),
        (196, 2, 80),
        (197, 3, 64),
        (577, 1, 72),
    ],
)
def test_values_and_gradients_are_those_of_attention(tokens, num_heads, size):
    qkv = random(2, tokens, num_heads, size)
    found = value_and_gradient(kernel, qkv, num_heads)
    expected = value_and_gradient(plain, qkv, num_heads)
    for a, b in zip(found, expected, strict=True):
        np.testing.assert_allclose(a, b, atol=2e-5)
        assert np.abs(b).max() > 0.1 or tokens == 1


def test_in_half_precision_it_is_as_far_from_the_truth_as_attention_is():
    qkv = random(2, 197, 2, 64, jnp.bfloat16)
    truth = value_and_gradient(plain, qkv.astype(jnp.float32), 2)
    errors = [
        [np.abs(a - b).max() for a, b in zip(value_and_gradient(f, qkv, 2), truth, strict=True)]
        for f in (kernel, plain)
    ]
    assert np.all(errors[0] <= 1.5 * np.array(errors[1]))


def test_large_scores_do_not_overflow():
    qkv = 60 * random(1, 49, 2, 32)
    for a, b in zip(
        value_and_gradient(kernel, qkv, 2), value_and_gradient(plain, qkv, 2), strict=True
    ):
        assert np.isfinite(a).all()
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-2)


def test_examples_do_not_see_each_other():
    qkv = random(3, 49, 2, 32)
    changed = qkv.at[1].add(1.0)
    for a, b in zip(
        value_and_gradient(kernel, qkv, 2), value_and_gradient(kernel, changed, 2), strict=True
    ):
        np.testing.assert_array_equal(a[[0, 2]], b[[0, 2]])
        assert np.abs(a[1] - b[1]).max() > 1e-3


@pytest.mark.parametrize(('tokens', 'num_heads', 'size'), [(197, 3, 64), (50, 4, 80)])
def test_it_can_be_lowered_for_tpus(tokens, num_heads, size):
    qkv = random(2, tokens, num_heads, size, jnp.bfloat16)
    gradient = jax.jit(jax.grad(lambda x: self_attention(x, num_heads).astype(jnp.float32).sum()))
    text = gradient.trace(qkv).lower(lowering_platforms=('tpu',)).as_text()
    assert 'tpu_custom_call' in text


def test_memory_grows_with_tokens_and_width():
    assert vmem_bytes(197, 768, 12, 2) < 12 * 2**20
    assert vmem_bytes(197, 768, 12, 2) < vmem_bytes(577, 768, 12, 2) < vmem_bytes(577, 768, 12, 4)
    assert vmem_bytes(577, 768, 12, 2) < vmem_bytes(577, 1024, 16, 2)
