"""Swins of transformers, there and back: the logits of both sides agree."""

import dataclasses

import jax
import numpy as np
import pytest
from helpers.round_trips import anew
from helpers.transformers_models import theirs
from helpers.transformers_swin import reference, state
from helpers.transformers_vit import apply, apply_with_states

from vit_jax import interop
from vit_jax.errors import UserError
from vit_jax.interop import files, normalization
from vit_jax.interop.families import transformers_swin
from vit_jax.interop.trained import TrainedModel
from vit_jax.models.swin import Model

pytest.importorskip('torch')
transformers = pytest.importorskip('transformers')
pytest.importorskip('safetensors')


IMAGENET = {'image_mean': [0.485, 0.456, 0.406], 'image_std': [0.229, 0.224, 0.225]}


def ours(imported, images):
    model = Model(**{k: v for k, v in imported.model_config.items() if k != 'name'})
    return apply(model, imported.params, images)


@pytest.mark.slow
@pytest.mark.parity
@pytest.mark.parametrize(
    'size',
    [pytest.param((24, 24), marks=pytest.mark.long), (26, 39)],
    ids=['native', 'padded'],
)
def test_logits_of_what_is_read(size, tmp_path, images):
    """Padded: 13 x 20 patches, then 7 x 10 in windows of 3, all but the last stage shifted."""
    model, batch = reference(), images(2, *size, 3)
    files.write_safetensors(tmp_path, state(model, 5), model.config.to_dict())
    imported = interop.read(tmp_path)
    np.testing.assert_allclose(
        ours(imported, batch)['logits'], theirs(model, batch).logits, atol=1e-5
    )
    assert imported.image_size == (24, 24) and imported.model_config['name'] == 'swin'


@pytest.mark.slow
def test_hidden_states(tmp_path, images):
    """The embedding, and the map of each stage before its merging."""
    model, batch = reference(), images(1, 24, 24, 3)
    files.write_safetensors(tmp_path, state(model, 5), model.config.to_dict())
    imported = interop.read(tmp_path)
    _, states = apply_with_states(imported.model, imported.params, batch)
    kept = []
    for module in (model.swin.embeddings, *(one.blocks[-1] for one in model.swin.encoder.layers)):
        module.register_forward_hook(lambda module, inputs, output: kept.append(output))
    theirs(model, batch)
    assert len(states) == len(kept) == 3
    for found, output in zip(states, kept, strict=True):
        expected = (output[0] if isinstance(output, tuple) else output).numpy()
        scale = np.abs(expected).max()
        np.testing.assert_allclose(found, expected, atol=1e-5 * scale, rtol=0)


@pytest.mark.slow
def test_images_are_padded_with_their_mean(tmp_path, images):
    """Images of 27 x 41 pixels are not whole patches."""
    model, pixels = reference(), (images(2, 27, 41, 3) / 4).clip(-1, 1)
    files.write_safetensors(tmp_path, state(model, 5), model.config.to_dict(), IMAGENET)
    imported = interop.read(tmp_path)
    mean, std = (np.array(IMAGENET[f'image_{key}']) for key in ('mean', 'std'))
    normalized = (((pixels + 1) / 2 - mean) / std).astype(np.float32)
    expected = theirs(model, normalized).logits
    np.testing.assert_allclose(ours(imported, normalized)['logits'], expected, atol=1e-5)
    assert interop.write(anew(imported), tmp_path / 'new') == ()


def test_both_versions_are_the_same_model(tmp_path):
    model = reference(qkv_bias=False, hidden_act='gelu_pytorch_tanh', mlp_ratio=2.5)
    read = []
    for version in (4, 5):
        folder = tmp_path / str(version)
        files.write_safetensors(folder, state(model, version), model.config.to_dict())
        read.append(interop.read(folder))
    jax.tree.map(np.testing.assert_array_equal, read[0].params, read[1].params)
    assert read[0].model == read[1].model
    assert read[0].model_config['gelu'] == 'tanh' and read[0].model_config['mlp_ratio'] == 2.5
    count = sum(array.size for array in jax.tree.leaves(read[0].params))
    assert count == sum(p.numel() for p in model.parameters()) and not read[0].model.qkv_bias


