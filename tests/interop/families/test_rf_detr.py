"""RF-DETRs of transformers and of their authors are read, computed and written."""

import json

import jax
import numpy as np
import pytest
from helpers import doors
from helpers.round_trips import anew
from helpers.transformers_models import perturbed
from safetensors.numpy import load_file

from vit_jax import interop
from vit_jax.errors import UserError
from vit_jax.interop import files
from vit_jax.interop.families import rf_detr
from vit_jax.models.rf_detr import Model
from vit_jax.ops.masks import from_features

pytest.importorskip('transformers')

PREPROCESSOR = {
    **{'image_processor_type': 'RfDetrImageProcessor', 'size': {'height': 32, 'width': 32}},
    **{'image_mean': [0.4, 0.5, 0.6], 'image_std': [0.2, 0.3, 0.4]},
}
GROUPS = 3


@pytest.fixture(scope='module')
def stored(tmp_path_factory):
    """A detector of transformers with masks, and the folder of its files."""
    import torch
    import transformers

    torch.manual_seed(0)
    backbone = transformers.RfDetrDinov2Config(
        **{'hidden_size': 16, 'num_hidden_layers': 4, 'num_attention_heads': 2, 'mlp_ratio': 2},
        **{'patch_size': 4, 'image_size': 32, 'num_windows': 2},
        out_features=['stage1', 'stage3'],
    )
    config = transformers.RfDetrConfig(
        **{'backbone_config': backbone, 'd_model': 32, 'decoder_layers': 2, 'num_labels': 3},
        **{'decoder_self_attention_heads': 2, 'decoder_cross_attention_heads': 4},
        **{'decoder_n_points': 2, 'decoder_ffn_dim': 16, 'num_queries': 5, 'group_detr': GROUPS},
        **{'dropout': 0.0, 'mask_downsample_ratio': 2, 'intermediate_size': 24},
    )
    model = perturbed(transformers.RfDetrForInstanceSegmentation(config))
    folder = tmp_path_factory.mktemp('rf_detr')
    model.save_pretrained(folder)
    (folder / 'preprocessor_config.json').write_text(json.dumps(PREPROCESSOR))
    return model, folder


def compute_theirs(model, images, mask, train):
    """Outputs of all blocks and of the first stage, under our names."""
    import torch

    model = model.train(train).double()
    detector = model.model
    with torch.no_grad():
        x = torch.from_numpy(images.transpose(0, 3, 1, 2)).double()
        found = detector.model(x, pixel_mask=torch.from_numpy(mask).long())
        hidden = found.intermediate_hidden_states
        logits, boxes = detector.predict_class_and_boxes(
            hidden, found.intermediate_reference_points
        )
        first = detector.predict_encoder_class_logits(found.enc_outputs_class)
        maps, size = found.backbone_features, x.shape[-2:]
        of_first = model.segmentation_head(maps, found.enc_outputs_class, size, skip_blocks=True)
        masks = torch.stack([of_first, *model.segmentation_head(maps, hidden, size)], 1)
    shape = len(images), GROUPS if train else 1, model.config.num_queries
    return {
        **{'logits': logits[-1], 'boxes': boxes[-1]},
        **{'aux_logits': logits[:-1].swapaxes(0, 1), 'aux_boxes': boxes[:-1].swapaxes(0, 1)},
        'first_logits': first.reshape(*shape, -1),
        'first_boxes': found.enc_outputs_coord_logits.reshape(*shape, -1),
        **({'all_masks': masks} if train else {'all_masks': masks, 'masks': masks[:, -1]}),
    }


