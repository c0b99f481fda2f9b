"""Pictures of positions and filters, which ViT, MAE and the colorizer have in common."""

import numpy as np
import pytest
from helpers.pictures import drawn, images_like

from vit_jax.errors import UserError
from vit_jax.models import colorizer, mae, vit
from vit_jax.nn.maps import embedding_filters, position_similarity, require_grid
from vit_jax.nn.positions import sincos2d

RNG = np.random.default_rng(0)
TINY = {'patch_size': 4, 'width': 16, 'depth': 1, 'mlp_dim': 16, 'num_heads': 2}
DECODER = {'decoder_width': 16, 'decoder_depth': 1, 'decoder_mlp_dim': 16, 'decoder_heads': 2}
SIZE, GRID = (8, 12), (2, 3)


def test_similarities_are_cosines_where_the_patches_are():
    table = RNG.normal(size=(6, 5)).astype(np.float32)
    found = position_similarity('pos_embed', table * RNG.uniform(1, 9, (6, 1)), GRID)
    assert found.pictures.shape == (6, 2, 3) and found.columns == 3
    a, b = table[1], table[5]
    cosine = a @ b / np.linalg.norm(a) / np.linalg.norm(b)
    assert found.pictures[1, 1, 2] == pytest.approx(cosine, abs=1e-5)
    np.testing.assert_allclose(found.pictures.reshape(6, 6).diagonal(), 1, atol=1e-5)


@pytest.mark.parametrize('channels', [1, 3])
def test_the_first_component_is_what_the_filters_share(channels):
    one, other = RNG.normal(size=(2, 4, 4, channels, 1))
    kernel = one * RNG.normal(size=64) * 10 + other * RNG.normal(size=64) / 10
    (found,) = embedding_filters({'patch_embed': {'kernel': kernel}})
    shape = (4, 4) if channels == 1 else (4, 4, 3)
    assert found.pictures.shape == (min(28, 16 * channels), *shape)
    first, truth = found.pictures[0].ravel(), one.ravel() / np.linalg.norm(one)
    assert abs(first @ truth) == pytest.approx(1, abs=1e-3)
    assert np.linalg.norm(first) == pytest.approx(1, abs=1e-5)


@pytest.mark.parametrize('shape', [(1, 1, 3), (4, 4, 64)])
def test_what_is_no_picture_is_not_drawn(shape):
    assert embedding_filters({'patch_embed': {'kernel': np.ones((*shape, 8))}}) == []


def test_positions_need_the_size_of_the_images():
    assert require_grid(SIZE, 4) == GRID
    with pytest.raises(UserError, match='give --image-size'):
        require_grid(None, 4)


@pytest.mark.parametrize(
    ('model', 'channels', 'names'),
    [
        (vit.Model(**TINY), 3, ['pos_embed']),
        (vit.Model(**TINY, pool='gap', posemb='sincos2d'), 3, ['pos_embed']),
        (colorizer.Model(**TINY, patch_out=1), 1, ['pos_embed', 'query_embed']),
        (colorizer.Model(**TINY, patch_out=1, posemb='sincos1d'), 1, ['pos_embed', 'query_embed']),
    ],
    ids=['vit', 'vit-fixed', 'colorizer', 'colorizer-fixed'],
)
def test_models_offer_positions_and_filters(model, channels, names):
    params = drawn(model, images_like(1, *SIZE, channels))
    found = {p.name: p.pictures for p in model.parameter_pictures(params, SIZE)}
    assert [*found] == [*names, 'patch_embed/kernel']
    assert all(found[name].shape == (6, *GRID) for name in names)
    if 'pos_embed' in params:  # the row of the class token is left out
        rows = np.asarray(params['pos_embed'][0, -6:])
        expected = position_similarity('', rows, GRID).pictures
        np.testing.assert_allclose(found['pos_embed'], expected)


def test_both_parts_of_a_masked_autoencoder_have_positions():
    model = mae.Model(**TINY, **DECODER)
    table = np.pad(sincos2d(*GRID, 16, endpoint=False), ((1, 0), (0, 0)))[None]
    params = {
        'pos_embed': table,
        'decoder': {'pos_embed': 2 * table},
        'patch_embed': {'kernel': RNG.normal(size=(4, 4, 3, 16))},
    }
    first, second, filters = model.parameter_pictures(params, SIZE)
    np.testing.assert_allclose(first.pictures, second.pictures, atol=1e-5)
    assert filters.name == 'patch_embed/kernel' and first.pictures.shape == (6, *GRID)
