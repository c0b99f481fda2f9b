"""Swins v2 CR: their outputs are those of timm, stored by `helpers.timm_swin_cr`."""

import json

import numpy as np
import pytest
from helpers import timm_forms, timm_swin_cr
from helpers.round_trips import assert_comes_back
from helpers.transformers_vit import apply_with_states

from vit_jax import interop
from vit_jax.errors import UserError
from vit_jax.interop import files

ROWS = json.loads(timm_swin_cr.GOLDEN.read_text())
FIRST, *OTHERS = ROWS
NORMS = {
    'swinv2_cr_tiny_224': (),
    'swinv2_cr_tiny_ns_224': ((0, 1), (1, 2)),
    'swinv2_cr_huge_224': ((0, 1), (1, 1)),
}


def save(folder, name=FIRST, arrays=(), **config):
    row = ROWS[name]
    flat = timm_forms.parameters(row['shapes']) | dict(arrays)
    files.write_safetensors(folder, flat, row['config'] | config)
    return folder


@pytest.mark.parity
@pytest.mark.parametrize(
    'name', [*(pytest.param(n, marks=pytest.mark.long) for n in OTHERS), FIRST]
)
def test_outputs(name, tmp_path):
    imported, row = interop.read(save(tmp_path, name)), ROWS[name]
    assert imported.notes == () and imported.image_size == (timm_swin_cr.SIDE,) * 2
    assert imported.model_config['extra_norms'] == NORMS[name]
    outputs, states = apply_with_states(
        imported.model, imported.params, timm_forms.images(timm_swin_cr.SIDE)
    )
    scale = np.abs(row['logits']).max()
    np.testing.assert_allclose(outputs['logits'][0], row['logits'], atol=1e-5 * scale, rtol=0)
    # The norm after the last block is the model's own, which comes after the last state.
    for state, expected in zip(states[1:-1], row['stages'][:-1], strict=True):
        scale = np.abs(expected).max()
        np.testing.assert_allclose(state[0, -1], expected, atol=1e-5 * scale, rtol=0)


def test_it_comes_back(tmp_path):
    assert_comes_back(save(tmp_path / 'made'), 'timm_swin_cr:')


@pytest.mark.parametrize(
    ('changed', 'message'),
    [
        ({'model_args': {'window_size': [4, 8]}}, r'window_size \[4, 8\] is not supported'),
        ({'model_args': {'window_ratio': [8, 4]}}, r'window_ratio \[8, 4\] is not supported'),
        ({'model_args': {'always_partition': True, 'window_size': 4}}, 'always_partition'),
        ({'global_pool': 'max'}, "global_pool 'max'"),
        ({'pretrained_cfg': {'input_size': [3, 32, 64]}, 'model_args': {}}, 'squares'),
        ({'architecture': 'x', 'pretrained_cfg': {}, 'model_args': {}}, 'known.*size'),
        ({'model_args': {'window_size': 3}}, r'do .* 8 .* 0'),
    ],
)
def test_what_timm_computes_otherwise_is_refused(changed, message, tmp_path):
    with pytest.raises(UserError, match=message):
        interop.read(save(tmp_path, **changed))


def test_old_names_are_refused(tmp_path):
    """timm's first files had the inverse of `logit_scale`."""
    tau = {'stages.0.blocks.0.attn.tau': np.ones(1, np.float32)}
    with pytest.raises(UserError, match=r'called.*stages\.0\.blocks\.0\.attn\.tau'):
        interop.read(save(tmp_path, arrays=tau))


def test_the_stored_outputs_are_those_of_timm():
    pytest.importorskip('timm')
    for name, row in timm_swin_cr.golden().items():
        assert row['shapes'] == ROWS[name]['shapes']
        np.testing.assert_allclose(row['logits'], ROWS[name]['logits'], rtol=1e-4)
