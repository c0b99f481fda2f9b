"""CLIP of transformers, there and back: logits and the loss of both sides agree."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers.round_trips import anew
from helpers.transformers_clip import (
    END,
    LENGTH,
    MEAN,
    OLD_END,
    SIZE,
    STD,
    VOCAB,
    batch,
    ours,
    reference,
    save,
    theirs,
)

import vit_jax
from vit_jax import interop
from vit_jax.errors import UserError
from vit_jax.interop import files

pytest.importorskip('torch')
transformers = pytest.importorskip('transformers')
pytest.importorskip('safetensors')


@pytest.mark.slow
@pytest.mark.parametrize('added', [0, pytest.param(1, marks=pytest.mark.long), 3])
def test_old_files_pool_at_the_largest_id_even_of_added_words(added, tmp_path):
    """A word of a textual inversion has a larger id than the end; transformers pools there."""
    model = reference('CLIP', OLD_END, VOCAB + added)
    trained = interop.read(save(model, tmp_path / 'theirs'))
    assert trained.model_config['eos'] == 'largest'
    data = batch(VOCAB - 1)
    if added:
        data['caption'][1, 0] = VOCAB + added - 1
    logits, _ = ours(trained, data)
    expected = theirs(model, data).logits_per_image
    np.testing.assert_allclose(logits, expected, atol=1e-5 * float(expected.abs().max()))
    interop.write(anew(trained), tmp_path / 'back')
    again = transformers.CLIPModel.from_pretrained(tmp_path / 'back')
    assert again.config.text_config.eos_token_id == OLD_END
    assert interop.read(tmp_path / 'back').model_config == trained.model_config


@pytest.mark.parity
@pytest.mark.parametrize(
    ('name', 'eos', 'fields'),
    [
        ('CLIP', END, {}),
        ('CLIP', OLD_END, {'hidden_act': 'gelu', 'layer_norm_eps': 1e-3}),
        pytest.param('MetaClip2', OLD_END, {}, marks=pytest.mark.long),
    ],
)
def test_logits_and_loss_are_those_of_transformers_there_and_back(name, eos, fields, tmp_path):
    model = reference(name, eos, **fields)
    data = batch(VOCAB - 1 if (name, eos) == ('CLIP', OLD_END) else eos)
    trained = interop.read(save(model, tmp_path / 'theirs'))
    logits, loss = ours(trained, data)
    expected = theirs(model, data)
    scale = float(expected.logits_per_image.abs().max())
    np.testing.assert_allclose(logits, expected.logits_per_image, atol=1e-5 * scale)
    assert float(loss) == pytest.approx(float(expected.loss), rel=1e-5)
    assert float(np.std(logits)) > 1e-3 * scale  # the parameters matter

    assert interop.write(anew(trained), tmp_path / 'ours') == ()
    written = getattr(transformers, f'{name}Model')
    again, info = written.from_pretrained(tmp_path / 'ours', output_loading_info=True)
    assert not info['missing_keys'] and not info['unexpected_keys']
    found = theirs(again.eval(), data).logits_per_image
    np.testing.assert_allclose(found, expected.logits_per_image, atol=2e-5 * scale)
    image = transformers.AutoImageProcessor.from_pretrained(tmp_path / 'ours')
    assert (tuple(image.image_mean), tuple(image.image_std)) == (MEAN, STD)


@pytest.fixture(scope='module')
def saved(tmp_path_factory):
    return save(reference(), tmp_path_factory.mktemp('clip'))


def test_the_model_that_is_read(saved):
    trained = interop.read(saved)
    model = trained.model_config
    assert (model['name'], model['length'], model['eos']) == ('clip', LENGTH, END)
    assert trained.task_config == {
        **{'name': 'siglip', 'loss_name': 'softmax'},
        **{'mean': MEAN, 'std': STD},
    }
    assert model['no_bias'] == 'patch_embed'
    module, variables = vit_jax.load(saved, image_size=2 * SIZE)
    assert variables['params']['image']['pos_embed'].shape == (1, 17, 16)
    made = jax.eval_shape(module.apply, variables, jnp.zeros((1, 2 * SIZE, 2 * SIZE, 3)))
    assert made['image'].shape == (1, 5)


@pytest.mark.parametrize(
    ('arrays', 'config', 'words'),
    [
        ({'text_model.final_layer_norm.bias': None}, {}, 'text_model.final_layer_norm.bias'),
        ({'vision_model.pre_layrnorm.weight': None}, {}, 'vision_model.pre_layrnorm'),
        ({'other': np.zeros(1)}, {}, 'part.*other'),
        ({'text_projection.weight': np.zeros((4, 8))}, {}, 'texts have 4 features, .*images 5'),
        ({}, {'model_type': 'clipseg'}, "config.json .*'clipseg'"),
        ({}, {'vision_config': None}, 'cannot have shape'),
    ],
)
def test_files_that_are_not_whole(saved, tmp_path, arrays, config, words):
    flat, extra = files.read_arrays(saved)
    flat = {name: a for name, a in (flat | arrays).items() if a is not None}
    files.write_safetensors(tmp_path, flat, extra | config)
    with pytest.raises(UserError, match=words) as error:
        interop.read(tmp_path)
    assert '\n' not in str(error.value)


def test_a_model_without_projection_is_none_of_transformers(saved, tmp_path):
    trained = interop.read(saved)
    changed = {'project': False, 'embed_dim': 16}
    other = trained.with_groups(model=trained.model_config | changed)
    with pytest.raises(UserError, match='project=False omits'):
        interop.write(other, tmp_path)
