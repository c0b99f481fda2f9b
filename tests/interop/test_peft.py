"""Adapters of `peft` 0.21.2 on a tiny ViT of transformers: its own files and outputs."""

import json
import pathlib
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import vit_jax
from vit_jax.errors import UserError

GOLDEN = pathlib.Path(__file__).resolve().parents[1] / 'golden' / 'peft'


@pytest.mark.parametrize('name', ['lora', 'dora'])
def test_outputs_are_those_of_peft(name):
    model, variables = vit_jax.load(GOLDEN / name, mean=0.5, std=0.5)
    golden = np.load(GOLDEN / 'outputs.npz')
    images = jnp.asarray(golden[f'{name}_images'])
    found = jax.jit(model.apply)(variables, images)['logits']
    np.testing.assert_allclose(found, golden[name], atol=1e-5)
    base = vit_jax.load(GOLDEN / 'base', mean=0.5, std=0.5)[1]
    plain = jax.jit(model.apply)(base, images)
    assert np.abs(plain['logits'] - golden[name]).max() > 0.05


@pytest.mark.parametrize(
    ('changes', 'message'),
    [
        ({'peft_type': 'IA3'}, "adapters of type 'IA3'"),
        ({'fan_in_fan_out': True}, 'fan_in_fan_out, lora_bias and layer_replication'),
        (
            {'base_model_name_or_path': '../gone/x/y'},
            'adapter_config.json: base_model_name_or_path',
        ),
    ],
)
def test_other_adapters_are_refused(changes, message, tmp_path):
    shutil.copytree(GOLDEN / 'lora', tmp_path / 'lora')
    file = tmp_path / 'lora' / 'adapter_config.json'
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))
    with pytest.raises(UserError, match=message):
        vit_jax.load(tmp_path / 'lora')
