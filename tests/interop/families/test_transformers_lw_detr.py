"""LW-DETRs of transformers are read, computed and written."""

import json

import jax
import numpy as np
import pytest
from helpers.round_trips import anew
from helpers.transformers_models import perturbed
from safetensors.numpy import load_file

from vit_jax import interop
from vit_jax.errors import UserError
from vit_jax.interop import files
from vit_jax.interop.families import transformers_lw_detr

pytest.importorskip('transformers')

GROUPS, SIDE = 3, 32


@pytest.fixture(scope='module')
def stored(tmp_path_factory):
    """A detector of transformers in training, but for its statistics; the folder of its files."""
    import torch
    import transformers

    torch.manual_seed(0)
    backbone = transformers.LwDetrViTConfig(
        **{'hidden_size': 16, 'num_hidden_layers': 4, 'num_attention_heads': 2, 'mlp_ratio': 2},
        **{'patch_size': 4, 'image_size': SIDE, 'pretrain_image_size': SIDE, 'num_windows': 4},
        **{'window_block_indices': [0, 2], 'out_indices': [1, 3]},
    )
    config = transformers.LwDetrConfig(
        **{'backbone_config': backbone, 'd_model': 32, 'decoder_layers': 2, 'num_labels': 3},
        **{'decoder_self_attention_heads': 2, 'decoder_cross_attention_heads': 4},
        **{'decoder_n_points': 2, 'decoder_ffn_dim': 16, 'num_queries': 5, 'group_detr': GROUPS},
        projector_scale_factors=[1.0],
    )
    model = perturbed(transformers.LwDetrForObjectDetection(config)).train()
    for module in model.modules():
        if isinstance(module, torch.nn.BatchNorm2d):
            module.eval()
            module.running_mean.normal_()
            module.running_var.uniform_(0.5, 2)
    folder = tmp_path_factory.mktemp('lw_detr')
    model.save_pretrained(folder)
    return model, folder


@pytest.mark.parity
def test_outputs_equal_those_of_transformers(stored):
    """Of a padded image too, with the groups of training."""
    import torch

    model, folder = stored
    trained = interop.read(folder)
    assert trained.model.global_blocks == (1,) and trained.model.map_layers == (1, 3)
    images = np.random.default_rng(0).normal(size=(2, SIDE, SIDE, 3)).astype(np.float32)
    mask = np.ones((2, SIDE, SIDE), bool)
    mask[1, 24:], mask[1, :, 28:] = False, False
    images[~mask] = 0
    with torch.no_grad():
        x = torch.from_numpy(images.transpose(0, 3, 1, 2))
        theirs = model(x, pixel_mask=torch.from_numpy(mask).long())
    apply = jax.jit(trained.model.apply, static_argnames='train')
    with jax.default_matmul_precision('highest'):
        found = apply(trained.variables, images, mask, train=True)
    shape = found['first_boxes'].shape
    expected = {
        **{'logits': theirs.logits, 'boxes': theirs.pred_boxes},
        'first_logits': theirs.enc_outputs_class.reshape(*shape[:-1], -1),
        'first_boxes': theirs.enc_outputs_coord_logits.reshape(shape),
    }
    for name, array in expected.items():
        scale = max(array.abs().max().item(), 1)
        np.testing.assert_allclose(found[name] / scale, array / scale, atol=1e-5, err_msg=name)


def test_files_are_read_and_written_again(stored, tmp_path):
    _, folder = stored
    trained = interop.read(folder)
    interop.write(anew(trained), tmp_path / 'ours')
    again = interop.read(tmp_path / 'ours')
    assert again.model == trained.model and again.task_config == trained.task_config
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6), again.params, trained.params
    )
    before, after = (load_file(path / 'model.safetensors') for path in (folder, tmp_path / 'ours'))
    assert before.keys() - after.keys() == {name for name in before if '.layer.3.' in name}
    assert after.keys() <= before.keys()
    config = json.loads((tmp_path / 'ours' / 'config.json').read_text())
    assert config['backbone_config']['window_block_indices'] == [0, 2]


@pytest.mark.parametrize(
    ('config', 'message'),
    [
        ({'projector_scale_factors': [2.0, 0.5]}, 'projector_scale_factors'),
        ({'backbone_config': {'patch_size': 4}}, 'out_indices'),
    ],
)
def test_other_models_are_refused(config, message, stored):
    flat, extra = files.read_arrays(stored[1])
    with pytest.raises(UserError, match=message):
        transformers_lw_detr.read(flat, {**extra, **config})
