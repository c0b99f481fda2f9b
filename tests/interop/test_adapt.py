"""Parameters made to fit another head, image size, patch size, and scanned blocks."""

import functools
import re

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import traverse_util
from helpers.messages import mentions, says

from vit_jax.errors import UserError
from vit_jax.interop import adapt as adapting
from vit_jax.interop.trained import TrainedModel, fields
from vit_jax.models import base as models
from vit_jax.models import mae, seq2seq, swin, swin_v2, vit
from vit_jax.tree_paths import overlay, param_paths, unroll

FIELDS = dict(num_classes=4, patch_size=4, width=16, depth=3, mlp_dim=24, num_heads=2)


def shapes(size=(16, 16), channels=3, **fields):
    return shapes_of(vit.Model(**FIELDS | fields), size, channels)


def shapes_of(model, size=(16, 16), channels=3):
    images = jax.ShapeDtypeStruct((1, *size, channels), jnp.float32)
    return jax.eval_shape(model.init, jax.random.key(0), images)['params']


def adapt(params, size=(16, 16), channels=3, *, old=None, method='bilinear', **fields):
    """Parameters for images of `size`; `old` is the size that they were made for."""
    model = vit.Model(**FIELDS | fields)
    return adapting.adapt(
        params,
        shapes_of(model, size, channels),
        model,
        old_size=old,
        new_size=size,
        posemb=method,
    )


def random(like, seed=0):
    rng = np.random.default_rng(seed)
    return jax.tree.map(lambda x: rng.standard_normal(x.shape).astype(np.float32), like)


def flat(tree):
    return traverse_util.flatten_dict(tree, sep='/')


def assert_same(a, b, but=()):
    a, b = flat(a), flat(b)
    assert a.keys() - but == b.keys() - but
    for name in a.keys() - but:
        np.testing.assert_array_equal(a[name], b[name], err_msg=name)


@functools.cache
def compiled(model):
    return jax.jit(model.apply)


def logits(params, images, **fields):
    model = vit.Model(**FIELDS | fields)
    return np.asarray(compiled(model)({'params': params}, images)['logits'])


@pytest.fixture
def params():
    return random(shapes())


@pytest.fixture
def images():
    return np.random.default_rng(1).standard_normal((2, 16, 16, 3)).astype(np.float32)


def test_what_fits_stays_as_it_is(params):
    adapted, notes = adapt(params)
    assert notes == []
    assert_same(adapted, params)


@pytest.mark.slow
@pytest.mark.parametrize('scan', [(False, True), (True, False), (True, True)])
def test_scanned_and_unrolled_blocks_compute_the_same(scan, images):
    before, after = scan
    params = random(shapes(scan=before))
    adapted, notes = adapt(params, scan=after)
    assert notes == []
    assert jax.tree.map(np.shape, adapted) == jax.tree.map(np.shape, shapes(scan=after))
    expected = logits(params, images, scan=before)
    assert np.abs(expected).max() > 1
    np.testing.assert_allclose(logits(adapted, images, scan=after), expected, atol=2e-5, rtol=1e-5)


def test_unroll_is_the_inverse_of_stacking():
    params = random(shapes(scan=True))
    flat = unroll(traverse_util.flatten_dict(params, sep='/'))
    unrolled = traverse_util.unflatten_dict(flat, sep='/')
    assert jax.tree.map(np.shape, unrolled) == jax.tree.map(np.shape, shapes())
    stacked = params['encoder']['blocks']['mlp']['fc1']['kernel']
    np.testing.assert_array_equal(
        unrolled['encoder']['block_1']['mlp']['fc1']['kernel'], stacked[1]
    )
    assert_same(adapt(unrolled, scan=True)[0], params)


