"""SigLIP's towers: exact parameter counts, lengths of embeddings, initial values, sizes."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers.pictures import count

from vit_jax.errors import UserError
from vit_jax.models import siglip, siglip_naflex, vit
from vit_jax.models.siglip import Model
from vit_jax.nn import norms
from vit_jax.ops.sequences import Sequences

TINY = {
    **{'vocab_size': 11, 'length': 5, 'patch_size': 4, 'width': 16, 'depth': 2, 'mlp_dim': 24},
    **{'num_heads': 2, 'text_width': 8, 'text_depth': 1, 'text_mlp_dim': 16, 'text_num_heads': 2},
    'embed_dim': 16,
}
IMAGES = jnp.asarray(np.random.default_rng(0).normal(size=(3, 8, 12, 3)), jnp.float32)
IDS = jnp.asarray(np.random.default_rng(1).integers(0, 11, (2, 5)), jnp.int32)

# All parameters of transformers.SiglipModel for the published configs: both towers have the width
# and depth of the ViT, images have 224 pixels and texts 64 ids.
COUNTS = {'B/16': 203_155_970, 'L/16': 652_089_346}


@pytest.fixture(scope='module')
def params():
    return jax.jit(Model(**TINY).init)(jax.random.key(0), IMAGES, IDS)['params']


@pytest.fixture(scope='module')
def apply():
    return jax.jit(Model(**TINY).apply)


@pytest.mark.parametrize('name', COUNTS)
def test_parameter_counts_are_exact(name):
    model = Model(vocab_size=32_000, scan=True, **siglip.variant(name))
    images, ids = jnp.zeros((1, 224, 224, 3)), jnp.zeros((1, 64), jnp.int32)
    made = jax.eval_shape(model.init, jax.random.key(0), images, ids)
    assert count(made) == COUNTS[name]
    if name == 'B/16':
        assert count(made['params']['image']) == 92_884_224  # SiglipVisionModel
        assert count(made['params']['text']) == 110_271_744  # SiglipTextModel


def test_parameter_count_of_naflex_is_exact():
    """That of transformers.Siglip2Model for siglip2-base-patch16-naflex."""
    model = siglip_naflex.Model(vocab_size=256_000, scan=True, **siglip.variant('B/16'))
    images = Sequences(jnp.zeros((1, 7, 768)), jnp.ones((1, 2), int))
    made = jax.eval_shape(model.init, jax.random.key(0), images, jnp.zeros((1, 64), jnp.int32))
    assert count(made) == 375_234_050


@pytest.mark.slow
def test_numbers_of_the_logits_start_as_in_the_paper(params):
    assert float(params['log_scale']) == pytest.approx(np.log(10))
    assert float(params['bias']) == -10


def test_embeddings_have_length_1(params, apply):
    found = apply({'params': params}, IMAGES, IDS)
    for name, rows in (('image', 3), ('text', 2)):
        assert found[name].shape == (rows, 16)
        np.testing.assert_allclose(np.linalg.norm(found[name], axis=1), 1, atol=1e-6)
    assert (float(found['scale']), float(found['bias'])) == pytest.approx((10, -10))
    alone = jax.eval_shape(Model(**TINY).apply, {'params': params}, IMAGES)
    assert alone.keys() == found.keys() - {'text'}


def test_every_id_counts_and_its_place(params, apply):
    whole, others = [3, 4, 5, 0, 0], [[9, 4, 5, 0, 0], [4, 3, 5, 0, 0], [3, 4, 5, 0, 1]]
    ids = jnp.array([whole, *others], jnp.int32)
    found = apply({'params': params}, IMAGES, ids)['text']
    assert np.all(np.abs(found[1:] - found[:1]).max(1) > 1e-4)


def test_the_image_tower_is_a_vit(params, apply):
    fields = {k: TINY[k] for k in ('patch_size', 'width', 'depth', 'mlp_dim', 'num_heads')}
    tower = vit.Model(**fields, pool='map')
    found = jax.jit(tower.apply)({'params': params['image']}, IMAGES)['pre_logits']
    together = apply({'params': params}, IMAGES, IDS)['image']
    np.testing.assert_allclose(norms.unit(found), together, atol=1e-6)


@pytest.mark.slow
@pytest.mark.long
def test_scanned_blocks_are_the_same_function(params):
    from flax import traverse_util

    from vit_jax.tree_paths import unroll

    scanned = Model(**TINY, scan=True)
    stacked = jax.jit(scanned.init)(jax.random.key(0), IMAGES, IDS)['params']
    flat = unroll(traverse_util.flatten_dict(stacked, sep='/'))
    plain = {'params': traverse_util.unflatten_dict(flat, sep='/')}
    a = jax.jit(scanned.apply)({'params': stacked}, IMAGES, IDS)
    b = jax.jit(Model(**TINY).apply)(plain, IMAGES, IDS)
    for name in ('image', 'text'):
        np.testing.assert_allclose(a[name], b[name], atol=1e-6)


def test_a_projection_makes_embeddings_of_another_size():
    model = Model(**TINY | {'embed_dim': 6}, project=True)
    made = jax.eval_shape(model.init_with_output, jax.random.key(0), IMAGES, IDS)[0]
    assert made['image'].shape == (3, 6) and made['text'].shape == (2, 6)


def test_positions_are_resized_with_the_images(params):
    larger, notes = Model(**TINY).resize_params(params, (8, 12), (16, 16))
    assert larger['image']['pos_embed'].shape == (1, 16, 16) and notes
    assert larger['text'] is params['text']


def test_attention_maps_and_pictures_are_those_of_images(params):
    model = Model(**TINY)
    look = functools.partial(model.apply, mutable=['intermediates'])
    _, sown = jax.jit(look)({'params': params}, IMAGES)
    maps = model.attention_maps(sown['intermediates'], IMAGES, None)
    assert [m.name for m in maps] == ['encoder/block_0', 'encoder/block_1']
    assert maps[0].weights.shape == (3, 2, 6, 6) and maps[0].query_grid == (2, 3)
    assert len(model.parameter_pictures(params, (8, 12))) == 2


@pytest.mark.parametrize(
    ('fields', 'words'),
    [
        ({'pool': 'mean'}, "'mean'.*'map'"),
        ({'embed_dim': 8}, r'embed_dim=8: .* 16;'),
        ({'init_scale': 0.0}, 'logits.scale=0.0'),
        ({'text_width': 9}, r'texts.width 9 .* texts.num_heads 2'),
    ],
)
def test_fields_that_make_no_model(fields, words):
    with pytest.raises(UserError, match=words):
        Model(**TINY | fields)


def test_texts_of_another_length(params):
    with pytest.raises(UserError, match=r'texts have 3 .* 5'):
        Model(**TINY).apply({'params': params}, IDS[:, :3], method='embed_texts')
