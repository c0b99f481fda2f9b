"""Encoders of transformers of every form: what they compute is what transformers computes."""

import numpy as np
import pytest
from helpers import transformers_forms
from helpers.transformers_vit import apply

from vit_jax import interop

pytest.importorskip('torch')
pytest.importorskip('transformers')


@pytest.mark.parity
@pytest.mark.parametrize('form', transformers_forms.FORMS, ids=lambda form: form.label)
def test_outputs(form, tmp_path, images):
    made, batch = transformers_forms.model(form), images(2, 12, 12, 3)
    made.save_pretrained(tmp_path)
    imported = interop.read(f'{tmp_path}:{form.tower}' if form.tower else tmp_path)
    found = apply(imported.model, imported.params, batch)[form.ours]
    expected = transformers_forms.outputs(form, made, batch)
    assert found.shape == expected.shape
    np.testing.assert_allclose(found, expected, atol=1e-5 * np.abs(expected).max(), rtol=0)