@pytest.mark.parametrize(
    ('old', 'new', 'note'),
    [
        (4, 7, ('head', '4 classes', '7', 'initialized')),
        (None, 7, ('head', '7 classes', 'initialized')),
        (4, None, ('head', 'dropped')),
    ],
)
def test_a_head_that_does_not_fit_starts_anew(old, new, note):
    params = random(shapes(num_classes=old))
    adapted, notes = adapt(params, num_classes=new)
    assert says(notes, *note)
    assert_same(adapted, params, but={'head/kernel', 'head/bias'})
    assert 'head' not in adapted


def test_no_head_on_either_side_is_no_news():
    assert adapt(random(shapes(num_classes=None)), num_classes=None)[1] == []


def test_without_pre_logits_their_head_is_of_no_use():
    params = random(shapes(representation_size=16))
    adapted, notes = adapt(params)
    first, second = notes
    assert says(first, 'pre_logits', 'dropped') and says(second, 'head', '4 classes', 'initialized')
    assert {'head', 'pre_logits'}.isdisjoint(adapted)
    adapted, notes = adapt(params, representation_size=16, num_classes=9)
    assert len(notes) == 1
    assert 'pre_logits' in adapted
    with pytest.raises(UserError, match=r'pre_logits/bias \(16,\) is missing'):
        adapt(random(shapes()), representation_size=16)


def test_position_embeddings_of_a_linear_function_are_resized_exactly():
    """Resizing linearly with fixed corners keeps what is linear in row and column."""
    row, column = np.meshgrid(np.linspace(0, 1, 4), np.linspace(0, 1, 4), indexing='ij')
    params = random(shapes())
    plane = (2 * row - 3 * column + 1).reshape(1, 16, 1).repeat(16, axis=2).astype(np.float32)
    params['pos_embed'][:, 1:] = plane
    adapted, notes = adapt(params, (12, 28))
    assert says(notes, 'pos_embed', '4 x 4', '7 x 3', 'bilinear')
    row, column = np.meshgrid(np.linspace(0, 1, 3), np.linspace(0, 1, 7), indexing='ij')
    expected = (2 * row - 3 * column + 1).reshape(1, 21, 1).repeat(16, axis=2)
    np.testing.assert_allclose(adapted['pos_embed'][:, 1:], expected, atol=1e-6)
    np.testing.assert_array_equal(adapted['pos_embed'][:, :1], params['pos_embed'][:, :1])
    assert_same(adapted, params, but={'pos_embed'})
    bicubic, notes = adapt(params, (12, 28), method='bicubic')
    assert says(notes, 'pos_embed', '4 x 4', '7 x 3', 'bicubic')
    assert np.abs(bicubic['pos_embed'] - adapted['pos_embed']).max() > 1e-3


def test_grids_of_as_many_patches_are_not_the_same(params):
    adapted, notes = adapt(params, (8, 32))
    assert says(notes, 'pos_embed', '4 x 4', '8 x 2', 'bilinear')
    back = adapt(adapted, (8, 32), old=(8, 32))
    assert back[1] == []
    assert_same(back[0], adapted)


def test_a_grid_that_is_no_square_has_to_be_known():
    params = random(shapes((8, 20)))
    with pytest.raises(UserError, match=r'10 patches.*square.*4 x 4'):
        adapt(params)
    adapted, _ = adapt(params, old=(8, 20))
    assert adapted['pos_embed'].shape == (1, 17, 16)


def test_patches_of_another_size_give_the_same_tokens():
    """Twice the size: the tokens of an image enlarged by it are those of the image."""
    params = random(shapes(num_classes=None, pool='gap'))
    fields = dict(num_classes=None, pool='gap', patch_size=8)
    adapted, notes = adapt(params, (32, 32), old=(16, 16), **fields)
    assert notes == ['patch_embed: 4 x 4 resized to 8 x 8']
    rng = np.random.default_rng(0)
    coarse = rng.standard_normal((4, 4)).astype(np.float32)
    fine = np.asarray(jax.image.resize(coarse, (8, 8), 'linear', precision='highest'))
    small = np.einsum('yx,yxcd->cd', coarse, params['patch_embed']['kernel'])
    large = np.einsum('yx,yxcd->cd', fine, adapted['patch_embed']['kernel'])
    np.testing.assert_allclose(large, small, atol=1e-4)


