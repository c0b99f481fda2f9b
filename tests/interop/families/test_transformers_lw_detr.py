"""LW-DETRs of transformers are read, computed and written."""

import json
import re

import jax
import numpy as np
import pytest
from helpers import lw_detr
from helpers.round_trips import anew
from safetensors.numpy import load_file

from vit_jax import interop
from vit_jax.errors import UserError
from vit_jax.interop import files
from vit_jax.interop.families import transformers_lw_detr

pytest.importorskip('transformers')

# Scales of the maps, width, windows along each side, side of the images, and how points are
# sampled. The sides of the wide one's maps are odd, and its maps get fewer channels.
CASES = {
    'one map': ([1.0], 16, 2, 32, 'gather'),
    'two maps': ([2.0, 0.5], 16, 2, 32, 'gather'),
    'two maps, wide': ([2.0, 0.5], 516, 1, 28, 'product'),
}


@pytest.fixture(
    scope='module',
    params=[pytest.param(name, marks=[pytest.mark.long] * name.endswith('wide')) for name in CASES],
)
def stored(request, tmp_path_factory):
    """A detector of transformers, and the folder of its files."""
    *form, _ = CASES[request.param]
    model = lw_detr.reference(*form)
    folder = tmp_path_factory.mktemp('lw_detr')
    model.save_pretrained(folder)
    return model, folder


@pytest.mark.parity
def test_outputs_equal_those_of_transformers(request, stored):
    """Of a padded image too, with the groups of training."""
    import torch

    model, folder = stored
    scales, width, _, side, sampling = CASES[request.node.callspec.params['stored']]
    tolerance = 1e-5 if width < 100 else 3e-4  # torch's own in float64 and float32 differ by 2e-5
    trained = interop.read(folder)
    assert trained.model.global_blocks == (1,) and trained.model.map_layers == (1, 3)
    assert trained.model.neck.scales == tuple(scales) and trained.model.cross.points == 2
    images = np.random.default_rng(0).normal(size=(2, side, side, 3)).astype(np.float32)
    mask = np.ones((2, side, side), bool)
    mask[1, side - 8 :], mask[1, :, side - 4 :] = False, False
    images[~mask] = 0
    with torch.no_grad():
        x = torch.from_numpy(images.transpose(0, 3, 1, 2))
        theirs = model(x, pixel_mask=torch.from_numpy(mask).long())
    apply = jax.jit(trained.model.clone(sampling=sampling).apply, static_argnames='train')
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
        np.testing.assert_allclose(found[name] / scale, array / scale, atol=tolerance, err_msg=name)


def test_files_are_read_and_written_again(stored, tmp_path):
    _, folder = stored
    trained = interop.read(folder)
    interop.write(anew(trained), tmp_path / 'ours')
    again = interop.read(tmp_path / 'ours')
    assert again.model == trained.model and again.task_config == trained.task_config
    jax.tree.map(np.testing.assert_array_equal, again.params, trained.params)
    before, after = (load_file(path / 'model.safetensors') for path in (folder, tmp_path / 'ours'))
    assert before.keys() - after.keys() == {name for name in before if '.layer.3.' in name}
    assert after.keys() <= before.keys()
    changed = (
        r'(projector|sampling)_layers?\..*norm|position_embeddings'  # statistics, a class token
    )
    for name in (name for name in after if not re.search(changed, name)):
        np.testing.assert_array_equal(after[name], before[name], err_msg=name)
    config = json.loads((tmp_path / 'ours' / 'config.json').read_text())
    assert config['backbone_config']['window_block_indices'] == [0, 2]


@pytest.mark.parametrize('stored', ['one map'], indirect=True)
@pytest.mark.parametrize(
    ('config', 'message'),
    [
        ({'projector_scale_factors': [4.0]}, 'projector_scale_factors'),
        ({'projector_scale_factors': []}, 'projector_scale_factors'),
        ({'backbone_config': {'patch_size': 4}}, 'out_indices'),
    ],
)
def test_other_models_are_refused(config, message, stored):
    flat, extra = files.read_arrays(stored[1])
    with pytest.raises(UserError, match=message):
        transformers_lw_detr.read(flat, {**extra, **config})
