"""Mixers of vision_transformer and timm: the same outputs, and every form reads and writes."""

import json

import jax
import numpy as np
import pytest
from flax import traverse_util
from helpers import timm_forms, timm_mixer
from helpers.messages import says

from vit_jax import interop
from vit_jax.errors import UserError
from vit_jax.interop import files
from vit_jax.interop.families import mixer
from vit_jax.interop.trained import TrainedModel
from vit_jax.models.mixer import variant

GOLDEN = json.loads(timm_mixer.GOLDEN.read_text())
# Of Mixer-B_16.npz, by models_mixer.py of vision_transformer, and of the files before Linen.
LINEN = {
    'stem/kernel': (4, 4, 3, 8),
    'MixerBlock_1/LayerNorm_0/scale': (8,),
    'MixerBlock_1/LayerNorm_1/bias': (8,),
    'MixerBlock_1/token_mixing/Dense_0/kernel': (9, 4),
    'MixerBlock_1/channel_mixing/Dense_1/bias': (8,),
    'pre_head_layer_norm/scale': (8,),
    'head/kernel': (8, 3),
}


def early(flat):
    """The arrays under the names before Linen, with their axes of length one."""
    found = {}
    for name, array in flat.items():
        if name.startswith('MixerBlock_'):
            number, module, *rest = name.removeprefix('MixerBlock_').split('/')
            name = f'Mixer/encoderblock_{number}/{"/".join((module, *rest))}'
            if rest[0].startswith('Dense'):
                leaf = f'{rest[1]}{int(rest[0][-1]) + 1}'
                name = f'Mixer/encoderblock_{number}/{module}_phase_0/{leaf}'
                array = array[None]
        name = name.replace('pre_head_layer_norm', 'Mixer/encoder_norm')
        found[name.replace('stem/', 'embedding/')] = array
    return found


def write_timm(folder, **changed):
    files.write_safetensors(
        folder, timm_forms.parameters(GOLDEN['shapes']), {**timm_mixer.CONFIG, **changed}
    )


@pytest.fixture(scope='module')
def trained(tmp_path_factory):
    folder = tmp_path_factory.mktemp('timm')
    write_timm(folder)
    return interop.read(folder)


@pytest.mark.parity
def test_outputs_of_timm(trained):
    assert trained.image_size == (12, 12) and trained.notes == ()
    images = timm_forms.images(timm_mixer.SIDE)
    variables = jax.tree.map(jax.numpy.asarray, trained.variables)
    outputs, states = jax.jit(trained.model.hidden_states)(variables, images)
    for found, theirs in (
        (outputs['logits'][0], GOLDEN['logits']),
        *(
            (trained.model.final_norm_of(trained.params)(s.tokens)[0, 5], patch)
            for s, patch in zip(states[1:], GOLDEN['blocks'], strict=True)
        ),
    ):
        atol = 1e-5 * np.abs(theirs).max()
        np.testing.assert_allclose(found, theirs, atol=atol, rtol=0)


def test_stored_outputs_are_those_of_timm():
    pytest.importorskip('timm')
    found = timm_mixer.golden()
    np.testing.assert_allclose(found['logits'], GOLDEN['logits'], rtol=1e-4)
    assert {k: found[k] for k in ('shapes', 'S/32')} == {k: GOLDEN[k] for k in ('shapes', 'S/32')}


def test_npz_files_have_the_authors_names(trained, tmp_path):
    notes = interop.write(trained, tmp_path / 'a.npz')
    (note,) = (note for note in notes if 'gelu' in note)
    assert says(note, '.npz', 'tanh', 'erf')
    flat, _ = files.read_arrays(tmp_path / 'a.npz')
    assert len(flat) == 2 + 2 * 12 + 4
    assert {name: flat[name].shape for name in LINEN} == LINEN
    for arrays in (flat, early(flat)):
        back = mixer.read(arrays, {})
        assert back.model_config == trained.model_config | {'gelu': 'tanh'}
        assert_same(back.params, trained.params)


def test_a_file_that_was_read_is_written_byte_for_byte(trained, tmp_path):
    interop.write(trained, tmp_path / 'first.npz')
    interop.write(interop.read(tmp_path / 'first.npz'), tmp_path / 'again.npz')
    first, again = (np.load(tmp_path / f'{name}.npz') for name in ('first', 'again'))
    assert first.files == again.files
    assert all(first[name].tobytes() == again[name].tobytes() for name in first.files)
    interop.write(trained, tmp_path / 'timm')
    assert files.read_stored(tmp_path / 'timm')[1]['architecture'] == 'mixer_s16_224'
    written, _ = files.read_arrays(tmp_path / 'timm')
    arrays = timm_forms.parameters(GOLDEN['shapes'])
    assert written.keys() == arrays.keys()
    assert all(np.array_equal(written[name], arrays[name]) for name in arrays)


def assert_same(a, b):
    a, b = (traverse_util.flatten_dict(tree, sep='/') for tree in (a, b))
    assert a.keys() == b.keys()
    for name in a:
        np.testing.assert_array_equal(a[name], b[name], err_msg=name)


def test_timm_gets_its_own_names_for_the_named_sizes():
    model = {'name': 'mixer', 'num_classes': 1000, **variant('S/32')}
    unknown = TrainedModel.from_file({}, model, (224, 224), 'a test')
    images = jax.ShapeDtypeStruct((1, 224, 224, 3), np.float32)
    shapes = jax.eval_shape(unknown.model.init, jax.random.key(0), images)['params']
    params = jax.tree.map(lambda x: np.zeros(x.shape, x.dtype), shapes)
    whole = TrainedModel.from_file(params, model, (224, 224), 'a test')
    made = mixer.WRITERS['mixer', 'timm'](whole)
    assert made.config['architecture'] == 'mixer_s32_224'
    assert made.config['model_args']['mlp_ratio'] == [0.5, 4.0]
    assert {name: list(array.shape) for name, array in made.arrays.items()} == GOLDEN['S/32']


def test_timm_has_no_other_sizes(trained, tmp_path):
    changed = trained.adapted(model=trained.model.clone(drop_path=0.5))
    with pytest.raises(UserError, match=r'timm .* 8, depth 2 .* 4'):
        interop.write(changed, tmp_path / 'other')


@pytest.mark.parametrize(
    ('changed', 'words'),
    [
        ({'architecture': 'gmixer_24_224'}, r"names 'gmixer_24_224'; .* MLPs only mixer_"),
        ({'model_args': {'act_layer': 'relu'}}, 'model_args act_layer in config.json'),
        ({'global_pool': ''}, "global_pool '' is not supported"),
    ],
)
def test_other_mlps_of_timm(changed, words, tmp_path):
    write_timm(tmp_path, **changed)
    with pytest.raises(UserError, match=words):
        interop.read(tmp_path)


def test_damaged_files(trained):
    flat = mixer.WRITERS['mixer', 'npz'](trained).arrays
    assert not mixer.matches({'embedding/kernel': 0, 'Transformer/encoder_norm/scale': 0})
    name = 'MixerBlock_1/channel_mixing/Dense_1/bias'
    with pytest.raises(UserError, match=r'block_1/channel_mixing/fc2/bias .* is missing'):
        mixer.read({key: value for key, value in flat.items() if key != name}, {})
    with pytest.raises(UserError, match=r'called.*MixerBlock_1/extra'):
        mixer.read(flat | {'MixerBlock_1/extra': np.zeros(1, np.float32)}, {})