@pytest.mark.parametrize(
    ('fields', 'message'),
    [
        (dict(mlp_dim=20), r'block_0/mlp/fc1/kernel .* \(16, 24\) .* \(16, 20\)'),
        (dict(num_heads=4), r'qkv/kernel .* \(16, 3, 2, 8\) .* \(16, 3, 4, 4\)'),
        (dict(depth=2), r'encoder/block_2/\S+ \(.*\) is unknown.*and \d+ more'),
        (dict(depth=4), r'encoder/block_3/\S+ \(.*\) is missing'),
        (dict(depth=4, scan=True), r'encoder/block_3/\S+ \(.*\) is missing'),
        (dict(pool='gap'), r'pos_embed .* \(1, 17, 16\) .* \(1, 16, 16\)'),
        (dict(posemb='sincos2d'), r'pos_embed \(1, 17, 16\) is unknown'),
        (dict(channels=1), r'patch_embed/kernel .* \(4, 4, 3, 16\) .* \(4, 4, 1'),
        (
            dict(size=(20, 20), old=(12, 12)),
            r'pos_embed .* \(1, 17, 16\) .* \(1, 26, 16\)',
        ),
    ],
)
def test_every_other_difference_names_parameters_and_shapes(params, fields, message):
    with pytest.raises(UserError, match=message):
        adapt(params, **{'old': (16, 16)} | fields)


def test_overlay_replaces_leaves_alone():
    initial = {'a': {'b': 1, 'c': 2}, 'd': 3}
    assert overlay(initial, {'a': {'c': 5}}) == {'a': {'b': 1, 'c': 5}, 'd': 3}
    assert initial == {'a': {'b': 1, 'c': 2}, 'd': 3}
    with pytest.raises(KeyError):
        overlay(initial, {'e': {'f': 1}})


class Detector(models.Model):
    """A model with a ViT's body below `backbone` and parts of its own."""

    backbone: nn.Module = vit.Model(**FIELDS | {'num_classes': None})

    @nn.compact
    def __call__(self, images, train=False):
        return nn.Dense(4, name='boxes')(self.backbone(images, train)['tokens'])

    def resize_params(self, params, old_size, new_size, method):
        part = params.get('backbone', {})
        body, notes = self.backbone.resize_params(part, old_size, new_size, method)
        return params | {'backbone': body} if part else params, notes


def select(params, text, model, size=(16, 16), old=(16, 16)):
    target = shapes_of(model, size)
    return adapting.adapt(params, target, model, old_size=old, new_size=size, select=text)


def test_a_part_starts_the_same_part_of_another_model(params):
    other = vit.Model(**FIELDS | {'num_classes': 9, 'pool': 'map', 'posemb': 'sincos2d'})
    adapted, notes = select(params, 'encoder, patch_embed', other)
    assert adapted.keys() == {'encoder', 'patch_embed'}
    assert_same(adapted, {name: params[name] for name in adapted})
    count = len(flat(params['encoder']))
    first, second, third = notes
    assert says(first, 'encoder', f'{count} parameters') and says(second, 'patch_embed', '2 param')
    assert says(third, 'head, map_head', 'initialized')


def test_a_part_of_a_part_starts_alone(params):
    model = vit.Model(**FIELDS)
    adapted, notes = select(
        params, 'encoder/block_0,encoder/block_2/norm1->encoder/block_1/norm2', model
    )
    assert adapted['encoder'].keys() == {'block_0', 'block_1'}
    np.testing.assert_array_equal(
        adapted['encoder']['block_1']['norm2']['bias'],
        params['encoder']['block_2']['norm1']['bias'],
    )
    assert mentions(notes, 'encoder/block_1/norm2', '2 parameters', 'encoder/block_2/norm1')
    assert notes[-1].startswith('cls_token, encoder/block_1/attention, encoder/block_1/mlp, ')


