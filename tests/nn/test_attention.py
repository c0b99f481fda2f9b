"""Attention: the equation, masks, biases, dtypes."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from vit_jax.nn.attention import (
    additive,
    attention_weights,
    causal_mask,
    dot_product,
    padding_mask,
    scaled_dot_product,
)

BATCH, HEADS, TOKENS, SIZE = 2, 3, 7, 4


def random(*shape, seed=0):
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape), jnp.float32)


def qkv(memory=TOKENS):
    query = random(BATCH, HEADS, TOKENS, SIZE)
    return query, *(random(BATCH, HEADS, memory, SIZE, seed=seed) for seed in (1, 2))


def reference(query, key, value, mask=None, bias=0.0):
    """The equation in float64."""
    query, key, value = (np.asarray(x, np.float64) for x in (query, key, value))
    scores = query @ key.swapaxes(-2, -1) / np.sqrt(query.shape[-1]) + bias
    if mask is not None:
        scores = np.where(mask, scores, -np.inf)
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    weights /= weights.sum(-1, keepdims=True)
    return weights @ value


@pytest.mark.parametrize('memory', [TOKENS, 5])
def test_attention_is_the_equation(memory):
    query, key, value = qkv(memory)
    np.testing.assert_allclose(
        scaled_dot_product(query, key, value)[0], reference(query, key, value), atol=1e-6
    )


def test_masked_keys_get_no_weight():
    query, key, value = qkv()
    mask = np.random.default_rng(0).random((BATCH, 1, TOKENS, TOKENS)) < 0.5
    mask = jnp.asarray(mask | np.eye(TOKENS, dtype=bool))
    weights = attention_weights(query, key, mask)
    assert (np.asarray(weights)[~np.broadcast_to(mask, weights.shape)] == 0).all()
    np.testing.assert_allclose(
        scaled_dot_product(query, key, value, mask)[0],
        reference(query, key, value, mask),
        atol=1e-6,
    )


@pytest.mark.parametrize('masked', [False, True])
@pytest.mark.parametrize('shape', [(BATCH, HEADS), (HEADS,), ()])
def test_a_bias_is_added_to_the_scores(shape, masked):
    query, key, value = qkv(5)
    bias = random(*shape, TOKENS, 5, seed=3)
    mask = jnp.arange(5) < jnp.array([3, 5])[:, None, None, None] if masked else None
    np.testing.assert_allclose(
        scaled_dot_product(query, key, value, mask, bias)[0],
        reference(query, key, value, mask, bias),
        atol=1e-6,
    )


def test_a_bias_of_windows_and_one_of_heads_broadcast():
    """As in Swin: [H N N] of the relative positions and [W 1 N N] of what lies in one window."""
    query, key, value = (random(BATCH, 5, HEADS, TOKENS, SIZE, seed=seed) for seed in range(3))
    apart = np.random.default_rng(3).random((5, 1, TOKENS, TOKENS)) < 0.3
    apart &= ~np.eye(TOKENS, dtype=bool)
    bias = random(HEADS, TOKENS, TOKENS, seed=4) + jnp.where(apart, -100.0, 0.0)
    context, weights = scaled_dot_product(query, key, value, bias=bias)
    assert weights.shape == (BATCH, 5, HEADS, TOKENS, TOKENS)
    np.testing.assert_allclose(context, reference(query, key, value, bias=bias), atol=1e-6)
    assert weights[np.broadcast_to(apart, weights.shape)].max() < 1e-30


def test_weights_are_float32_probabilities_even_in_bfloat16():
    query, key, value = (jnp.asarray(x, jnp.bfloat16) for x in qkv())
    weights = attention_weights(query, key)
    assert weights.dtype == jnp.float32
    np.testing.assert_allclose(weights.sum(-1), 1.0, rtol=1e-6)
    assert scaled_dot_product(query, key, value)[0].dtype == jnp.bfloat16


def test_large_scores_do_not_overflow():
    query, key, value = qkv()
    out = scaled_dot_product(1e4 * query, 1e4 * key, value)[0]
    np.testing.assert_allclose(out, reference(1e4 * query, 1e4 * key, value), atol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize('shape', [(BATCH,), (BATCH, HEADS)], ids=['plain', 'heads'])
@pytest.mark.parametrize('masked', [False, True])
def test_other_scores_are_their_equations(shape, masked):
    query, key = random(*shape, 3, SIZE), random(*shape, TOKENS, SIZE, seed=1)
    value, v = random(*shape, TOKENS, 2, seed=2), random(SIZE, seed=3)
    mask = np.arange(TOKENS) < np.array([4, 6]).reshape(BATCH, *[1] * (len(shape) + 1))
    products = np.einsum('...nk,...mk->...nm', query, key)
    sums = np.tanh(np.asarray(query)[..., :, None, :] + np.asarray(key)[..., None, :, :]) @ v
    given = jnp.asarray(mask) if masked else None
    for found, scores in [
        (dot_product(query, key, value, given), products),
        (additive(query, key, value, v, given), sums),
    ]:
        exps = np.exp(np.asarray(scores, np.float64)) * (mask if masked else 1)
        expected = exps / exps.sum(-1, keepdims=True)
        context, weights = found
        np.testing.assert_allclose(weights, expected, atol=1e-6)
        np.testing.assert_allclose(context, expected @ value, atol=1e-5)


def test_masks():
    tokens = jnp.array([[5, 6, 0], [7, 0, 0]])
    np.testing.assert_array_equal(
        padding_mask(tokens)[:, 0, 0], [[True, True, False], [True, False, False]]
    )
    np.testing.assert_array_equal(
        causal_mask(3)[0, 0], [[True, False, False], [True, True, False], [True, True, True]]
    )


def test_a_query_that_may_look_nowhere_gets_the_mean():
    query, key, value = qkv()
    out, weights = scaled_dot_product(query, key, value, jnp.zeros((1, 1, 1, TOKENS), bool))
    np.testing.assert_allclose(weights, 1 / TOKENS, rtol=1e-6)
    np.testing.assert_allclose(
        out, np.broadcast_to(value.mean(2, keepdims=True), out.shape), atol=1e-6
    )


@pytest.mark.parametrize('dtype', ['float32', 'bfloat16'])
def test_the_gradient_of_a_bias_is_a_sum_of_gradients_in_the_dtype_of_queries(dtype):
    keys = jax.random.split(jax.random.key(0), 3)
    query, key, probe = (jax.random.normal(k, (64, 2, 5, 8)) for k in keys)
    bias = jnp.linspace(-1, 1, 50).reshape(2, 5, 5)

    def gradient(cast):
        def total(bias):
            weights = attention_weights(query.astype(cast), key.astype(cast), bias=bias)
            return (weights * probe[..., :5]).sum()

        return jax.jit(jax.grad(total))

    found = gradient(jnp.dtype(dtype))
    expected = gradient(jnp.float32)(bias)
    scale = float(jnp.abs(expected).max())
    atol = 1e-6 if dtype == 'float32' else 0.02
    np.testing.assert_allclose(found(bias) / scale, expected / scale, atol=atol)
    assert ('optimization_barrier' in found.lower(bias).as_text()) == (dtype != 'float32')
