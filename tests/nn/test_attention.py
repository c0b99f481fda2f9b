"""Attention: the equation, masks, dtypes, what is kept for looking at, initial values."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from vit_jax.errors import UserError
from vit_jax.nn.attention import (
    CrossAttention,
    KeyValue,
    SelfAttention,
    additive,
    attention_weights,
    causal_mask,
    dot_product,
    padding_mask,
    scaled_dot_product,
)

BATCH, HEADS, TOKENS, SIZE = 2, 3, 7, 4
WIDTH = HEADS * SIZE


def random(*shape, seed=0):
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape), jnp.float32)


def qkv(memory=TOKENS):
    query = random(BATCH, HEADS, TOKENS, SIZE)
    return query, *(random(BATCH, HEADS, memory, SIZE, seed=seed) for seed in (1, 2))


def reference(query, key, value, mask=None):
    """The equation in float64."""
    query, key, value = (np.asarray(x, np.float64) for x in (query, key, value))
    scores = query @ key.swapaxes(2, 3) / np.sqrt(query.shape[-1])
    if mask is not None:
        scores = np.where(mask, scores, -np.inf)
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    weights /= weights.sum(-1, keepdims=True)
    return weights @ value


def init(layer, *inputs):
    """Parameters, the biases shifted so that they matter."""
    params = layer.init(jax.random.key(0), *inputs)['params']
    return {'params': jax.tree.map(lambda x: x + 0.1 * random(*x.shape, seed=5), params)}


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


def test_steps_of_self_attention_equal_the_whole_under_a_causal_mask():
    layer, x = SelfAttention(HEADS), random(BATCH, TOKENS, WIDTH)
    variables = init(layer, x)
    whole = layer.apply(variables, x, causal_mask(TOKENS))
    # Room that is never filled must not be looked at.
    past = KeyValue(*[jnp.full((BATCH, HEADS, TOKENS + 2, SIZE), 9.0)] * 2)
    for i in range(TOKENS):
        y, past = layer.apply(variables, x[:, i : i + 1], past, i, method='step')
        np.testing.assert_allclose(y[:, 0], whole[:, i], atol=5e-6)


def test_self_attention_is_its_projections_around_the_equation():
    layer, x = SelfAttention(HEADS), random(BATCH, TOKENS, WIDTH)
    variables = init(layer, x)
    params = variables['params']
    projected = np.einsum('bnd,dchk->cbhnk', x, params['qkv']['kernel'])
    heads = reference(*(projected + params['qkv']['bias'][:, None, :, None]))
    expected = np.einsum('bhnk,hkd->bnd', heads, params['out']['kernel']) + params['out']['bias']
    np.testing.assert_allclose(layer.apply(variables, x), expected, atol=5e-6)


def test_cross_attention_is_its_projections_around_the_equation():
    layer = CrossAttention(HEADS)
    x, memory = random(BATCH, 2, WIDTH), random(BATCH, TOKENS, WIDTH, seed=1)
    variables = init(layer, x, memory)
    params = variables['params']

    def project(inputs, name):
        heads = np.einsum('bnd,dchk->cbhnk', inputs, params[name]['kernel'])
        return heads + params[name]['bias'][:, None, :, None]

    heads = reference(*project(x, 'q'), *project(memory, 'kv'))
    expected = np.einsum('bhnk,hkd->bnd', heads, params['out']['kernel']) + params['out']['bias']
    np.testing.assert_allclose(layer.apply(variables, x, memory), expected, atol=5e-6)


def test_self_attention_follows_a_permutation_of_the_tokens():
    layer, x = SelfAttention(HEADS), random(BATCH, TOKENS, WIDTH)
    variables, order = init(layer, x), np.random.default_rng(0).permutation(TOKENS)
    np.testing.assert_allclose(
        layer.apply(variables, x[:, order]), layer.apply(variables, x)[:, order], atol=1e-5
    )


@pytest.mark.parametrize('layer', [SelfAttention(HEADS), CrossAttention(HEADS)])
def test_weights_are_kept_only_when_asked_for(layer):
    x = random(BATCH, TOKENS, WIDTH)
    inputs = (x,) if isinstance(layer, SelfAttention) else (x, x[:, :4])
    variables = layer.init(jax.random.key(0), *inputs)
    assert set(variables) == {'params'}
    plain = layer.apply(variables, *inputs)
    out, kept = layer.apply(variables, *inputs, mutable='intermediates')
    np.testing.assert_array_equal(out, plain)
    (weights,) = kept['intermediates']['attention']
    assert weights.shape == (BATCH, HEADS, TOKENS, inputs[-1].shape[1])
    np.testing.assert_allclose(weights.sum(-1), 1.0, rtol=1e-6)


def test_dropout_of_the_weights_acts_in_training_alone():
    layer, x = SelfAttention(HEADS, dropout=0.5), random(BATCH, TOKENS, WIDTH)
    variables = init(layer, x)
    evaluated = layer.apply(variables, x)
    np.testing.assert_array_equal(evaluated, SelfAttention(HEADS).apply(variables, x))
    trained = layer.apply(variables, x, train=True, rngs={'dropout': jax.random.key(0)})
    assert (trained != evaluated).any()


def test_every_projection_starts_as_a_xavier_matrix_of_its_own():
    width, heads = 96, 4
    params = SelfAttention(heads).init(jax.random.key(0), jnp.zeros((1, 3, width)))['params']
    bound = np.sqrt(6 / (width + width))
    for i in range(3):
        kernel = np.asarray(params['qkv']['kernel'][:, i])
        # Uniform in +-bound; of 9,216 draws the largest lies within 0.1 % of it.
        assert 0.998 * bound < np.abs(kernel).max() <= bound
        assert kernel.std() == pytest.approx(bound / np.sqrt(3), rel=0.02)
    out = np.asarray(params['out']['kernel'])
    assert 0.998 * bound < np.abs(out).max() <= bound
    assert not np.asarray(params['qkv']['bias']).any()


def test_heads_must_divide_the_width():
    with pytest.raises(UserError, match='width 12 is not a multiple of num_heads 5'):
        SelfAttention(5).init(jax.random.key(0), jnp.zeros((1, 3, 12)))
