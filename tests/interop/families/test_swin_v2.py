"""Swins v2 of transformers and of timm: the logits of both sides agree."""

import re

import jax
import numpy as np
import pytest
from helpers.messages import mentions
from helpers.round_trips import anew
from helpers.transformers_models import theirs
from helpers.transformers_swin_v2 import reference
from helpers.transformers_vit import apply

from vit_jax import interop
from vit_jax.errors import UserError
from vit_jax.interop import files

pytest.importorskip('torch')
transformers = pytest.importorskip('transformers')
pytest.importorskip('safetensors')

# The authors' names.
NAMES = [
    (r'^swinv2\.embeddings\.patch_embeddings\.projection', 'patch_embed.proj'),
    (r'^swinv2\.embeddings\.norm', 'patch_embed.norm'),
    (r'^swinv2\.encoder\.', ''),
    (r'^swinv2\.layernorm', 'norm'),
    ('layernorm_before', 'norm1'),
    ('layernorm_after', 'norm2'),
    (r'attention\.self\.continuous_position_bias_mlp', 'attn.cpb_mlp'),
    (r'attention\.self\.(query|value)\.bias', lambda m: f'attn.{m[1][0]}_bias'),
    (r'attention\.self\.', 'attn.'),
    (r'attention\.output\.dense', 'attn.proj'),
    (r'intermediate\.dense', 'mlp.fc1'),
    (r'output\.dense', 'mlp.fc2'),
    ('^classifier', 'head.fc'),
    (r'^layers\.0\.downsample', 'layers.1.downsample'),
]


def timm(model):
    """The arrays as timm names them."""
    arrays = {}
    for key, tensor in model.state_dict().items():
        for old, new in NAMES:
            key = re.sub(old, new, key)
        arrays[key] = tensor.numpy()
    for name in [n for n in arrays if n.endswith('.attn.query.weight')]:
        parts = [arrays.pop(name.replace('query', part)) for part in ('query', 'key', 'value')]
        arrays[name.replace('query', 'qkv')] = np.concatenate(parts)
    return arrays


@pytest.mark.slow
@pytest.mark.parity
@pytest.mark.parametrize(
    ('fields', 'size'),
    [
        ({}, (26, 39)),  # 13 x 20 patches, then 7 x 10 in windows of 3
        pytest.param({'pretrained_window_sizes': [5, 2]}, (24, 24), marks=pytest.mark.long),
        # The second stage has one window of 2 x 2, whatever images come.
        ({'image_size': 8, 'qkv_bias': False}, (9, 21)),
        pytest.param({'image_size': [12, 24], 'window_size': 4}, (24, 12), marks=pytest.mark.long),
    ],
)
def test_logits_of_what_is_read(fields, size, tmp_path, images):
    model, batch = reference(**fields), images(2, *size, 3)
    model.save_pretrained(tmp_path)
    imported = interop.read(tmp_path)
    found = apply(imported.model, imported.params, batch)['logits']
    np.testing.assert_allclose(found, theirs(model, batch).logits, rtol=1e-5, atol=1e-5)
    count = sum(array.size for array in jax.tree.leaves(imported.params))
    assert count == sum(p.numel() for p in model.parameters())


@pytest.mark.slow
def test_a_model_without_a_head(tmp_path, images):
    model, batch = reference('Swinv2Model'), images(1, 24, 24, 3)
    model.save_pretrained(tmp_path)
    imported = interop.read(tmp_path)
    found = apply(imported.model, imported.params, batch)['pre_logits']
    np.testing.assert_allclose(found, theirs(model, batch).pooler_output, rtol=1e-5, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize('cls', ['Swinv2ForImageClassification', 'Swinv2Model'])
def test_transformers_reads_what_is_written(cls, tmp_path, images):
    model, batch = reference(cls, pretrained_window_sizes=[5, 2]), images(2, 24, 24, 3)
    model.save_pretrained(tmp_path / 'theirs')
    imported = interop.read(tmp_path / 'theirs')
    assert interop.write(anew(imported), tmp_path / 'ours') == ()
    again, report = getattr(transformers, cls).from_pretrained(
        tmp_path / 'ours', output_loading_info=True
    )
    assert not any(report.values())
    assert again.config.architectures == [cls]
    for name, tensor in model.state_dict().items():
        np.testing.assert_array_equal(again.state_dict()[name], tensor, err_msg=name)
    found, expected = theirs(again.eval(), batch), theirs(model, batch)
    np.testing.assert_array_equal(found[0], expected[0])


@pytest.mark.slow
def test_windows_of_the_images_that_come_are_noted(tmp_path, images):
    reference().save_pretrained(tmp_path / 'theirs')
    imported = interop.read(tmp_path / 'theirs')
    config = {**imported.model_config, 'image_size': None}
    (note,) = interop.write(imported.with_groups(model=config), tmp_path / 'ours')
    assert mentions(note, 'transformers', 'windows')


def test_timm_has_the_same_model(tmp_path):
    model = reference(window_size=3, pretrained_window_sizes=[2, 2])
    model.save_pretrained(tmp_path / 'hf')
    told = {'img_size': 24, 'window_size': 3, 'pretrained_window_sizes': [2, 2]}
    files.write_safetensors(tmp_path / 'timm', timm(model), {'model_args': told})
    expected, found = interop.read(tmp_path / 'hf'), interop.read(tmp_path / 'timm')
    jax.tree.map(np.testing.assert_array_equal, found.params, expected.params)
    assert found.model == expected.model and found.image_size == (24, 24)


@pytest.mark.parametrize(
    ('name', 'window', 'pretrained', 'size'),
    [
        ('swinv2_tiny_window3_24.ms_in1k', 3, (), 24),
        ('swinv2_base_window12to3_192to24', 3, (12, 12), 24),
        ('swinv2_base_window12to3_32to24', 3, (8, 4), 24),
    ],
)
def test_the_name_of_timm_tells_the_windows(name, window, pretrained, size, tmp_path):
    files.write_safetensors(tmp_path, timm(reference()), {'architecture': name})
    found = interop.read(tmp_path)
    keys = ('window', 'pretrained_windows', 'image_size')
    assert [found.model_config[key] for key in keys] == [window, pretrained, size]


@pytest.mark.parametrize(
    ('config', 'message'),
    [
        ({}, 'unknown window size'),
        ({'architecture': 'swin_tiny_patch4_window7_224'}, 'unknown window size'),
        ({'model_args': {'window_size': [3, 2]}}, 'unknown window size'),
        ({'model_args': {'window_size': 3, 'img_size': [24, 6]}}, 'along one axis'),
    ],
)
def test_windows_that_are_not_known_are_refused(config, message, tmp_path):
    files.write_safetensors(tmp_path, timm(reference()), config)
    with pytest.raises(UserError, match=message):
        interop.read(tmp_path)


def test_transformers_needs_its_config(tmp_path):
    model = reference()
    arrays = {name: tensor.numpy() for name, tensor in model.state_dict().items()}
    files.write_safetensors(tmp_path / 'x.safetensors', arrays)
    with pytest.raises(UserError, match='unknown window size'):
        interop.read(tmp_path / 'x.safetensors')