@pytest.mark.slow
def test_logits_of_what_is_written(tmp_path, images, perturbed):
    fields = {'patch_size': 2, 'width': 8, 'depths': (2, 1), 'num_heads': (2, 4), 'window': 3}
    model, batch = Model(num_classes=3, **fields), images(2, 24, 12, 3)
    params = perturbed(model, batch)
    keywords = {'name': 'swin', 'num_classes': 3, 'mlp_ratio': 4.0, 'gelu': 'erf', 'norm_eps': 1e-5}
    imported = TrainedModel.from_file(params, keywords | fields, (24, 12), 'a test')
    imported = dataclasses.replace(imported, class_names=('cat', 'dog', 'horse'))
    assert interop.write(anew(imported), tmp_path / 'new') == ()
    there = transformers.SwinForImageClassification.from_pretrained(tmp_path / 'new').eval()
    logits = apply(model, params, batch)['logits']
    np.testing.assert_allclose(logits, theirs(there, batch).logits, atol=1e-5)
    again = interop.read(tmp_path / 'new')
    jax.tree.map(np.testing.assert_array_equal, again.params, params)
    assert again.class_names == ('cat', 'dog', 'horse') and again.image_size == (24, 12)
    assert again.notes == ()  # the preprocessor says that images are in [-1, 1]


def test_a_model_without_a_head(tmp_path):
    model = reference('SwinModel')
    files.write_safetensors(tmp_path, state(model, 5), model.config.to_dict())
    imported = interop.read(tmp_path)
    assert imported.model_config['num_classes'] is None and 'head' not in imported.params
    arrays, config, *_ = transformers_swin.write(dataclasses.replace(imported, image_size=None))
    assert config['architectures'] == ['SwinModel'] and config['image_size'] == 12
    assert not any(name.startswith('swin.') for name in arrays)


def test_colors_stay_outside_of_the_weights(tmp_path):
    model = reference()
    mean, std = [0.485, 0.456, 0.406], [0.229, 0.224, 0.225]
    told = {'image_mean': mean, 'image_std': std}
    files.write_safetensors(tmp_path, state(model, 5), model.config.to_dict(), told)
    imported = interop.read(tmp_path)
    plain = files.read_arrays(tmp_path)[0]['swin.embeddings.patch_embeddings.projection.weight']
    kernel = imported.params['patch_embed']['kernel']
    np.testing.assert_array_equal(kernel, plain.transpose(2, 3, 1, 0))
    assert imported.task.normalization == (tuple(mean), tuple(std))
    assert normalization.UNKNOWN_NORMALIZATION not in imported.notes


@pytest.mark.parametrize(
    ('config', 'message'),
    [
        ({'use_absolute_embeddings': True}, 'use_absolute_embeddings=True'),
        ({'layer_norm_eps': 1e-12}, 'layer_norm_eps=1e-12'),
        ({'hidden_act': 'relu'}, "hidden_act='relu'|hidden_act=relu"),
        ({'window_size': 7}, 'window_size is 7, .*file has 3'),
        ({'model_type': 'swinv2'}, 'model_type=swinv2|swinv2'),
    ],
)
def test_other_models_are_refused(config, message, tmp_path):
    model = reference()
    files.write_safetensors(tmp_path, state(model, 5), model.config.to_dict() | config)
    with pytest.raises(UserError, match=message):
        interop.read(tmp_path)


@pytest.mark.parametrize(
    ('change', 'message'),
    [
        (lambda a: a.pop('swin.layernorm.bias'), r'layernorm.bias .* is missing'),
        (lambda a: a.update({'swin.extra.weight': np.ones(2)}), 'no part called extra.weight'),
        (
            lambda a: a.pop(
                'swin.encoder.layers.1.blocks.0.attention.relative_position_bias'
                '.relative_position_bias_table'
            ),
            'file',
        ),
        (
            lambda a: a.update(
                {'swin.encoder.layers.1.blocks.1.attention.relative_position_bias'
                 '.relative_position_bias_table': np.ones((49, 4))}
            ),
            'windows of 3 and 4 tokens',
        ),
    ],
)  # fmt: skip
def test_files_that_are_no_whole_model(change, message, tmp_path):
    model = reference()
    arrays = state(model, 5)
    change(arrays)
    arrays = {name: np.asarray(array, np.float32) for name, array in arrays.items()}
    files.write_safetensors(tmp_path, arrays, model.config.to_dict())
    with pytest.raises(UserError, match=message):
        interop.read(tmp_path)