def test_a_pattern_takes_what_is_called_so(params):
    """The blocks without the norm after them, for a model whose norm comes after the mean."""
    model = vit.Model(**FIELDS | {'pool': 'patches', 'fc_norm': True})
    adapted, notes = select(params, 'cls_token, encoder/block_*', model)
    blocks = {name: params['encoder'][name] for name in ('block_0', 'block_1', 'block_2')}
    assert_same(adapted, {'cls_token': params['cls_token'], 'encoder': blocks})
    assert notes[1] == f'encoder/block_*: {len(flat(blocks))} parameters read'
    assert notes[2].startswith('fc_norm, head, ') and notes[2].endswith('not selected, initialized')
    moved, _ = select(params, 'encoder/block_*->backbone/encoder/block_*', Detector())
    assert_same(moved, {'backbone': {'encoder': blocks}})


def test_a_body_becomes_the_backbone_of_another_model_and_is_resized():
    body = random(shapes(num_classes=None))
    adapted, notes = select(body, '->backbone', Detector(), size=(24, 24))
    assert adapted.keys() == {'backbone'}
    assert_same(adapted['backbone'], body, but={'pos_embed'})
    assert adapted['backbone']['pos_embed'].shape == (1, 37, 16)
    first, second, third = notes
    assert says(first, 'backbone', len(flat(body))) and says(second, 'boxes', 'initialized')
    assert says(third, 'pos_embed', '4 x 4', '6 x 6', 'bilinear')
    back, notes = select(adapted, 'backbone->', vit.Model(**FIELDS), (24, 24), (24, 24))
    assert_same(back, adapted['backbone'])
    assert says(notes[1:], 'head', '4 classes', 'initialized')


def test_scanned_blocks_are_selected_by_the_names_of_separate_ones(params):
    stacked, _ = select(params, 'encoder', vit.Model(**FIELDS, scan=True))
    assert stacked['encoder']['blocks']['norm1']['bias'].shape == (3, 16)
    parted, _ = select(stacked, 'encoder/block_1', vit.Model(**FIELDS))
    assert_same(parted['encoder'], {'block_1': params['encoder']['block_1']})
    with pytest.raises(UserError, match=r'blocks.*array'):
        select(params, 'encoder/block_1', vit.Model(**FIELDS, scan=True))


@pytest.mark.parametrize(
    ('text', 'message'),
    [
        (
            'encodr',
            r"checkpoint .* 'encodr'; .* 'encoder'.*: cls",
        ),
        ('encoder/block_7', "did you mean 'encoder/block_"),
        ('encoder/blok_*', r"'encoder/blok_\*'; .* 'encoder/block_"),
        (
            'encoder->bakbone',
            r"model .* 'bakbone'; .* 'backbone'",
        ),
        ('encoder->backbone', r'backbone/block_0/attention/out/bias \(16,\)'),
        ('encoder->backbone/encoder,encoder->backbone/encoder', 'parts.*backbone/enc'),
        ('a->b->c', 'PATH or SOURCE->TARGET'),
        ('encoder,', 'PATH or SOURCE->TARGET'),
        ('cls_token->boxes/bias', r'boxes/bias .* \(1, 1, 16\) .* \(4,\)'),
    ],
)
def test_a_selection_that_leads_nowhere_is_one_line(params, text, message):
    with pytest.raises(UserError, match=message) as error:
        select(params, text, Detector())
    assert '\n' not in str(error.value)


def test_layers_that_a_model_does_not_call_head_have_to_fit(params):
    class Headless(vit.Model):
        head_layers = ('other',)

    model = Headless(**FIELDS | {'num_classes': 7})
    with pytest.raises(UserError, match=r'head/bias .* \(4,\) .* \(7,\)'):
        adapting.adapt(params, shapes_of(model), model)


