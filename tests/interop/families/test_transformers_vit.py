"""ViTs of transformers, there and back: the logits of both sides agree."""

import dataclasses
import json
import re

import numpy as np
import pytest
from helpers.transformers_models import theirs
from helpers.transformers_vit import apply, ours, reference

import vit_jax
from vit_jax import interop
from vit_jax.errors import UserError
from vit_jax.interop import files
from vit_jax.interop.families import transformers_vit
from vit_jax.interop.trained import TrainedModel
from vit_jax.interop.trained import fields as fields_of
from vit_jax.models.vit import Model

torch = pytest.importorskip('torch')
transformers = pytest.importorskip('transformers')
pytest.importorskip('safetensors')

OURS = {'patch_size': 4, 'width': 16, 'depth': 2, 'mlp_dim': 24, 'num_heads': 4}


# As version 5 renames when it reads files of version 4.
NAMES_4 = [
    (r'\.layers\.', '.encoder.layer.'),
    (r'^layers\.', 'encoder.layer.'),
    (r'attention\.q_proj', 'attention.attention.query'),
    (r'attention\.k_proj', 'attention.attention.key'),
    (r'attention\.v_proj', 'attention.attention.value'),
    (r'attention\.o_proj', 'attention.output.dense'),
    (r'mlp\.fc1', 'intermediate.dense'),
    (r'mlp\.fc2', 'output.dense'),
]


def state(model, version):
    """Arrays under the names of a version of transformers."""

    def name(key):
        for new, old in NAMES_4 if version == 4 else ():
            key = re.sub(new, old, key)
        return key

    arrays = {name(key): tensor.numpy() for key, tensor in model.state_dict().items()}
    assert any('q_proj' in n for n in arrays) == (version == 5)
    assert any('encoder.layer.0.attention.attention.query' in n for n in arrays) == (version == 4)
    return arrays


@pytest.mark.slow
@pytest.mark.parametrize('version', [4, 5])
@pytest.mark.parametrize(
    'fields',
    [
        {},
        {'hidden_act': 'gelu_pytorch_tanh', 'layer_norm_eps': 1e-3},
        {'image_size': (8, 20), 'qkv_bias': False},
    ],
    ids=['plain', 'config', 'not square'],
)
def test_logits_of_what_is_read(fields, version, tmp_path, images):
    model = reference(**fields)
    size = fields.get('image_size', (12, 12))
    files.write_safetensors(tmp_path, state(model, version), model.config.to_dict())
    imported = interop.read(tmp_path)
    batch = images(2, *size, 3)
    np.testing.assert_allclose(
        ours(imported, batch)['logits'], theirs(model, batch).logits, atol=1e-5
    )
    assert imported.image_size == size and imported.model_config['name'] == 'vit'


@pytest.mark.parametrize('size', [(24, 20), (8, 12)])
def test_images_of_another_size(size, tmp_path, images):
    """Positions are resized as transformers does, unless another interpolation is given."""
    model, batch = reference(), images(2, *size, 3)
    model.save_pretrained(tmp_path)
    module, variables = vit_jax.load(tmp_path, image_size=size)
    logits = apply(module, variables['params'], batch)['logits']
    expected = theirs(model, batch, interpolate_pos_encoding=np.array(True)).logits
    np.testing.assert_allclose(logits, expected, atol=1e-5)
    _, other = vit_jax.load(tmp_path, image_size=size, positions='bilinear')
    table, linear = (v['params']['pos_embed'] for v in (variables, other))
    assert np.abs(table - linear).max() > 0.01
    with pytest.raises(UserError, match="unknown positions 'cubic'"):
        vit_jax.load(tmp_path, image_size=size, positions='cubic')


@pytest.mark.parametrize('sharded', [False, True])
def test_what_save_pretrained_writes(sharded, tmp_path, images):
    model, batch = reference(), images(2, 12, 12, 3)
    model.save_pretrained(tmp_path, max_shard_size='10KB' if sharded else '1GB')
    assert (tmp_path / 'model.safetensors').exists() != sharded
    logits = ours(interop.read(tmp_path), batch)['logits']
    np.testing.assert_allclose(logits, theirs(model, batch).logits, atol=1e-5)


def test_a_pooler_is_a_representation(tmp_path, images):
    model, batch = reference('ViTModel', pooler_output_size=8), images(2, 12, 12, 3)
    model.save_pretrained(tmp_path)
    imported = interop.read(tmp_path)
    assert (
        imported.model_config['representation_size'] == 8
        and imported.model_config['num_classes'] is None
    )
    np.testing.assert_allclose(
        ours(imported, batch)['pre_logits'], theirs(model, batch).pooler_output, atol=1e-5
    )


