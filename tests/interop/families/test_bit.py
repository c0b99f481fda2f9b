"""BiT in the forms of others: the same outputs as Hugging Face's, and every form reads back."""

import functools
import json

import jax
import numpy as np
import pytest
from flax import linen as nn
from flax import traverse_util
from helpers import timm_bit, timm_forms
from helpers.messages import mentions
from helpers.transformers_vit import apply_with_states

from vit_jax import interop
from vit_jax.errors import UserError
from vit_jax.interop import files
from vit_jax.interop.families import bit
from vit_jax.interop.families import timm_bit as timm_bit_family
from vit_jax.interop.trained import TrainedModel
from vit_jax.models import bit_resnet

MODEL = {'name': 'bit_resnet', 'num_classes': 5, 'layers': (2, 1), 'width_factor': 1}


@pytest.fixture(scope='module')
def params():
    return random_params(MODEL, 0)


def random_params(model, seed):
    """Every parameter random, also those that start at zero or one."""
    module = build(model)
    images = jax.ShapeDtypeStruct((1, 64, 64, 3), np.float32)
    shapes = jax.eval_shape(module.init, jax.random.key(0), images)['params']
    rng = np.random.default_rng(seed)

    def draw(path, x):
        noise = 0.2 * rng.standard_normal(x.shape)
        return np.float32(noise + (path[-1].key == 'scale'))

    return jax.tree_util.tree_map_with_path(draw, shapes)


def build(model):
    return bit_resnet.Model(**{k: v for k, v in model.items() if k != 'name'})


def logits(params, images):
    return np.asarray(jax.jit(build(MODEL).apply)({'params': params}, images)['logits'])


@pytest.fixture(scope='module')
def images():
    return np.random.default_rng(1).uniform(-1, 1, (2, 64, 80, 3)).astype(np.float32)


def assert_same(a, b):
    a, b = (traverse_util.flatten_dict(tree, sep='/') for tree in (a, b))
    assert a.keys() == b.keys()
    for name in a:
        np.testing.assert_array_equal(a[name], b[name], err_msg=name)


def released(params):
    return bit.write_npz(params), {}


def big_vision(params):
    """Names and shapes of big_vision, written down from a released file's."""
    flat = {}
    for name, array in bit.write_npz(params).items():
        *parents, letter, kind, leaf = ['', '', *name.removeprefix('resnet/').split('/')]
        unit = '/'.join(p for p in parents if p)
        if kind == 'group_norm' and not letter:
            key = f'norm-pre-head/{leaf}'
        elif kind == 'group_norm':
            key = f'{unit}/gn{"abc".index(letter) + 1}/{leaf}'
        elif letter == 'proj':
            key = f'{unit.removesuffix("/a")}/conv_proj/{leaf}'
        elif letter == 'head':
            key, array = f'head/{leaf}', array.reshape(array.shape[-2:] if array.ndim > 1 else -1)
        elif letter == 'root_block':
            key = 'root_block/conv_root/kernel'
        else:
            key = f'{unit}/conv{"abc".index(letter) + 1}/{leaf}'
        key = key.replace('gamma', 'scale').replace('beta', 'bias')
        flat[key] = array if 'head/' in key[:5] or array.ndim == 4 else array[None, None, None]
    return flat, {}


def written(params, **fields):
    trained = TrainedModel.from_file(params, MODEL | fields, None, 'a test')
    return bit.write_transformers(trained)


def hugging_face(params):
    return written(params)[:2]


FORMS = {released: 'BiT npz', big_vision: 'big_vision BiT npz', hugging_face: 'Hugging Face BiT'}


@pytest.mark.parametrize('form', FORMS)
def test_every_form_reads_back(params, form):
    flat, extra = form(params)
    assert bit.matches(flat)
    imported = bit.read(flat, extra)
    assert imported.source == FORMS[form]
    padding = {'pool_padding': 'nothing'} if form is big_vision else {}
    assert (imported.model_config, imported.image_size) == (MODEL | padding, None)
    assert_same(imported.params, params)


