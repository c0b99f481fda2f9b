"""The colorizer: parameters counted by hand, and where its colors come from."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers.pictures import count, drawn, images_like, spec

from vit_jax.errors import UserError
from vit_jax.models.colorizer import Model
from vit_jax.nn.positions import sincos1d

TINY = {'patch_size': 4, 'patch_out': 2, 'width': 16, 'depth': 1, 'mlp_dim': 32, 'num_heads': 2}
GRAY = images_like(2, 8, 12, 1)


@pytest.fixture(scope='module')
def model():
    return Model(**TINY)


@pytest.fixture(scope='module')
def params(model):
    return drawn(model, GRAY)


@pytest.fixture(scope='module')
def looked(model, params):
    """Outputs and attention maps."""
    apply = jax.jit(lambda p, x: model.apply({'params': p}, x, mutable=['intermediates']))
    outputs, sown = apply(params, GRAY)
    return outputs, model.attention_maps(sown['intermediates'], GRAY)


def parameters_by_hand(d, depth, mlp, blocks, patch, tokens, out):
    """Every block: two norms, four projections, two dense layers, all with biases."""
    block = 4 * d + 4 * (d * d + d) + (d * mlp + mlp) + (mlp * d + d)
    embed = patch * patch * d + d + 2 * tokens * d
    return embed + (depth + blocks) * block + 2 * 2 * d + d * out * out * 313 + out * out * 313


@pytest.mark.slow
def test_parameter_counts_are_exact():
    model = Model()
    found = jax.eval_shape(model.init, jax.random.key(0), spec(1, 224, 224, 1))['params']
    assert count(found) == parameters_by_hand(768, 12, 3072, 2, 16, 196, 4)
    fixed = Model(posemb='sincos1d')
    fixed = jax.eval_shape(fixed.init, jax.random.key(0), spec(1, 224, 224, 1))['params']
    assert count(found) - count(fixed) == 2 * 196 * 768


def test_every_query_tiles_its_patch_with_colors(looked):
    outputs, _ = looked
    assert outputs['logits'].shape == (2, 2 * 2, 3 * 2, 313)
    assert outputs['logits'].dtype == jnp.float32 and outputs['tokens'].shape == (2, 6, 16)


def test_colors_come_through_the_maps(looked):
    _, maps = looked
    names = [m.name for m in maps]
    assert names == ['encoder/block_0', 'decoder/block_0/cross', 'decoder/block_1/cross']
    for one in maps:
        assert one.query_grid == one.key_grid == (2, 3)
        assert one.weights.shape == (2, 2, 6, 6)
        np.testing.assert_allclose(np.asarray(one.weights).sum(-1), 1, atol=1e-5)


@pytest.mark.slow
def test_queries_do_not_see_each_other(model, params):
    """The colors of a patch depend on its own query's position alone, and on all tokens."""

    def of_patch(table):
        changed = params | {'query_embed': table}
        return model.apply({'params': changed}, GRAY[:1])['logits'][0, :2, :2].sum()

    grads = np.asarray(jax.jit(jax.grad(of_patch))(params['query_embed']))[0]
    assert np.abs(grads[0]).min() > 0 and not grads[1:].any()

    def of_image(image):
        return model.apply({'params': params}, image)['logits'][0, :2, :2].sum()

    grads = np.asarray(jax.jit(jax.grad(of_image))(GRAY[:1]))[0, ..., 0]
    assert (np.abs(grads.reshape(2, 4, 3, 4)).max(axis=(1, 3)) > 0).all()


@pytest.mark.slow
def test_positions_by_name(model):
    """PE(i, 2j) = sin(i / 10000^(2j/d)), PE(i, 2j+1) its cosine, over the patches row by row."""
    i, j = 5, 3
    angle = i / 10_000 ** (2 * j / 16)
    table = sincos1d(6, 16)
    np.testing.assert_allclose(
        table[i, 2 * j : 2 * j + 2], [np.sin(angle), np.cos(angle)], atol=1e-6
    )
    # A learned table with these values is the same model.
    fixed = model.clone(posemb='sincos1d')
    drawn_fixed = drawn(fixed, GRAY)
    assert not {'pos_embed', 'query_embed'} & drawn_fixed.keys()
    tables = {name: jnp.asarray(table)[None] for name in ('pos_embed', 'query_embed')}
    one, other = (
        jax.jit(m.apply)({'params': p}, GRAY)['logits']
        for m, p in ((fixed, drawn_fixed), (model, drawn_fixed | tables))
    )
    np.testing.assert_allclose(one, other, atol=1e-5)


def test_positions_of_another_size_are_resized(model, params):
    resized, notes = model.resize_params(params, (8, 12), (16, 16))
    assert [note.partition(':')[0] for note in notes] == ['pos_embed', 'query_embed']
    fresh = jax.eval_shape(model.init, jax.random.key(0), spec(1, 16, 16, 1))['params']
    assert jax.tree.map(jnp.shape, resized) == jax.tree.map(jnp.shape, fresh)
    assert model.resize_params(params, (8, 12), (8, 12)) == (params, [])


@pytest.mark.parametrize(
    ('fields', 'message'),
    [
        ({'patch_out': 3}, r'patch_out 3 .* patch_size 4'),
        ({'num_heads': 3}, r'width 16 .* num_heads 3'),
        ({'posemb': 'sine'}, 'unknown posemb'),
        ({'decoder_depth': 0}, r'decoder_depth .* 1'),
    ],
)
def test_mistakes(fields, message):
    with pytest.raises(UserError, match=message):
        Model(**{**TINY, **fields})
