"""Image encoders of Segment Anything: what they compute is what transformers and timm compute."""

import functools
import json

import numpy as np
import pytest
from helpers import timm_forms, timm_sam
from helpers.transformers_models import perturbed, theirs
from helpers.transformers_vit import apply, apply_with_states

import vit_jax
from vit_jax import interop
from vit_jax.errors import UserError
from vit_jax.interop import files

GOLDEN = json.loads(timm_sam.GOLDEN.read_text())
SIZE = {
    **{'hidden_size': 16, 'num_hidden_layers': 2, 'num_attention_heads': 2, 'image_size': 24},
    **{'patch_size': 4, 'output_channels': 8, 'mlp_dim': 24, 'window_size': 4},
    **{'global_attn_indexes': [1], 'num_pos_feats': 4},
}


def close(found, expected):
    expected = np.asarray(expected)
    assert found.shape == expected.shape
    np.testing.assert_allclose(found, expected, atol=1e-5 * np.abs(expected).max(), rtol=0)


@pytest.fixture(scope='module')
def reference():
    pytest.importorskip('torch')
    transformers = pytest.importorskip('transformers')
    config = transformers.SamVisionConfig(**SIZE)
    decoder = {'hidden_size': 8, 'num_hidden_layers': 1, 'num_attention_heads': 2, 'mlp_dim': 8}
    prompts = {'hidden_size': 8, 'image_size': 24, 'patch_size': 4, 'mask_input_channels': 4}
    whole = transformers.SamConfig(
        vision_config=config.to_dict(),
        prompt_encoder_config=prompts,
        mask_decoder_config={**decoder, 'iou_head_hidden_dim': 8},
    )
    return perturbed(transformers.SamModel(whole))


def named_by_authors(name):
    """The names of github.com/facebookresearch/segment-anything."""
    for ours, other in (
        *(('vision_encoder.', 'image_encoder.'), ('layers.', 'blocks.')),
        *(('patch_embed.projection', 'patch_embed.proj'), ('layer_norm', 'norm')),
        *(('neck.conv1', 'neck.0'), ('neck.norm1', 'neck.1')),
        *(('neck.conv2', 'neck.2'), ('neck.norm2', 'neck.3')),
    ):
        name = name.replace(ours, other)
    return name


@pytest.mark.parity
@pytest.mark.parametrize('form', ['transformers', pytest.param('authors', marks=pytest.mark.long)])
def test_features_and_hidden_states_of_transformers(form, reference, images, tmp_path):
    batch = images(2, 24, 24, 3)
    flat = {name: tensor.numpy() for name, tensor in reference.state_dict().items()}
    config = reference.config.to_dict()
    if form == 'authors':
        config = {'num_attention_heads': 2}  # the width is none of the published
        flat = {named_by_authors(name): array for name, array in flat.items()}
    files.write_safetensors(tmp_path, flat, config)
    imported = interop.read(tmp_path)
    assert imported.image_size == (24, 24)
    assert imported.model_config['global_blocks'] == (1,)
    (note,) = (note for note in imported.notes if 'ignored' in note)
    assert note.endswith('ignored: mask_decoder, prompt_encoder, shared_image_embedding')
    outputs, states = apply_with_states(imported.model, imported.params, batch)
    encoder = functools.partial(reference.vision_encoder, output_hidden_states=True)
    expected = theirs(encoder, batch)
    close(outputs['features'], expected.last_hidden_state.permute(0, 2, 3, 1))
    for ours, other in zip(states, expected.hidden_states, strict=True):
        close(ours, other.flatten(1, 2))


@pytest.mark.parity
@pytest.mark.parametrize('name', [*timm_sam.FORMS])
def test_logits_and_intermediates_of_timm(name, tmp_path):
    row = GOLDEN[name]
    files.write_safetensors(tmp_path, timm_forms.parameters(row['shapes']), row['config'])
    imported = interop.read(tmp_path)
    batch = timm_sam.images(timm_sam.SIDE)
    outputs, states = apply_with_states(imported.model, imported.params, batch)
    close(outputs['logits'], row['logits'])
    close(states[-1].swapaxes(1, 2), np.array(row['block']).reshape(1, 16, -1))


@pytest.mark.long
@pytest.mark.parametrize('name', [*timm_sam.FORMS])
def test_images_of_another_size(name, tmp_path):
    """32 pixels are two whole windows; timm interpolates both kinds of positions."""
    row = GOLDEN[name]
    files.write_safetensors(tmp_path, timm_forms.parameters(row['shapes']), row['config'])
    module, variables = vit_jax.load(tmp_path, image_size=(32, 32))
    found = apply(module, variables['params'], timm_sam.images(32))
    close(found['logits'], row['resized'])


def test_mistakes(tmp_path):
    row = GOLDEN['samvit_base_patch16']
    arrays = timm_forms.parameters(row['shapes'])
    for change, message in [
        ({'blocks.1.attn.rel_pos_w': np.ones((3, 8))}, 'blocks.1.attn.rel_pos_w.*shape'),
        ({'blocks.0.attn.gate.weight': np.ones((3, 8))}, 'called.*blocks.0.attn.gate'),
    ]:
        files.write_safetensors(tmp_path, arrays | change, row['config'])
        with pytest.raises(UserError, match=message):
            interop.read(tmp_path)
