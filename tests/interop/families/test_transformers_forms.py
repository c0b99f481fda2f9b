"""Encoders of transformers of every form: what they compute is what transformers computes."""

import json

import numpy as np
import pytest
from helpers import transformers_forms
from helpers.round_trips import anew
from helpers.transformers_vit import apply, apply_with_states

import vit_jax
from vit_jax import interop
from vit_jax.errors import UserError

pytest.importorskip('torch')
transformers = pytest.importorskip('transformers')


@pytest.mark.slow
@pytest.mark.parity
@pytest.mark.parametrize('form', transformers_forms.FORMS, ids=lambda form: form.label)
def test_outputs_and_hidden_states(form, tmp_path, images):
    made, batch = transformers_forms.model(form), images(2, 12, 12, 3)
    made.save_pretrained(tmp_path)
    imported = interop.read(f'{tmp_path}:{form.tower}' if form.tower else tmp_path)
    outputs, states = apply_with_states(imported.model, imported.params, batch)
    found, expected = outputs[form.ours], transformers_forms.outputs(form, made, batch)
    assert found.shape == expected.shape
    np.testing.assert_allclose(found, expected, atol=1e-5 * np.abs(expected).max(), rtol=0)
    theirs = transformers_forms.hidden_states(form, made, batch)
    assert len(states) == len(theirs)
    for ours, other in zip(states, theirs, strict=True):
        np.testing.assert_allclose(ours, other, atol=1e-5 * np.abs(other).max(), rtol=0)


@pytest.mark.slow
@pytest.mark.parametrize('size', [(24, 20), (8, 8)], ids=['larger', 'smaller'])
@pytest.mark.parametrize('form', transformers_forms.RESIZED, ids=lambda form: form.label)
def test_images_of_another_size(form, size, tmp_path, images):
    """Positions and biases are interpolated as the class itself does."""
    made, batch = transformers_forms.model(form), images(2, *size, 3)
    made.save_pretrained(tmp_path)
    module, variables = vit_jax.load(tmp_path, image_size=size)
    found = apply(module, variables['params'], batch)[form.ours]
    expected = transformers_forms.outputs(form, made, batch, resized=True)
    np.testing.assert_allclose(found, expected, atol=1e-5 * np.abs(expected).max(), rtol=0)


@pytest.mark.slow
@pytest.mark.parametrize('form', transformers_forms.FORMS, ids=lambda form: form.label)
def test_what_is_written(form, tmp_path, images):
    """transformers reads it whole, as the class that it came from, and computes the same."""
    made, batch = transformers_forms.model(form), images(2, 12, 12, 3)
    made.save_pretrained(tmp_path / 'theirs')
    place = tmp_path / 'theirs'
    imported = interop.read(f'{place}:{form.tower}' if form.tower else place)
    folder = tmp_path / 'ours'
    if form.written is None:
        with pytest.raises(UserError, match=r'transformers.*model'):
            interop.write(anew(imported), folder)
        return
    interop.write(anew(imported), folder)
    config = json.loads((folder / 'config.json').read_text())
    assert config['architectures'] == [form.written or form.model]
    loaded, report = getattr(transformers, config['architectures'][0]).from_pretrained(
        folder, output_loading_info=True
    )
    assert not any(report[f'{fault}_keys'] for fault in ('missing', 'unexpected', 'mismatched'))
    expected = transformers_forms.outputs(form, made, batch)
    found = transformers_forms.outputs(form._replace(tower='', family=''), loaded.eval(), batch)
    np.testing.assert_allclose(found, expected, atol=1e-5 * np.abs(expected).max(), rtol=0)
    processor = transformers.AutoImageProcessor.from_pretrained(folder)
    assert (*processor.image_mean, processor.size['height']) == (0.5, 0.5, 0.5, 12)


@pytest.mark.parametrize(
    ('name', 'words'),
    [
        ('MLCDVision', 'MLCD'),
        ('Aimv2Vision', "config.json .* 'aimv2_vision_model'"),
    ],
)
def test_other_models_are_refused_with_the_reason(name, words, tmp_path):
    config = getattr(transformers, f'{name}Config')(**transformers_forms.SHAPE)
    getattr(transformers, f'{name}Model')(config).save_pretrained(tmp_path)
    with pytest.raises(UserError, match=words):
        interop.read(tmp_path)