@pytest.mark.parametrize(
    ('needed', 'model', 'field', 'value'),
    [
        ({'name': 'vit'}, vit.Model(**FIELDS), 'block.gelu', 'erf'),
        ({'name': 'seq2seq', 'vocab_size': 8}, seq2seq.Model(8), 'activation', 'gelu'),
    ],
)
def test_another_activation_is_another_model(needed, model, field, value):
    fields = {**needed, field.rpartition('.')[2]: value}
    trained = TrainedModel.from_file({}, fields, None, 'a file')
    with pytest.raises(UserError, match=f"set config.model.{field}='{value}'"):
        adapting.adapt_checkpoint(trained, model, {}, None)


SMALL: dict = {'patch_size': 4, 'width': 8}
WITHOUT_BIASES = {
    'swin': swin.Model(**SMALL, depths=(1,), num_heads=(2,), window=2),
    'swin_v2': swin_v2.Model(**SMALL, depths=(1,), num_heads=(2,), window=2),
    'mae': mae.Model(
        **{**SMALL, 'depth': 2, 'mlp_dim': 8, 'num_heads': 2, 'decoder_width': 8, 'scan': True},
        **{'decoder_depth': 1, 'decoder_mlp_dim': 8, 'decoder_heads': 2},
    ),
}


@pytest.mark.parametrize('name', WITHOUT_BIASES)
def test_a_model_with_biases_of_attention_starts_from_zeros(name):
    biased = WITHOUT_BIASES[name]
    size, noise = (16, 16), jax.ShapeDtypeStruct((1, 16), np.float32)
    inputs = (jax.ShapeDtypeStruct((1, *size, 3), np.float32), *([noise] if name == 'mae' else []))
    target, shapes = (
        jax.eval_shape(model.init, jax.random.key(0), *inputs)['params']
        for model in (biased, biased.clone(qkv_bias=False))
    )
    params = jax.tree.map(lambda x: np.ones(x.shape, x.dtype), shapes)
    trained = TrainedModel.from_file(params, {'name': name, 'qkv_bias': False}, size, 'a test')
    made, notes = adapting.adapt_checkpoint(trained, biased, target, size)
    assert says(notes[0], 'queries', 'values', 'zero')
    assert jax.tree.map(np.shape, made) == jax.tree.map(lambda x: x.shape, target)
    zeros = [p for p, leaf in param_paths(made).items() if not leaf.any() and 'pos_embed' not in p]
    assert zeros and all(re.search('attention/(qkv/|query_|value_)bias$', p) for p in zeros)


SCALED = {'layer_scale': 0.1, 'no_bias': 'key|out|mlp|patch_embed|norm|head', 'registers': 2}


@pytest.mark.slow
@pytest.mark.parametrize(
    ('old', 'new'),
    [
        ('none', 'class'),
        ('class', 'all'),
        ('all', 'none'),
        *(
            pytest.param(old, new, marks=pytest.mark.long)
            for old, new in (
                *(('none', 'none'), ('class', 'class'), ('all', 'all')),
                *(('class', 'none'), ('none', 'all'), ('all', 'class')),
            )
        ),
    ],
)
def test_a_plainer_model_starts_from_the_same_function(old, new, perturbed):
    """One without layer scale and with all biases, whose positions are of other tokens."""
    model = vit.Model(**FIELDS | SCALED, posemb_prefix=old)
    batch = np.random.default_rng(0).normal(size=(2, 16, 16, 3)).astype(np.float32)
    params = perturbed(model, batch)
    trained = TrainedModel.from_file(params, {'name': 'vit', **fields(model)}, (16, 16), 'a test')
    plain = vit.Model(**FIELDS, registers=2, posemb_prefix=new)
    made, notes = adapting.adapt_checkpoint(trained, plain, shapes_of(plain), (16, 16))
    assert len(notes) == 2 + (old != new)
    assert says(notes[0], 'layer_scale') and says(notes[1], 'patch_embed', 'norm')
    expected, found = (
        jax.jit(module.apply)({'params': tree}, batch)['logits']
        for module, tree in ((model, params), (plain, made))
    )
    np.testing.assert_allclose(found, expected, atol=2e-5)