def test_names_of_the_released_files(params):
    flat, _ = released(params)
    shapes = {name: array.shape for name, array in flat.items()}
    assert shapes['resnet/root_block/standardized_conv2d/kernel'] == (7, 7, 3, 64)
    assert shapes['resnet/block1/unit01/a/proj/standardized_conv2d/kernel'] == (1, 1, 64, 256)
    assert shapes['resnet/block1/unit02/b/standardized_conv2d/kernel'] == (3, 3, 64, 64)
    assert shapes['resnet/block2/unit01/c/group_norm/gamma'] == (128,)
    assert shapes['resnet/group_norm/beta'] == (512,)
    assert shapes['resnet/head/conv2d/kernel'] == (1, 1, 512, 5)
    assert shapes['resnet/head/conv2d/bias'] == (5,)
    numbered = {
        name.replace('a/standardized_conv2d', 'a/standardized_conv2d_13'): array
        for name, array in flat.items()
    }
    assert numbered.keys() != flat.keys()
    assert_same(bit.read(numbered, {}).params, params)


@pytest.mark.slow
def test_units_beyond_nine():
    model = MODEL | {'layers': (11,)}
    params = random_params(model, 0)
    flat = bit.write_npz(params)
    assert 'resnet/block1/unit09/b/group_norm/beta' in flat
    assert 'resnet/block1/unit11/b/group_norm/beta' in flat
    imported = bit.read(flat, {})
    assert imported.model_config['layers'] == (11,)
    assert_same(imported.params, params)


def test_the_width_is_that_of_the_root():
    model = MODEL | {'layers': (1,), 'width_factor': 3}
    imported = bit.read(bit.write_npz(random_params(model, 0)), {})
    assert imported.model_config == model
    config = bit.write_transformers(imported).config
    assert (config['embedding_size'], config['hidden_sizes']) == (192, [768])


def test_a_body_without_a_head(params):
    body = {name: value for name, value in params.items() if name != 'head'}
    flat, config, *_ = written(body, num_classes=None)
    imported = bit.read(flat, config)
    assert imported.model_config['num_classes'] is None
    assert_same(imported.params, body)
    bare = {name.removeprefix('bit.'): array for name, array in flat.items()}
    assert bit.matches(bare)
    assert_same(bit.read(bare, config).params, body)
    assert_same(bit.read(bit.write_npz(body), {}).params, body)


def test_logits_of_hugging_face_from_our_file(params, images, tmp_path):
    torch, transformers = pytest.importorskip('torch'), pytest.importorskip('transformers')
    from vit_jax.interop import files

    files.write_safetensors(tmp_path / 'bit', *hugging_face(params))
    reference, info = transformers.BitForImageClassification.from_pretrained(
        tmp_path / 'bit', output_loading_info=True
    )
    assert not any(info[k] for k in ('missing_keys', 'unexpected_keys', 'mismatched_keys'))
    with torch.no_grad():
        theirs = reference.eval()(torch.tensor(images.transpose(0, 3, 1, 2))).logits.numpy()
    assert np.abs(theirs).max() > 1
    np.testing.assert_allclose(logits(params, images), theirs, atol=5e-5, rtol=5e-5)


@pytest.mark.slow
def test_logits_of_hugging_face_from_its_file(images, tmp_path):
    torch, transformers = pytest.importorskip('torch'), pytest.importorskip('transformers')
    from vit_jax.interop import files

    config = transformers.BitConfig(
        layer_type='preactivation', depths=[2, 1], hidden_sizes=[256, 512], num_labels=5
    )
    torch.manual_seed(0)
    reference = transformers.BitForImageClassification(config).eval()
    with torch.no_grad():
        for parameter in reference.parameters():
            if parameter.ndim == 1:
                parameter += 0.1 * torch.randn_like(parameter)
        pixels = torch.tensor(images.transpose(0, 3, 1, 2))
        theirs = reference(pixels, output_hidden_states=True)
        last = reference.bit(pixels).last_hidden_state.numpy()
    reference.save_pretrained(tmp_path)
    imported = bit.read(*files.read_arrays(tmp_path))
    assert imported.model_config == MODEL
    outputs, states = apply_with_states(build(MODEL), imported.params, images)
    np.testing.assert_allclose(outputs['logits'], theirs.logits, atol=5e-5)
    for ours, other in zip(states, theirs.hidden_states, strict=True):
        as_tokens = other.flatten(2).mT.numpy()
        atol = 1e-5 * np.abs(as_tokens).max()
        np.testing.assert_allclose(ours, as_tokens, atol=atol, rtol=0)
    normed = build(MODEL).final_norm_of(imported.params)(states[-1])
    np.testing.assert_allclose(normed, last.reshape(*last.shape[:2], -1).swapaxes(1, 2), atol=5e-5)


