"""ViTs of timm of every form: their logits are those that timm computes."""

import contextlib
import json

import numpy as np
import pytest
from helpers import timm_forms
from helpers.messages import says
from helpers.round_trips import anew
from helpers.transformers_vit import apply, apply_with_states, normalized, ours

import vit_jax
from vit_jax import interop
from vit_jax.errors import UserError
from vit_jax.interop import files
from vit_jax.interop.trained import TrainedModel, fields
from vit_jax.models import vit

GOLDEN = json.loads(timm_forms.GOLDEN.read_text())


@pytest.mark.slow
@pytest.mark.parity
@pytest.mark.parametrize('name', GOLDEN)
def test_logits_and_intermediates(name, tmp_path):
    row = GOLDEN[name]
    files.write_safetensors(tmp_path, timm_forms.parameters(row['shapes']), row['config'])
    imported = interop.read(tmp_path)
    size = row['config']['pretrained_cfg']['input_size'][1]
    assert imported.image_size == (size, size)
    assert imported.notes == ()
    batch = normalized(imported, timm_forms.images(size))
    outputs, states = apply_with_states(imported.model, imported.params, batch)
    norm = imported.model.final_norm_of(imported.params)
    normed = states[-1] if norm is None else norm(states[-1])
    for key, found, tolerance in (
        ('logits', outputs['logits'][0], 1e-5),
        ('block', states[-1][0, -1], 2e-5),
        ('normed', normed[0, -1], 2e-5),
    ):
        atol = tolerance * np.abs(row[key]).max()
        np.testing.assert_allclose(found, row[key], atol=atol, rtol=0, err_msg=key)


@pytest.mark.slow
@pytest.mark.parametrize(
    ('family', 'name'),
    [
        pytest.param(*form[:2], marks=[pytest.mark.long] if 'hybrids' in form[0] else [])
        for form in timm_forms.FORMS
    ],
)
def test_what_is_written(family, name, tmp_path):
    """The arrays are those of timm, bit for bit, and the model computes the same again."""
    row = GOLDEN[name]
    files.write_safetensors(tmp_path, timm_forms.parameters(row['shapes']), row['config'])
    imported, folder = interop.read(tmp_path), tmp_path / 'written'
    if family not in timm_forms.WRITTEN:
        with pytest.raises(UserError, match=r'timm|cannot be written'):
            interop.write(anew(imported), f'timm_vit:{folder}')
        return
    assert interop.write(anew(imported), f'timm_vit:{folder}') == ()
    arrays, _ = files.read_arrays(folder)
    if family not in ('EVA', 'NaFlexViT'):  # which have other biases, and other names
        given = timm_forms.parameters(row['shapes'])
        assert arrays.keys() == given.keys()
        assert all(np.array_equal(arrays[key], given[key]) for key in given)
    again = interop.read(folder)
    size = row['config']['pretrained_cfg']['input_size'][1]
    batch, scale = timm_forms.images(size), np.abs(row['logits']).max()
    assert again.notes == () and again.image_size == (size, size)
    assert again.transforms == imported.transforms
    logits = ours(again, batch)['logits'][0]
    np.testing.assert_allclose(logits, row['logits'], atol=1e-5 * scale, rtol=0)
    with contextlib.suppress(ImportError):
        assert timm_forms.loaded_logits(folder, batch) == pytest.approx(
            row['logits'], abs=1e-5 * scale
        )


# One of each way to place positions.
_PLACED = (
    *('vit_tiny_patch16_224', 'beit_base_patch16_224', 'flexivit_small'),
    *('vit_small_patch14_reg4_dinov2', 'vit_base_patch16_radio_v3', 'vit_small_patch16_dinov3'),
)


@pytest.mark.slow
@pytest.mark.parametrize(
    'name',
    [n if n in _PLACED else pytest.param(n, marks=pytest.mark.long) for n in GOLDEN],
)
def test_images_of_another_size(name, tmp_path):
    """Positions and biases are interpolated as timm does."""
    row = GOLDEN[name]
    files.write_safetensors(tmp_path, timm_forms.parameters(row['shapes']), row['config'])
    size = 2 * row['config']['pretrained_cfg']['input_size'][1]
    module, variables = vit_jax.load(tmp_path, image_size=size)
    logits = apply(module, variables['params'], timm_forms.images(size))['logits'][0]
    scale = np.abs(row['resized']).max()
    np.testing.assert_allclose(logits, row['resized'], atol=1e-5 * scale, rtol=0)


@pytest.mark.parametrize(
    ('name', 'method'),
    [
        ('flexivit_small', 'linear'),
        ('vit_base_patch16_radio_v3', 'bilinear'),
        ('vit_small_patch14_dinov2', 'antialiased'),
    ],
)
def test_positions_are_interpolated_as_the_architecture_does(name, method, tmp_path):
    row = GOLDEN[name]
    files.write_safetensors(tmp_path, timm_forms.parameters(row['shapes']), row['config'])
    assert interop.read(tmp_path).positions == method


def test_numbers_that_timm_lacks_are_noted(tmp_path):
    """And the names of classes are kept."""
    row = GOLDEN['vit_tiny_patch16_224']
    arguments = {**row['config']['model_args'], 'norm_layer': 'LayerNorm(eps=1e-3)'}
    config = {**row['config'], 'model_args': arguments, 'label_names': ['cat', 'dog', 'horse']}
    files.write_safetensors(tmp_path, timm_forms.parameters(row['shapes']), config)
    notes = interop.write(anew(interop.read(tmp_path)), f'timm_vit:{tmp_path / "written"}')
    assert says(notes, 'norms', '1e-06', '0.001')
    assert interop.read(tmp_path / 'written').class_names == ('cat', 'dog', 'horse')


@pytest.mark.slow
@pytest.mark.parametrize('pool', ['cls', 'gap'])
def test_fixed_positions_are_written_as_a_table(pool, tmp_path, images, perturbed):
    module = vit.Model(
        **{'num_classes': 3, 'patch_size': 4, 'width': 16, 'depth': 1, 'mlp_dim': 16},
        **{'num_heads': 2, 'pool': pool, 'fc_norm': False, 'posemb': 'sincos2d'},
    )
    batch = images(2, 12, 8, 3)
    params = perturbed(module, batch)
    config = {'name': 'vit', **fields(module)}
    trained = TrainedModel.from_file(params, config, (12, 8), 'a test')
    interop.write(trained, f'timm_vit:{tmp_path / "written"}')
    again = interop.read(tmp_path / 'written')
    assert again.model_config['posemb'] == 'learn'
    expected = apply(module, params, batch)['logits']
    logits = ours(again, batch)['logits']
    np.testing.assert_allclose(logits, expected, atol=1e-5)
    with contextlib.suppress(ImportError):
        theirs = timm_forms.loaded_logits(tmp_path / 'written', np.asarray(batch))
        np.testing.assert_allclose(theirs, expected[0], atol=1e-5)


def test_the_stored_outputs_are_those_of_timm():
    pytest.importorskip('timm')
    assert set(GOLDEN) == {name for _, name, _ in timm_forms.FORMS}
    for name, row in timm_forms.golden().items():
        stored = dict(GOLDEN[name])
        for key in ('logits', 'resized'):
            np.testing.assert_allclose(row.pop(key), stored.pop(key), rtol=1e-4)
        assert row == stored