@pytest.mark.parity
@pytest.mark.parametrize('train', [True, pytest.param(False, marks=pytest.mark.long)])
def test_outputs_equal_those_of_transformers(train, stored):
    """Of a padded image too, and with the groups of training."""
    model, folder = stored
    trained = interop.read(folder)
    images = np.random.default_rng(0).normal(size=(2, 32, 32, 3)).astype(np.float32)
    mask = np.ones((2, 32, 32), bool)
    mask[1, 24:], mask[1, :, 28:] = False, False
    images[~mask] = 0
    expected = compute_theirs(model, images, mask, train)
    apply = jax.jit(trained.model.apply, static_argnames='train')
    with jax.default_matmul_precision('highest'):
        found = apply(trained.variables, images, mask, train=train)
    features = (found.pop(name) for name in ('mask_queries', 'mask_maps'))
    found['all_masks'] = from_features(*features)
    assert found.keys() == expected.keys()
    for name, array in expected.items():
        scale = max(array.abs().max().item(), 1)
        np.testing.assert_allclose(found[name] / scale, array / scale, atol=1e-5, err_msg=name)
    assert np.asarray(found['boxes']).std(axis=(0, 1)).min() > 0.002


def test_files_are_read_and_written_again(stored, tmp_path):
    """All arrays that outputs depend on come back bit for bit."""
    _, folder = stored
    trained = interop.read(folder)
    assert trained.task_config['name'] == 'segment_groups' and trained.model.masks.stride == 2
    assert trained.image_size == (32, 32) and trained.model.map_layers == (1, 3)
    assert trained.task_config['mean'] == (0.4, 0.5, 0.6)
    assert trained.transforms == "drop_alpha|resize((32, 32), 'bilinear')"
    interop.write(anew(trained), tmp_path / 'ours')
    again = interop.read(tmp_path / 'ours')
    assert again.model == trained.model and again.task_config == trained.task_config
    assert again.transforms == trained.transforms
    before, after = (load_file(path / 'model.safetensors') for path in (folder, tmp_path / 'ours'))
    left_out = {name for name in before if '.layer.3.' in name}
    assert before.keys() - left_out == after.keys() and left_out
    for name in after:
        if 'mask_token' not in name:
            np.testing.assert_array_equal(after[name], before[name], err_msg=name)


@pytest.mark.parametrize(
    ('array', 'config', 'message'),
    [
        ('bbox_embed.layers.1.bias', {}, 'bbox_embed.layers.1.bias'),
        ('', {'num_feature_levels': 2}, 'num_feature_levels'),
        ('segmentation_head.bias', {}, 'segmentation_head.bias'),
        ('', {'backbone_config': {'patch_size': 4}}, 'out_indices'),
        ('', {'group_detr': 2}, ''),
    ],
)
def test_incomplete_and_other_models_are_refused(array, config, message, stored):
    flat, extra = files.read_arrays(stored[1])
    changed = {name: x for name, x in flat.items() if name != array}
    if not message:  # shapes decide
        assert rf_detr.read(changed, {**extra, **config}).model.groups == GROUPS
        return
    with pytest.raises(UserError, match=message):
        rf_detr.read(changed, {**extra, **config})


@pytest.mark.long
def test_the_authors_files_are_read_without_a_config(tmp_path):
    """Their training states have the model next to other things."""
    torch = pytest.importorskip('torch')
    size = {'width': 64, 'depth': 12, 'mlp_dim': 64, 'num_heads': 1, 'block': {'gelu': 'erf'}}
    size['block'] |= {'layer_scale': 1e-5}
    detector = {'decoder_width': 32, 'decoder_depth': 1, 'decoder_heads': 1, 'cross_heads': 2}
    detector |= {'decoder_mlp_dim': 8, 'num_queries': 4, 'groups': 2, 'projector_blocks': 1}
    detector |= {'masks': {'stride': 4, 'mlp_dim': 8}}
    model = Model(num_classes=3, patch_size=16, maps=(3, 6, 9, 12), **size, **detector)
    trained = doors.trained(model)
    interop.write(trained, tmp_path / 'folder')
    arrays = load_file(tmp_path / 'folder' / 'model.safetensors')
    state = {'model': {name: torch.from_numpy(x) for name, x in arrays.items()}, 'epoch': 3}
    torch.save(state, tmp_path / 'rf-detr.pth')
    read = interop.read(tmp_path / 'rf-detr.pth')
    assert read.model == model and read.image_size == (32, 32)
    assert any('published' in note for note in read.notes)
    jax.tree.map(np.testing.assert_array_equal, read.params, trained.params)
