"""Axial attention: full attention with a mask of lines, conditioning, one position at a time."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from vit_jax.nn.axial import AxialAttention, AxialLayer, Context, GridPositions, Norm, ScaleShift
from vit_jax.nn.multi_head import MultiHeadAttention

BATCH, HEIGHT, WIDTH, D, HEADS = 2, 3, 5, 8, 2
RNG = np.random.default_rng(0)
X = jnp.asarray(RNG.normal(size=(BATCH, HEIGHT, WIDTH, D)), jnp.float32)
CONTEXT = jnp.asarray(RNG.normal(size=(BATCH, HEIGHT, WIDTH, 6)), jnp.float32)
ROW, COLUMN = np.divmod(np.arange(HEIGHT * WIDTH), WIDTH)
every_axis = pytest.mark.parametrize('axis', ['row', 'column'])


def drawn(layer, *inputs):
    """Variables none of which is zero or one."""
    rng = np.random.default_rng(1)
    shapes = jax.eval_shape(layer.init, jax.random.key(0), *inputs)
    return jax.tree.map(lambda s: jnp.asarray(0.5 * rng.normal(size=s.shape), s.dtype), shapes)


@pytest.mark.slow
@pytest.mark.parity
@every_axis
@pytest.mark.parametrize('causal', [False, True])
def test_it_is_full_attention_with_a_mask_of_lines(axis, causal):
    layer = AxialAttention(HEADS, axis, causal)
    params = drawn(layer, X)['params']
    line, place = (ROW, COLUMN) if axis == 'row' else (COLUMN, ROW)
    mask = line[:, None] == line
    mask = mask & (place[:, None] >= place) if causal else mask
    length = WIDTH if axis == 'row' else HEIGHT
    distance = np.clip(place[:, None] - place, 1 - length, length - 1)
    bias = params['relative_bias'][:, distance + length - 1]
    full = MultiHeadAttention(HEADS)
    same = {'params': {name: params[name] for name in ('qkv', 'out')}}
    expected = jax.jit(full.apply)(
        same, X.reshape(BATCH, -1, D), mask=jnp.asarray(mask)[None, None], bias=bias[None]
    )
    found = jax.jit(layer.apply)({'params': params}, X)
    np.testing.assert_allclose(found.reshape(BATCH, -1, D), expected, atol=1e-5)


@pytest.mark.slow
@every_axis
def test_positions_one_at_a_time_give_what_causal_attention_gives(axis):
    layer = AxialLayer(HEADS, 12, axis, causal=True)
    context = Context(CONTEXT, (X[:, :1, :1], X[:, :1, 1:2]))
    variables = drawn(layer, X, context)
    expected = jax.jit(layer.apply)(variables, X, context)
    dim, lines, tokens = (2, HEIGHT, WIDTH) if axis == 'row' else (1, WIDTH, HEIGHT)

    @jax.jit
    def step(past, i):
        x, places = (jax.lax.dynamic_slice_in_dim(a, i, 1, axis=dim) for a in (X, CONTEXT))
        return layer.apply(variables, x, past, i, context._replace(places=places), method='step')

    past, found = layer.empty(BATCH, lines, tokens, D), []
    for i in range(tokens):
        x, past = step(past, i)
        found.append(x)
    np.testing.assert_allclose(np.concatenate(found, axis=dim), expected, atol=1e-5)


def test_conditioning_starts_as_none_of_it():
    """Scales begin at one and shifts at zero where there is no context."""
    layer = ScaleShift()
    variables = layer.init(jax.random.key(0), X, CONTEXT)
    np.testing.assert_allclose(layer.apply(variables, X, 0 * CONTEXT), X, atol=1e-6)
    assert np.abs(layer.apply(variables, X, CONTEXT) - X).max() > 0.1


def test_a_conditional_norm_is_a_layer_norm_scaled_by_its_context():
    layer, summary = Norm(1e-3), CONTEXT[:, :1, :1]
    variables = drawn(layer, X, summary)
    dense = variables['params']['affine']['dense']
    affine = np.asarray(summary) @ np.asarray(dense['kernel']) + np.asarray(dense['bias'])
    scale, shift = np.split(affine, 2, axis=-1)
    x = np.asarray(X)
    mean, variance = x.mean(-1, keepdims=True), x.var(-1, keepdims=True)
    expected = (x - mean) / np.sqrt(variance + 1e-3) * scale + shift
    found = jax.jit(layer.apply)(variables, X, summary)
    np.testing.assert_allclose(found, expected, atol=1e-5)
    assert jax.eval_shape(layer.apply, drawn(layer, X), X).shape == X.shape


def test_positions_are_rows_plus_columns():
    layer = GridPositions()
    variables = layer.init(jax.random.key(0), HEIGHT, WIDTH, D)
    table = layer.apply(variables, HEIGHT, WIDTH, D)
    params = variables['params']
    np.testing.assert_allclose(table[2, 4], params['rows'][2, 0] + params['columns'][4])
