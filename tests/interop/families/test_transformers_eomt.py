"""EoMTs of transformers are read, and written again bit for bit."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import eomt as helper
from safetensors.numpy import load_file, save_file

from vit_jax import interop
from vit_jax.errors import UserError
from vit_jax.inference import load
from vit_jax.interop import names
from vit_jax.models.eomt import ENCODER

pytest.importorskip('transformers')

PREPROCESSOR = {
    **{'image_processor_type': 'EomtImageProcessor', 'do_pad': True, 'do_split_image': False},
    **{'size': {'shortest_edge': 32, 'longest_edge': 32}, 'resample': 2},
    **{'image_mean': [0.4, 0.5, 0.6], 'image_std': [0.2, 0.3, 0.4]},
}


def saved(folder, preprocessor=None, **changes):
    theirs = helper.reference(**changes)
    theirs.attn_mask_probs.zero_()
    theirs.save_pretrained(folder)
    told = PREPROCESSOR if preprocessor is None else PREPROCESSOR | preprocessor
    (folder / 'preprocessor_config.json').write_text(json.dumps(told))
    return theirs


@pytest.mark.parametrize('dinov3', [False, pytest.param(True, marks=pytest.mark.long)])
def test_files_are_read_and_written_bit_for_bit(tmp_path, dinov3):
    saved(tmp_path / 'theirs', dinov3=dinov3)
    trained = interop.read(tmp_path / 'theirs')
    assert trained.notes == () and trained.image_size == (32, 32)
    model, task = trained.model_config, trained.task_config
    assert (model['name'], model['query_blocks'], model['upscale']) == ('eomt', 2, 2)
    assert model['num_classes'] == helper.CLASSES and model['num_queries'] == helper.QUERIES
    assert task['kind'] == 'instance' and task['points'] == helper.POINTS
    assert trained.task.normalization == ((0.4, 0.5, 0.6), (0.2, 0.3, 0.4))
    assert trained.data.sizes == ((32, 32),)
    assert trained.channels == 3
    assert load.backbone(trained).params.keys() == trained.params.keys() & set(ENCODER)
    (tmp_path / 'ours').mkdir()
    interop.write(trained, tmp_path / 'ours' / 'model.safetensors')
    before, after = (load_file(tmp_path / who / 'model.safetensors') for who in ('theirs', 'ours'))
    assert before.keys() == after.keys()
    for name, array in before.items():
        np.testing.assert_array_equal(after[name], array, err_msg=name)
    assert json.loads((tmp_path / 'ours/preprocessor_config.json').read_text())['do_pad']
    again = interop.read(tmp_path / 'ours')
    assert again.model_config == model and again.task_config == task


@pytest.mark.long
@pytest.mark.parametrize('dinov3', [False, True])
def test_transformers_computes_the_same_from_our_files(tmp_path, dinov3):
    import torch
    import transformers

    theirs = saved(tmp_path / 'theirs', dinov3=dinov3)
    trained = interop.read(tmp_path / 'theirs')
    (tmp_path / 'ours').mkdir()
    interop.write(trained, tmp_path / 'ours' / 'model.safetensors')
    name = 'EomtDinov3' if dinov3 else 'Eomt'
    again = getattr(transformers, f'{name}ForUniversalSegmentation').from_pretrained(
        tmp_path / 'ours'
    )
    pixels = helper.inputs(helper.batch())['pixel_values']
    with torch.no_grad():
        expected, found = (model.eval()(pixels) for model in (theirs, again))
    assert torch.equal(found.masks_queries_logits, expected.masks_queries_logits)
    assert torch.equal(found.class_queries_logits, expected.class_queries_logits)
    assert again.config.train_num_points == helper.POINTS


@pytest.mark.parametrize(
    ('told', 'classes', 'kind', 'stuff'),
    [
        ({'do_split_image': True}, 5, 'semantic', 0),
        ({}, 133, 'panoptic', 53),
        ({}, 150, 'panoptic', 50),
        ({}, 80, 'instance', 0),
    ],
)
def test_kind_of_segmentation(told, classes, kind, stuff):
    from vit_jax.interop.families import transformers_eomt

    extra = {'preprocessor_config.json': PREPROCESSOR | told}
    task = transformers_eomt._task(extra, classes)
    assert task['kind'] == kind and len(task.get('stuff', ())) == stuff


def test_windows_are_those_of_the_processor_of_transformers():
    from transformers.models.eomt.image_processing_pil_eomt import EomtImageProcessorPil

    from vit_jax.data.transforms import parse_transforms
    from vit_jax.interop.families import transformers_eomt

    told = PREPROCESSOR | {'do_split_image': True}
    told['size'] = {'shortest_edge': 32, 'longest_edge': None}
    data = transformers_eomt.prepare({'preprocessor_config.json': told}, None)
    assert data == {'transforms': "drop_alpha|sliding_windows(32, rounding='down')"}
    theirs = EomtImageProcessorPil(**told | {'do_normalize': False, 'do_rescale': False})
    rng = np.random.default_rng(0)
    for size in ((100, 77), (77, 101), (64, 64), (50, 131)):
        image = rng.integers(0, 256, (*size, 3), np.uint8)
        expected = theirs(images=image, return_tensors='np')
        found = parse_transforms(data['transforms'])({'image': image}, rng)
        used = found['starts'] >= 0
        assert [start for _, start, _ in expected['patch_offsets']] == found['starts'][
            used
        ].tolist()
        windows = found['image'][used].transpose(0, 3, 1, 2)
        np.testing.assert_array_equal(windows, expected['pixel_values'])


@pytest.mark.long
def test_files_that_are_no_whole_model(tmp_path):
    saved(tmp_path)
    file = tmp_path / 'model.safetensors'
    arrays = load_file(file)
    for change, message in (
        ({'mask_head.fc2.bias': None}, 'mask_head.fc2.bias'),
        ({'class_predictor.weight': np.zeros((5, 7), np.float32)}, 'class_predictor.weight'),
        ({'layers.0.norm1.bias': None}, 'layers.0.norm1.bias'),
    ):
        changed = {name: x for name, x in (arrays | change).items() if x is not None}
        save_file(changed, file)
        with pytest.raises(UserError, match=message):
            interop.read(tmp_path)
    save_file(arrays | {'attn_mask_probs': np.ones(2, np.float32)}, file)
    assert 'masks attention' in ' '.join(interop.read(tmp_path).notes)


@pytest.mark.long
def test_a_model_trained_here_is_written_for_transformers(tmp_path):
    """Positions with a row for the class token become those of patches and the token itself."""
    import dataclasses

    saved(tmp_path)
    trained = interop.read(tmp_path)
    table = np.concatenate([np.ones((1, 1, 32)), trained.params['pos_embed']], axis=1)
    own = dataclasses.replace(
        trained, params=trained.params | {'pos_embed': table.astype(np.float32)}
    ).with_groups(model=trained.model_config | {'posemb_prefix': 'class'})
    (tmp_path / 'ours').mkdir()
    interop.write(own, tmp_path / 'ours' / 'model.safetensors')
    again = interop.read(tmp_path / 'ours')
    images = jnp.zeros((1, 32, 32, 3))
    first, second = (
        jax.jit(t.model.apply)({'params': t.params}, images)['masks'] for t in (own, again)
    )
    np.testing.assert_allclose(first, second, atol=1e-4)
    assert names.flatten(again.params)['cls_token'].shape == (1, 1, 32)