def test_a_classifier_looks_past_the_pooler(tmp_path, images):
    model, batch = reference(), images(2, 12, 12, 3)
    unused = {
        'vit.pooler.dense.weight': np.ones((16, 16)),
        'vit.pooler.dense.bias': np.ones(16),
        'vit.embeddings.mask_token': np.ones((1, 1, 16)),
    }
    files.write_safetensors(tmp_path, state(model, 4) | unused, model.config.to_dict())
    logits = ours(interop.read(tmp_path), batch)['logits']
    np.testing.assert_allclose(logits, theirs(model, batch).logits, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize(
    ('fields', 'size'),
    [
        ({'gelu': 'erf', 'norm_eps': 1e-12}, (8, 8)),
        ({}, (12, 8)),  # tanh, 1e-6
        ({'scan': True, 'posemb': 'sincos2d'}, (12, 8)),
    ],
    ids=['as theirs', 'as ours', 'scanned, fixed positions'],
)
def test_logits_of_what_is_written(fields, size, tmp_path, images, perturbed):
    fields = {'num_classes': 3, 'posemb': 'learn', **OURS, **fields}
    model, batch = Model(**fields), images(2, *size, 3)
    params = perturbed(model, batch)
    keywords = {'name': 'vit', **fields_of(model)}
    trained = TrainedModel.from_file(params, keywords, size, 'a test')
    trained = dataclasses.replace(trained, class_names=('cat', 'dog', 'horse'))
    files.write_safetensors(tmp_path, *transformers_vit.write(trained)[:2])
    expected = apply(model, params, batch)['logits']

    loaded, report = transformers.ViTForImageClassification.from_pretrained(
        tmp_path, output_loading_info=True
    )
    for fault in ('missing_keys', 'unexpected_keys', 'mismatched_keys'):
        assert not report[fault]
    assert loaded.config.id2label == {0: 'cat', 1: 'dog', 2: 'horse'}
    np.testing.assert_allclose(theirs(loaded.eval(), batch).logits, expected, atol=1e-5)
    again = interop.read(tmp_path)
    np.testing.assert_allclose(ours(again, batch)['logits'], expected, atol=1e-5)
    assert again.image_size == size


@pytest.mark.parametrize('loss', ['softmax', 'sigmoid'])
def test_several_labels_stay_several(loss, tmp_path, images, perturbed):
    model, batch = Model(num_classes=3, posemb='learn', **OURS), images(2, 8, 8, 3)
    task = {'name': 'classify', 'loss_name': loss}
    keywords = {'name': 'vit', **fields_of(model)}
    trained = TrainedModel.from_file(perturbed(model, batch), keywords, (8, 8), 'a test', task=task)
    interop.write(trained, tmp_path / 'model')
    loaded = transformers.ViTForImageClassification.from_pretrained(tmp_path / 'model')
    several = {'softmax': None, 'sigmoid': 'multi_label_classification'}
    assert loaded.config.problem_type == several[loss]
    loaded.save_pretrained(tmp_path / 'again')
    assert interop.read(tmp_path / 'again').task.loss_name == loss


def test_a_model_without_a_head_is_written_with_its_pooler(tmp_path, images, perturbed):
    model, batch = Model(representation_size=8, gelu='erf', **OURS), images(2, 8, 8, 3)
    params = perturbed(model, batch)
    fields = {'pool': 'cls', 'posemb': 'learn', 'num_classes': None, 'norm_eps': 1e-6}
    keywords = {'name': 'vit', 'gelu': 'erf', 'representation_size': 8, **fields, **OURS}
    trained = TrainedModel.from_file(params, keywords, None, 'a test')
    files.write_safetensors(tmp_path, *transformers_vit.write(trained)[:2])
    loaded = transformers.ViTModel.from_pretrained(tmp_path).eval()
    expected = apply(model, params, batch)['pre_logits']
    np.testing.assert_allclose(theirs(loaded, batch).pooler_output, expected, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize('posemb', ['learn', 'sincos2d'])
def test_a_model_without_a_class_token_is_written_as_i_jepa(posemb, tmp_path, images, perturbed):
    fields = {**OURS, 'pool': 'gap', 'posemb': posemb, 'num_classes': 3, 'gelu': 'quick'}
    model, batch = Model(**fields), images(2, 8, 8, 3)
    params = perturbed(model, batch)
    keywords = {'name': 'vit', 'representation_size': None, 'norm_eps': 1e-6, **fields}
    trained = TrainedModel.from_file(params, keywords, (8, 8), 'a test')
    files.write_safetensors(tmp_path, *transformers_vit.write(trained)[:2])
    loaded = transformers.AutoModelForImageClassification.from_pretrained(tmp_path).eval()
    assert type(loaded).__name__ == 'IJepaForImageClassification'
    expected = apply(model, params, batch)['logits']
    np.testing.assert_allclose(theirs(loaded, batch).logits, expected, atol=1e-5)
    np.testing.assert_allclose(ours(interop.read(tmp_path), batch)['logits'], expected, atol=1e-5)


@pytest.mark.parametrize(
    ('fields', 'words'),
    [
        ({'pool': 'patches'}, r"ViTForImageClassification .* has no pool 'patches'"),
        ({'pool': 'gap', 'fc_norm': True}, 'has no fc_norm True'),
        ({'final_norm': False, 'norm_pre': True}, 'has no .*final_norm False'),
        ({'positions': 'rope'}, "has no positions 'rope'"),
        ({'norm': 'rms', 'norm_place': 'post'}, "'rms', norm_place 'post'"),
        ({'head_norm': 'batch'}, "has no head_norm 'batch'"),
        ({'representation_size': 8}, 'has no representation_size 8'),
        ({'pool': 'cls_patches'}, 'no mlp_dim 24 at width 16'),
        ({}, 'image.*follow'),
    ],
)
def test_models_that_transformers_lacks(fields, words, images, perturbed):
    params = perturbed(Model(num_classes=3, **OURS), images(1, 8, 12, 3))
    keywords = {'name': 'vit', 'pool': 'cls', 'num_classes': 3, 'representation_size': None}
    keywords |= {'posemb': 'learn', **OURS, **fields}
    size = (8, 12) if fields else None
    with pytest.raises(UserError, match=words):
        transformers_vit.write(TrainedModel.from_file(params, keywords, size, 'a test'))


def saved(tmp_path, flat, config):
    files.write_safetensors(tmp_path, flat, config)
    return tmp_path


def test_without_a_config_the_size_tells_the_heads(tmp_path):
    """The smallest of big_vision has 2; a model of no known size has to say."""
    fields = {'num_hidden_layers': 1, 'num_attention_heads': 2, 'intermediate_size': 128}
    arrays = state(reference(hidden_size=32, **fields), 4)
    files.write_safetensors(tmp_path / 'a.safetensors', arrays)
    model = interop.read(tmp_path / 'a.safetensors').model_config
    assert (model['num_heads'], model['gelu'], model['norm_eps']) == (2, 'erf', 1e-12)
    files.write_safetensors(tmp_path / 'a.safetensors', state(reference(), 4))
    with pytest.raises(UserError, match=r'width 16, depth 2 and mlp_dim 24; .* config\.json'):
        interop.read(tmp_path / 'a.safetensors')


LAYER = 'vit.encoder.layer.1'
MISTAKES = {
    'unknown': ({f'{LAYER}.gamma': np.ones(3)}, {}, f'no part called {LAYER}.gamma'),
    'absent': (
        {f'{LAYER}.output.dense.bias': None},
        {},
        r'layer\.1\.output\.dense\.bias \(16,\) is missing',
    ),
    'absent query bias': (
        {f'{LAYER}.attention.attention.query.bias': None},
        {},
        r'encoder\.layer\.1\.attention\.attention\.query\.bias \(.*\) is missing',
    ),
    'shape': (
        {f'{LAYER}.intermediate.dense.weight': np.ones((23, 16))},
        {},
        rf'{LAYER}.intermediate.dense.weight has shape \(16, 23\) instead of \(16, 24\)',
    ),
    'rank': ({f'{LAYER}.output.dense.weight': np.ones(3)}, {}, r'cannot have shape \(3,\)'),
    'heads': ({}, {'num_attention_heads': 5}, r'cannot have shape \(16,\) \(5 heads\)'),
    'activation': ({}, {'hidden_act': 'relu'}, "hidden_act 'relu' is not supported"),
    'pooler': ({}, {'pooler_act': 'relu'}, "pooler_act 'relu'"),
    'another model': ({}, {'model_type': 'yolos'}, "config.json .*'yolos'.*vit"),
    'names of another': ({}, {'model_type': 'deit'}, r'no part called vit\.embeddings'),
    'positions': (
        {'vit.embeddings.position_embeddings': None},
        {},
        'embeddings.position_embeddings is not in the file',
    ),
    'depth': ({}, {'num_hidden_layers': 3}, 'num_hidden_layers is 3, .*file has 2'),
    'image': (
        {},
        {'image_size': 16},
        '16 x 16, but pos_embed has rows for 9 patches',
    ),
}


@pytest.mark.parametrize('mistake', MISTAKES)
def test_mistakes_name_the_parameter_of_the_file(mistake, tmp_path):
    arrays, config, words = MISTAKES[mistake]
    model = reference()
    flat = {k: v for k, v in (state(model, 4) | arrays).items() if v is not None}
    with pytest.raises(UserError, match=words) as error:
        interop.read(saved(tmp_path, flat, model.config.to_dict() | config))
    assert '\n' not in str(error.value)


def test_the_config_is_plain_json(tmp_path):
    reference().save_pretrained(tmp_path)
    imported = interop.read(tmp_path)
    flat, config, *_ = transformers_vit.write(imported)
    assert json.loads(json.dumps(config)) == config
    assert config['id2label']['4'] == 'LABEL_4'
    assert all(array.flags['C_CONTIGUOUS'] for array in flat.values())
