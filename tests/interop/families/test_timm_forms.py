"""ViTs of timm of every form: their logits are those that timm computes."""

import json

import numpy as np
import pytest
from helpers import timm_forms
from helpers.transformers_vit import apply

from vit_jax import interop
from vit_jax.interop import files

GOLDEN = json.loads(timm_forms.GOLDEN.read_text())


@pytest.mark.parity
@pytest.mark.parametrize('name', GOLDEN)
def test_logits(name, tmp_path):
    row = GOLDEN[name]
    files.write_safetensors(tmp_path, timm_forms.parameters(row['shapes']), row['config'])
    imported = interop.read(tmp_path)
    size = row['config']['pretrained_cfg']['input_size'][1]
    assert imported.image_size == (size, size)
    assert imported.notes == ()
    logits = apply(imported.model, imported.params, timm_forms.images(size))['logits'][0]
    scale = np.abs(row['logits']).max()
    np.testing.assert_allclose(logits, row['logits'], atol=1e-5 * scale, rtol=0)


def test_the_stored_outputs_are_those_of_timm():
    pytest.importorskip('timm')
    assert set(GOLDEN) == {name for _, name, _ in timm_forms.FORMS}
    for name, row in timm_forms.golden().items():
        np.testing.assert_allclose(row.pop('logits'), GOLDEN[name]['logits'], rtol=1e-4)
        assert row == {key: value for key, value in GOLDEN[name].items() if key != 'logits'}
