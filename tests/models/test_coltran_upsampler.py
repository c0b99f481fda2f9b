"""ColTran's upsamplers: channels apart, what is seen of the coarse image, parameter counts."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers.messages import says
from helpers.pictures import drawn

from vit_jax.errors import UserError
from vit_jax.models.coltran_upsampler import Model

TINY = {'width': 8, 'num_heads': 2, 'mlp_dim': 12, 'depth': 1}
RNG = np.random.default_rng(0)
GRAY = jnp.asarray(RNG.integers(0, 256, (2, 3, 4)), jnp.uint8)
COARSE = jnp.asarray(RNG.integers(0, 256, (2, 3, 4, 3)), jnp.uint8)
CHANNELS = jnp.asarray(np.tile(np.arange(3), (2, 1)))


@pytest.fixture(scope='module')
def params():
    return drawn(Model(**TINY), GRAY, COARSE, CHANNELS)


@pytest.fixture(scope='module')
def apply(params):
    """The scores, and what the layers have kept."""

    @jax.jit
    def run(*inputs):
        return Model(**TINY).apply({'params': params}, *inputs, mutable=['intermediates'])

    def apply(*inputs):
        outputs, kept = run(*inputs)
        return np.asarray(outputs['logits']), kept['intermediates']

    return apply


@pytest.mark.slow
def test_channels_are_apart_and_know_which_they_are(apply):
    whole, _ = apply(GRAY, COARSE, CHANNELS)
    assert whole.shape == (2, 3, 4, 3, 256)
    chosen = np.array([[2], [0]])
    slices = np.take_along_axis(np.asarray(COARSE), chosen[:, None, None], axis=-1)
    found = apply(GRAY, slices, chosen)[0][..., 0, :]
    np.testing.assert_allclose(found[0], whole[0, ..., 2, :], atol=1e-5)
    np.testing.assert_allclose(found[1], whole[1, ..., 0, :], atol=1e-5)
    same = np.broadcast_to(np.asarray(COARSE)[..., :1], COARSE.shape)
    alike, _ = apply(GRAY, same, CHANNELS)
    assert np.abs(alike[..., 0, :] - alike[..., 1, :]).max() > 0.01


def test_only_levels_of_the_coarse_image_are_seen(apply):
    coarse = np.asarray(COARSE)
    levels = coarse // 32 * 32 + 7
    same, other = (apply(GRAY, x, CHANNELS)[0] for x in (coarse, levels))
    np.testing.assert_array_equal(same, other)
    assert np.abs(apply(GRAY, coarse + 32, CHANNELS)[0] - same).max() > 0.01


def test_attention_maps_are_those_of_the_first_channel(apply):
    _, kept = apply(GRAY, COARSE, CHANNELS)
    maps = Model(**TINY).attention_maps(kept, GRAY, COARSE, CHANNELS)
    assert [m.name for m in maps] == ['encoder/row_0', 'encoder/column_0']
    first = COARSE[..., :1], CHANNELS[:, :1]
    _, alone = apply(GRAY, *first)
    expected = Model(**TINY).attention_maps(alone, GRAY, *first)
    for found, one in zip(maps, expected, strict=True):
        np.testing.assert_allclose(np.asarray(found.weights), np.asarray(one.weights), atol=1e-6)


@pytest.mark.parametrize(('levels', 'depth', 'side'), [(8, 4, 64), (256, 3, 256)])
def test_parameter_counts_are_exact(levels, depth, side):
    """Of the published sizes, counted by hand."""
    gray, coarse, channels = (
        jax.ShapeDtypeStruct(shape, dtype)
        for shape, dtype in (
            ((1, side, side), jnp.uint8),
            ((1, side, side, 1), jnp.uint8),
            ((1, 1), jnp.int32),
        )
    )
    model, d = Model(levels, depth=depth), 512
    shapes = jax.eval_shape(model.init, jax.random.key(0), gray, coarse, channels)
    layer = 6 * (d * d + d) + 4 * d + 4 * (2 * side - 1)
    embeddings = 3 * levels * d + 256 * d + 2 * d * d + d + 2 * side * d
    expected = embeddings + 2 * depth * layer + 256 * d + 256
    assert sum(leaf.size for leaf in jax.tree.leaves(shapes)) == expected


def test_what_is_learned_of_places_is_resized_with_the_image(params):
    model = Model(**TINY)
    resized, notes = model.resize_params(params, (3, 4), (6, 5))
    assert says(notes, 'columns, relative_bias, rows', '5 x 6', 'bilinear')
    inputs = (jnp.zeros((1, 6, 5), jnp.uint8), jnp.zeros((1, 6, 5, 3), jnp.uint8), CHANNELS[:1])
    fresh = jax.eval_shape(model.init, jax.random.key(0), *inputs)['params']
    assert jax.tree.map(jnp.shape, resized) == jax.tree.map(jnp.shape, fresh)
    old, new = (np.asarray(tree['encoder']['positions']['rows']) for tree in (params, resized))
    np.testing.assert_allclose(new[[0, 5]], old[[0, 2]], rtol=1e-6)
    np.testing.assert_allclose(new[1], 0.6 * old[0] + 0.4 * old[1], rtol=1e-5)


def test_mistakes():
    with pytest.raises(UserError, match=r'levels.*256.*\b7\b'):
        Model(levels=7)
    with pytest.raises(UserError, match=r'width 8.*num_heads 3'):
        Model(width=8, num_heads=3)
