"""Models below the names of wrappers and training states are read as they are without them."""

import numpy as np
import pytest
from helpers import transformers_vit
from helpers.messages import says
from helpers.transformers_models import theirs
from helpers.transformers_vit import ours

from vit_jax import interop
from vit_jax.errors import UserError
from vit_jax.interop import files
from vit_jax.tree_paths import param_paths

torch = pytest.importorskip('torch')
pytest.importorskip('transformers')
pytest.importorskip('safetensors')

CONFIG = {'model_type': 'vit', 'num_attention_heads': 4, 'image_size': 12, 'patch_size': 4}


@pytest.fixture(scope='module')
def model():
    return transformers_vit.reference(layer_norm_eps=1e-6)


@pytest.fixture(scope='module')
def arrays(model):
    return {name: tensor.numpy() for name, tensor in model.state_dict().items()}


def below(prefix, arrays, factor=1):
    return {prefix + name: array * np.float32(factor) for name, array in arrays.items()}


def read(folder, arrays, part=''):
    files.write_safetensors(folder / 'a.safetensors', arrays, CONFIG)
    return interop.read(f'{folder}/a.safetensors{part}', 0.5, 0.5)


def require_same(imported, arrays, tmp_path):
    expected = param_paths(read(tmp_path / 'plain', arrays).params)
    found = param_paths(imported.params)
    assert found.keys() == expected.keys()
    for name, leaf in expected.items():
        np.testing.assert_array_equal(found[name], leaf, err_msg=name)


def test_the_wrappers_of_torch(model, tmp_path, images):
    """The average of a model under data parallelism: `module.module.`, and `n_averaged`."""
    wrapped = torch.optim.swa_utils.AveragedModel(torch.nn.DataParallel(model))
    state = {name: tensor.numpy() for name, tensor in wrapped.state_dict().items()}
    assert 'module.module.vit.embeddings.cls_token' in state
    imported, batch = read(tmp_path, state), images(2, 12, 12, 3)
    assert imported.notes == ()
    expected = theirs(model, batch)['logits']
    np.testing.assert_allclose(ours(imported, batch)['logits'], expected, atol=1e-5)


@pytest.mark.parametrize(
    'prefix',
    [
        *('module.', '_orig_mod.', 'model.', 'backbone.', 'state_dict.', 'teacher.', 'ema.'),
        *('teacher.backbone.', 'state_dict_ema.module.', 'model_ema.module._orig_mod.'),
        'state_dict.model.module.',
    ],
)
def test_wrappers_in_any_order(prefix, arrays, tmp_path):
    imported = read(tmp_path, below(prefix, arrays))
    assert imported.notes == ()
    require_same(imported, arrays, tmp_path)


def test_wrappers_within_names(arrays, tmp_path):
    inside = {
        name.replace('.layers.0.', '.layers.0._checkpoint_wrapped_module.'): array
        for name, array in below('_fsdp_wrapped_module.', arrays).items()
    }
    require_same(read(tmp_path, inside), arrays, tmp_path)


@pytest.mark.parametrize(
    ('taken', 'other', 'part'),
    [
        ('teacher.backbone.', 'student.backbone.', 'student'),
        ('teacher.', 'student.module.', 'student'),
        ('model_ema.module.', 'model.', 'model'),
        ('state_dict_ema.', 'state_dict.', 'state_dict'),
    ],
)
def test_an_average_is_taken_and_the_other_model_by_its_name(taken, other, part, arrays, tmp_path):
    both = below(other, arrays, 2) | below(taken, arrays)
    both |= {'optimizer.state.0.exp_avg': np.ones(3, np.float32), 'epoch': np.array(3)}
    imported = read(tmp_path, both)
    require_same(imported, arrays, tmp_path)
    left_out = f'ignored: {", ".join(sorted(["optimizer", other[:-1]]))} (FILE:{part} reads'
    assert says(imported.notes, f'read below {taken};', left_out)
    require_same(read(tmp_path, both, f':{part}'), below('', arrays, 2), tmp_path)


def test_heads_beside_a_backbone_are_left_out_and_told(arrays, tmp_path):
    head = {'teacher.head.last.weight': np.ones((2, 3), np.float32)}
    imported = read(tmp_path, below('teacher.backbone.', arrays) | head)
    require_same(imported, arrays, tmp_path)
    assert says(imported.notes, 'read below teacher.backbone.; ignored: teacher.head')


def test_of_equals_one_has_to_be_named(arrays, tmp_path):
    both = below('model.', arrays, 2) | below('net.', arrays)
    with pytest.raises(UserError, match=r'several.*models'):
        read(tmp_path, both)
    require_same(read(tmp_path, both, ':net'), arrays, tmp_path)
    with pytest.raises(UserError, match=r"'teacher'.*model"):
        read(tmp_path, both, ':teacher')


def test_what_is_refused_is_named(arrays, tmp_path):
    with pytest.raises(UserError, match=r'begin.*mine'):
        read(tmp_path, below('mine.', arrays))
    more = arrays | {'vit.layers.0.adapter.weight': np.ones((2, 2), np.float32)}
    with pytest.raises(UserError, match=r'a.safetensors, .* vit.layers.0.adapter'):
        read(tmp_path, below('module.', more))