def test_what_is_no_bit(params):
    assert not bit.matches({'embedding/kernel': 0, 'head/kernel': 0})
    flat, config = hugging_face(params)
    with pytest.raises(UserError, match=r"layer_type='bottleneck'.*'preactivation'"):
        bit.read(flat, config | {'layer_type': 'bottleneck'})
    flat, _ = released(params)
    name = 'resnet/block1/unit02/b/group_norm/gamma'
    with pytest.raises(UserError, match=r'stage_0/block_1/norm2/scale \(64,\)'):
        bit.read({k: v for k, v in flat.items() if k != name}, {})
    with pytest.raises(UserError, match=r'norm2/scale .* \(32,\) .* \(64,\)'):
        bit.read(flat | {name: np.ones(32, np.float32)}, {})
    with pytest.raises(UserError, match='resnet/extra'):
        bit.read(flat | {'resnet/extra': np.ones(3, np.float32)}, {})


@pytest.mark.parametrize(
    ('form', 'note'),
    [(hugging_face, "global_padding 'SAME'"), (big_vision, ''), (released, '')],
)
def test_what_files_do_not_tell_is_said(params, form, note):
    notes = ' '.join(bit.read(form(params)[0], {}).notes)
    assert note in notes and bool(note) == bool(notes)
    assert 'SAME' not in ' '.join(bit.read(form(params)[0], {'model_type': 'bit'}).notes)


def test_the_pooling_of_big_vision_ignores_what_is_beyond_the_border(params, images):
    root, images = jax.tree.map(jax.numpy.asarray, ({'params': params['root']}, images))
    found = jax.jit(bit_resnet.Root(64, pool_padding='nothing').apply)(root, images)
    capturing = functools.partial(bit_resnet.Root(64).apply, capture_intermediates=True)
    zeros, state = jax.jit(capturing)(root, images)
    (convolved,) = state['intermediates']['conv']['__call__']
    expected = nn.max_pool(convolved, (3, 3), (2, 2), padding=((1, 1), (1, 1)))
    np.testing.assert_array_equal(found, expected)
    np.testing.assert_array_equal(found[:, 1:, 1:], zeros[:, 1:, 1:])
    assert (found[:, 0] < zeros[:, 0]).any()


def timm_files(folder, **changed):
    row = json.loads(timm_bit.GOLDEN.read_text())
    config = {**timm_bit.CONFIG, **changed}
    files.write_safetensors(folder, timm_forms.parameters(row['shapes']), config)
    return np.array(row['logits'])


@pytest.mark.parity
def test_logits_of_timm(tmp_path):
    logits = timm_files(tmp_path)
    imported = interop.read(tmp_path)
    assert imported.model_config['layers'] == (2, 1)
    assert imported.notes == ()
    batch = timm_forms.images(timm_bit.SIDE)
    found = jax.jit(imported.model.apply)({'params': imported.params}, batch)['logits'][0]
    np.testing.assert_allclose(found, logits, atol=1e-5 * np.abs(logits).max(), rtol=0)


def test_the_names_of_timm_are_written(tmp_path):
    timm_files(tmp_path)
    imported = interop.read(tmp_path)
    made = timm_bit_family.write(imported)
    arrays, config = files.read_arrays(tmp_path)
    assert made.arrays.keys() == arrays.keys()
    for name, array in arrays.items():
        np.testing.assert_array_equal(made.arrays[name], array)
    colors = {key: config['pretrained_cfg'][key] for key in ('mean', 'std')}
    assert colors.items() <= made.config['pretrained_cfg'].items()
    assert any(mentions(note, 'timm', 'resnetv2_11x1_bit') for note in made.notes)


def test_the_stored_logits_are_those_of_timm():
    pytest.importorskip('timm')
    stored, found = json.loads(timm_bit.GOLDEN.read_text()), timm_bit.golden()
    np.testing.assert_allclose(found['logits'], stored['logits'], rtol=1e-4)
    assert found['shapes'] == stored['shapes']


@pytest.mark.parametrize(
    ('changed', 'words'),
    [
        ({'architecture': 'resnetv2_50'}, r"names 'resnetv2_50'; .* ResNets only BiTs"),
        ({'architecture': None}, r"names ''; .* ResNets only BiTs"),
        ({'model_args': {'stem_type': 'same'}}, 'model_args stem_type in config.json'),
        ({'global_pool': 'max'}, "global_pool 'max' in config.json"),
    ],
)
def test_other_resnets_of_timm(changed, words, tmp_path):
    timm_files(tmp_path, **changed)
    with pytest.raises(UserError, match=words):
        interop.read(tmp_path)
