"""A file that is read and written in the same form is the same again, bit for bit.

`test_families` holds this for what every function of WRITERS makes.
"""

import json

import numpy as np
import pytest
from helpers import released, timm_forms, training
from helpers.round_trips import assert_comes_back, halved

from vit_jax import interop
from vit_jax.interop import files
from vit_jax.tree_paths import param_paths

TIMM = json.loads(timm_forms.GOLDEN.read_text())
FEW = ('DINOv2', 'CLIP, texts', 'beit_base_patch16_224')
# Forms whose family has to be named.
NAMED = {
    **{'swin timm': 'timm_swin:', 'vit timm': 'timm_vit:', 'bit_resnet timm': 'timm_bit:'},
    **{'mae authors': 'authors_mae:', 'detr authors': 'authors_detr:'},
    'detr_panoptic authors': 'authors_detr:',
}


def mostly_long(names):
    return [name if name in FEW else pytest.param(name, marks=pytest.mark.long) for name in names]


@pytest.mark.parametrize(
    'form',
    [
        form if 'npz' in form else pytest.param(form, marks=pytest.mark.long)
        for form in released.FORMS
    ],
)
def test_released_forms(form, tmp_path):
    assert_comes_back(released.write(form, tmp_path / 'made'), NAMED.get(form, ''))


@pytest.mark.parametrize('name', mostly_long(TIMM))
def test_vits_of_timm(name, tmp_path):
    row, place = TIMM[name], tmp_path / 'made'
    files.write_safetensors(place, timm_forms.parameters(row['shapes']), row['config'])
    assert_comes_back(place, 'timm_vit:')


@pytest.mark.parametrize('name', mostly_long(training.CASES))
def test_classes_of_transformers(name, tmp_path):
    pytest.importorskip('transformers')
    training.CASES[name]().make().save_pretrained(tmp_path / 'made')
    assert_comes_back(tmp_path / 'made')


def test_a_changed_model_is_written_anew(tmp_path):
    place = released.write('vit transformers', tmp_path / 'made')
    halved(place)
    read = interop.read(place)
    names = param_paths(read.params)
    read.params['head']['bias'] = read.params['head']['bias'] + 1
    interop.write(read, tmp_path / 'changed')
    again = interop.read(tmp_path / 'changed')
    for name, array in param_paths(again.params).items():
        np.testing.assert_array_equal(array, names[name] + (name == 'head/bias'))
    config = json.loads((tmp_path / 'changed' / 'config.json').read_text())
    assert 'of_another_version' not in config
    fields = read.model_config | {'norm_eps': 0.5}
    interop.write(interop.read(place).with_groups(model=fields), tmp_path / 'other')
    assert interop.read(tmp_path / 'other').model_config['norm_eps'] == 0.5
