"""Depth Anythings and DPTs of transformers are read, computed and written."""

import dataclasses
import json
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers.transformers_models import perturbed, theirs
from safetensors.numpy import load_file

import vit_jax
from vit_jax import interop
from vit_jax.errors import UserError
from vit_jax.interop import files
from vit_jax.interop.families import transformers_depth

pytest.importorskip('transformers')

VIT = {
    **{'hidden_size': 16, 'num_hidden_layers': 4, 'num_attention_heads': 2, 'patch_size': 8},
    **{'image_size': 40},
}
HEAD = {'neck_hidden_sizes': [4, 6, 8, 10], 'fusion_hidden_size': 8}
PREPROCESSOR = {
    **{'image_processor_type': 'DPTImageProcessor', 'size': {'height': 40, 'width': 40}},
    **{'resample': 3, 'keep_aspect_ratio': True, 'ensure_multiple_of': 8},
    **{'image_mean': [0.4, 0.5, 0.6], 'image_std': [0.2, 0.3, 0.4]},
}


def reference(kind):
    import torch
    import transformers

    torch.manual_seed(0)
    if kind.startswith('anything'):
        dinov2 = transformers.Dinov2Config(
            **VIT, mlp_ratio=2, out_indices=[1, 2, 3, 4], reshape_hidden_states=False
        )
        metric = {'depth_estimation_type': 'metric', 'max_depth': 20} if 'metric' in kind else {}
        config = transformers.DepthAnythingConfig(
            **{'backbone_config': dinov2, 'reassemble_hidden_size': 16, 'patch_size': 8},
            **{'head_hidden_size': 5, **HEAD, **metric},
        )
        return perturbed(transformers.DepthAnythingForDepthEstimation(config), moderate)
    if kind == 'dpt dinov2':
        dinov2 = transformers.Dinov2Config(
            **{**VIT, 'mlp_ratio': 2, 'out_indices': [1, 2, 3, 4]},
            **{'reshape_hidden_states': False, 'apply_layernorm': False},
        )
        options = {'backbone_config': dinov2, 'use_bias_in_fusion_residual': False}
    else:
        options = {**VIT, 'intermediate_size': 24, 'backbone_out_indices': [0, 1, 2, 3]}
        options['readout_type'] = kind.removeprefix('dpt ')
    config = transformers.DPTConfig(**options, **HEAD)
    return perturbed(transformers.DPTForDepthEstimation(config), moderate)


def moderate(name, p):
    """Kernels of gain one, so that rounding does not grow, and depth that is mostly positive."""
    import torch

    if name in ('head.conv3.bias', 'head.head.4.bias'):
        return torch.ones(1)
    fan_in = p[0].numel() if 'resize' not in name else p.shape[0]
    return torch.randn(p.shape) * fan_in**-0.5 if p.ndim > 1 and 'weight' in name else None


def saved(kind, folder):
    model = reference(kind)
    model.save_pretrained(folder)
    (folder / 'preprocessor_config.json').write_text(json.dumps(PREPROCESSOR))
    return model


KINDS = ['anything', 'dpt project']
KINDS += [
    pytest.param(kind, marks=pytest.mark.long)
    for kind in ('anything metric', 'dpt ignore', 'dpt add', 'dpt dinov2')
]


@pytest.mark.parity
@pytest.mark.parametrize('kind', KINDS)
def test_depth_equals_that_of_transformers(kind, tmp_path):
    """At the size of the positions and at another one, where the grid is odd or even."""
    model = saved(kind, tmp_path).double()
    # transformers' DPT with a plain ViT takes squares.
    is_plain = kind in ('dpt project', 'dpt ignore', 'dpt add')
    sizes = [(40, 40), (48, 48) if is_plain else (32, 56)]
    for size in sizes:
        images = np.random.default_rng(0).uniform(-1, 1, (2, *size, 3)).astype(np.float32)
        ours, variables = vit_jax.load(tmp_path, image_size=size)
        # `load` takes images in [-1, 1].
        mean, std = (np.array(PREPROCESSOR[f'image_{x}']) for x in ('mean', 'std'))
        expected = theirs(model, (images / 2 + 0.5 - mean) / std).predicted_depth.numpy()
        depth = np.asarray(jax.jit(ours.apply)(variables, jnp.asarray(images))['depth'])
        assert (expected > 0).mean() > 0.1 and depth.shape == expected.shape
        scale = np.abs(expected).max()
        np.testing.assert_allclose(depth / scale, expected / scale, atol=1e-5)


@pytest.mark.parametrize(
    'kind', ['anything metric', pytest.param('dpt dinov2', marks=pytest.mark.long)]
)
def test_files_are_read_and_written_again(kind, tmp_path):
    """All arrays that outputs depend on come back bit for bit, also after a change of the model."""
    saved(kind, tmp_path / 'theirs')
    trained = interop.read(tmp_path / 'theirs')
    assert trained.image_size == (40, 40) and trained.channels == 3
    assert trained.task.normalization == ((0.4, 0.5, 0.6), (0.2, 0.3, 0.4))
    assert trained.task.output == 'meters'
    assert any('aspect ratio' in note for note in trained.notes)
    anew = dataclasses.replace(trained, origin='')
    interop.write(anew, tmp_path / 'ours')
    again = interop.read(tmp_path / 'ours')
    assert again.model == trained.model and again.task == trained.task
    assert again.transforms == trained.transforms
    before, after = (load_file(tmp_path / who / 'model.safetensors') for who in ('theirs', 'ours'))
    assert before.keys() <= after.keys()
    for name, array in before.items():
        if not re.search(r'layers\.0\.residual_layer1|mask_token|^backbone.layernorm', name):
            np.testing.assert_array_equal(after[name], array, err_msg=name)


@pytest.mark.parametrize(
    ('change', 'message'),
    [
        ({'dpt.embeddings.backbone.bit.stem.weight': [1.0]}, 'hybrid'),
        ({'neck.reassemble_stage.layers.0.projection.weight': None}, 'hierarchical'),
        ({'head.head.4.bias': None}, 'not a model of depth'),
        ({'head.projection.weight': [1.0]}, 'add_projection'),
        ({'neck.fusion_stage.layers.1.residual_layer2.batch_norm1.weight': [1.0]}, 'batch norm'),
        ({'neck.convs.1.weight': np.zeros((8, 7, 3, 3), np.float32)}, 'neck.convs.1.weight'),
    ],
)
def test_other_models_with_such_a_neck_are_refused(change, message, stored):
    flat, extra = stored
    changed = {name: np.array(x) for name, x in (flat | change).items() if x is not None}
    assert transformers_depth.matches(changed)
    with pytest.raises(UserError, match=message):
        transformers_depth.read(changed, extra)


@pytest.fixture(scope='module')
def stored(tmp_path_factory):
    """The arrays and config.json of a DPT."""
    folder = tmp_path_factory.mktemp('dpt')
    saved('dpt project', folder)
    flat, extra = files.read_arrays(folder)
    return dict(flat), extra
