"""ColTran's upsamplers: channels apart, what is seen of the coarse image, parameter counts."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from vit_jax.errors import UserError
from vit_jax.models.coltran_upsampler import Model

TINY = {'width': 8, 'num_heads': 2, 'mlp_dim': 12, 'depth': 1}
RNG = np.random.default_rng(0)
GREY = jnp.asarray(RNG.integers(0, 256, (2, 3, 4)), jnp.uint8)
COARSE = jnp.asarray(RNG.integers(0, 256, (2, 3, 4, 3)), jnp.uint8)
CHANNELS = jnp.tile(jnp.arange(3), (2, 1))


@pytest.fixture(scope='module')
def apply():
    model = Model(**TINY)
    variables = jax.jit(model.init)(jax.random.key(0), GREY, COARSE, CHANNELS)
    return lambda *inputs, **more: jax.jit(lambda *x: model.apply(variables, *x, **more))(*inputs)


@pytest.mark.slow
def test_channels_are_apart_and_know_which_they_are(apply):
    whole = apply(GREY, COARSE, CHANNELS)['logits']
    assert whole.shape == (2, 3, 4, 3, 256)
    chosen = jnp.array([[2], [0]])
    slices = jnp.take_along_axis(COARSE, chosen[:, None, None], axis=-1)
    found = apply(GREY, slices, chosen)['logits'][..., 0, :]
    np.testing.assert_allclose(found[0], whole[0, ..., 2, :], atol=1e-5)
    np.testing.assert_allclose(found[1], whole[1, ..., 0, :], atol=1e-5)
    same = jnp.broadcast_to(COARSE[..., :1], COARSE.shape)
    alike = apply(GREY, same, CHANNELS)['logits']
    assert np.abs(alike[..., 0, :] - alike[..., 1, :]).max() > 0.01


def test_only_levels_of_the_coarse_image_are_seen(apply):
    levels = COARSE // 32 * 32 + 7
    same, other = (apply(GREY, x, CHANNELS)['logits'] for x in (COARSE, levels))
    np.testing.assert_array_equal(same, other)
    assert np.abs(apply(GREY, COARSE + 32, CHANNELS)['logits'] - same).max() > 0.01


def test_attention_maps_are_those_of_the_first_channel(apply):
    _, kept = apply(GREY, COARSE, CHANNELS, mutable=['intermediates'])
    maps = Model(**TINY).attention_maps(kept['intermediates'], GREY, COARSE, CHANNELS)
    assert [m.name for m in maps] == ['encoder/row_0', 'encoder/column_0']
    _, alone = apply(GREY, COARSE[..., :1], CHANNELS[:, :1], mutable=['intermediates'])
    expected = Model(**TINY).attention_maps(
        alone['intermediates'], GREY, COARSE[..., :1], CHANNELS[:, :1]
    )
    for found, one in zip(maps, expected, strict=True):
        np.testing.assert_allclose(np.asarray(found.weights), np.asarray(one.weights), atol=1e-6)


@pytest.mark.parametrize(('levels', 'depth', 'side'), [(8, 4, 64), (256, 3, 256)])
def test_parameter_counts_are_exact(levels, depth, side):
    """Of the published sizes, counted by hand."""
    grey, coarse, channels = (
        jax.ShapeDtypeStruct(shape, dtype)
        for shape, dtype in (
            ((1, side, side), jnp.uint8),
            ((1, side, side, 1), jnp.uint8),
            ((1, 1), jnp.int32),
        )
    )
    model, d = Model(levels, depth=depth), 512
    shapes = jax.eval_shape(model.init, jax.random.key(0), grey, coarse, channels)
    layer = 6 * (d * d + d) + 4 * d + 4 * (2 * side - 1)
    embeddings = 3 * levels * d + 256 * d + 2 * d * d + d + 2 * side * d
    expected = embeddings + 2 * depth * layer + 256 * d + 256
    assert sum(leaf.size for leaf in jax.tree.leaves(shapes)) == expected


def test_what_is_learnt_of_places_is_resized_with_the_image():
    model = Model(**TINY)
    params = jax.jit(model.init)(jax.random.key(0), GREY, COARSE, CHANNELS)['params']
    resized, notes = model.resize_params(params, (3, 4), (6, 5))
    assert notes == ['columns, relative_bias, rows: resized to 6 x 5 places (bilinear)']
    inputs = (jnp.zeros((1, 6, 5), jnp.uint8), jnp.zeros((1, 6, 5, 3), jnp.uint8), CHANNELS[:1])
    fresh = jax.eval_shape(model.init, jax.random.key(0), *inputs)['params']
    assert jax.tree.map(jnp.shape, resized) == jax.tree.map(jnp.shape, fresh)
    old, new = (np.asarray(tree['encoder']['positions']['rows']) for tree in (params, resized))
    np.testing.assert_allclose(new[[0, 5]], old[[0, 2]], rtol=1e-6)
    np.testing.assert_allclose(new[1], 0.6 * old[0] + 0.4 * old[1], rtol=1e-5)


def test_mistakes():
    with pytest.raises(UserError, match='levels must be a divisor of 256, not 7'):
        Model(levels=7)
    with pytest.raises(UserError, match='width 8 is not a multiple of num_heads 3'):
        Model(width=8, num_heads=3)
