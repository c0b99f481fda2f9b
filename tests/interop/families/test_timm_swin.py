"""Swins under timm's and Microsoft's names: the same models as under those of transformers."""

import re

import jax
import numpy as np
import pytest
from helpers.transformers_swin import reference, state

from vit_jax import interop
from vit_jax.errors import UserError
from vit_jax.interop import files, normalization

pytest.importorskip('torch')
pytest.importorskip('safetensors')

# Version 4 of transformers, and the authors' names.
NAMES = [
    (r'^swin\.embeddings\.patch_embeddings\.projection', 'patch_embed.proj'),
    (r'^swin\.embeddings\.norm', 'patch_embed.norm'),
    (r'^swin\.encoder\.', ''),
    (r'^swin\.layernorm', 'norm'),
    ('layernorm_before', 'norm1'),
    ('layernorm_after', 'norm2'),
    (r'attention\.self\.', 'attn.'),
    (r'attention\.output\.dense', 'attn.proj'),
    (r'intermediate\.dense', 'mlp.fc1'),
    (r'output\.dense', 'mlp.fc2'),
    ('^classifier', 'head'),
]


def microsoft(model):
    """The arrays as the authors name them."""
    arrays = {}
    for key, array in state(model, 4).items():
        for old, new in NAMES:
            key = re.sub(old, new, key)
        arrays[key] = array
    for name in [n for n in arrays if '.attn.query.' in n]:
        parts = [arrays.pop(name.replace('query', part)) for part in ('query', 'key', 'value')]
        arrays[name.replace('query', 'qkv')] = np.concatenate(parts)
    arrays['layers.0.blocks.1.attn_mask'] = np.zeros((16, 9, 9), np.float32)
    return arrays


def timm(model):
    """The arrays as timm names them: patches are merged at the beginning of a stage."""
    arrays = {}
    for key, array in microsoft(model).items():
        key = re.sub(r'^layers\.0\.downsample', 'layers.1.downsample', key)
        arrays[re.sub('^head', 'head.fc', key)] = array
    return arrays


@pytest.mark.slow
@pytest.mark.parametrize('named', [microsoft, timm])
def test_it_is_the_model_of_transformers(named, tmp_path):
    model = reference()
    files.write_safetensors(tmp_path / 'hf', state(model, 5), model.config.to_dict())
    files.write_safetensors(tmp_path / 'other.safetensors', named(model))
    expected, found = interop.read(tmp_path / 'hf'), interop.read(tmp_path / 'other.safetensors')
    jax.tree.map(np.testing.assert_array_equal, found.params, expected.params)
    assert found.model == expected.model
    assert found.image_size == (12, 12)  # whose last map is one window
    assert found.notes == (normalization.UNKNOWN_NORMALIZATION,)
    assert found.source.lower().startswith(named.__name__)


def test_config_json_of_timm_tells_size_and_colors(tmp_path):
    pretrained = {'input_size': [3, 24, 48], 'mean': [0.4, 0.5, 0.6], 'std': [0.2, 0.2, 0.2]}
    arrays = timm(reference())
    files.write_safetensors(tmp_path, arrays, {'pretrained_cfg': pretrained})
    imported = interop.read(tmp_path)
    assert imported.image_size == (24, 48) and imported.notes == ()
    kernel = arrays['patch_embed.proj.weight'].transpose(2, 3, 1, 0)
    np.testing.assert_array_equal(imported.params['patch_embed']['kernel'], kernel)
    assert imported.task.normalization == ((0.4, 0.5, 0.6), (0.2, 0.2, 0.2))


def test_an_absolute_embedding_is_refused(tmp_path):
    arrays = microsoft(reference()) | {'absolute_pos_embed': np.ones(2, np.float32)}
    files.write_safetensors(tmp_path / 'x.safetensors', arrays)
    with pytest.raises(UserError, match='absolute position embedding'):
        interop.read(tmp_path / 'x.safetensors')


@pytest.mark.parametrize(
    ('config', 'message'),
    [
        ({'global_pool': 'max'}, "global_pool 'max'"),
        ({'model_args': {'always_partition': True}}, 'always_partition'),
        ({'model_args': {'img_size': 20}}, 'do not tile'),
        ({'pretrained_cfg': {'input_size': [3, 24, 20]}}, 'do not tile'),
        ({'pretrained_cfg': {'input_size': [3, 24, 12]}}, 'along.*axis'),
    ],
)
def test_what_timm_computes_otherwise_is_refused(config, message, tmp_path):
    files.write_safetensors(tmp_path, timm(reference()), config)
    with pytest.raises(UserError, match=message):
        interop.read(tmp_path)
