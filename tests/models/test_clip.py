"""CLIP's towers: exact parameter counts, and texts that end at their eos."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers.experiments import ROOT
from helpers.pictures import count

import vit_jax
from vit_jax.__main__ import main
from vit_jax.config import load
from vit_jax.errors import UserError
from vit_jax.models import clip
from vit_jax.models.clip import Model

TINY = {
    **{'vocab_size': 11, 'length': 6, 'eos': 9, 'patch_size': 4, 'width': 16, 'depth': 2},
    **{'mlp_dim': 24, 'num_heads': 2, 'text_width': 8, 'text_depth': 1, 'text_mlp_dim': 16},
    **{'text_num_heads': 2, 'embed_dim': 5},
}
IMAGES = jnp.asarray(np.random.default_rng(0).normal(size=(3, 8, 12, 3)), jnp.float32)

# Of the released models, in which patches have no biases.
COUNTS = {'B/32': 151_277_313, 'B/16': 149_620_737, 'L/14': 427_616_513}


@pytest.mark.parametrize('name', COUNTS)
def test_parameter_counts_are_exact(name):
    model = Model(vocab_size=49408, scan=True, **clip.variant(name))
    images, ids = jnp.zeros((1, 224, 224, 3)), jnp.zeros((1, 77), jnp.int32)
    made = jax.eval_shape(model.init, jax.random.key(0), images, ids)
    assert count(made) - model.width == COUNTS[name]


def test_texts_of_other_sizes_are_as_wide_as_the_images():
    found = clip.variant('S/16')
    assert (found['text_width'], found['embed_dim'], found['text_mlp_dim']) == (384, 384, 1536)


@pytest.mark.slow
def test_what_follows_the_end_of_a_text_has_no_effect():
    model = Model(**TINY)
    params = jax.jit(model.init)(jax.random.key(0), IMAGES, jnp.zeros((1, 6), jnp.int32))
    ids = [[10, 3, 9, 0, 0, 0], [10, 3, 9, 9, 4, 1], [10, 4, 9, 0, 0, 0], [3, 10, 9, 0, 0, 0]]
    found = jax.jit(model.apply)(params, IMAGES, jnp.array(ids, jnp.int32))
    text = found['text']
    np.testing.assert_array_equal(text[0], text[1])
    assert np.all(np.abs(text[2:] - text[0]).max(1) > 1e-4)
    assert found['image'].shape == (3, 5) and float(found['bias']) == 0
    assert float(found['scale']) == pytest.approx(1 / 0.07)
    assert params['params'].keys() == {'image', 'image_head', 'text', 'log_scale'}


def test_an_end_that_no_text_has_is_refused():
    words = r'eos=49407: .*11 ids.* 2 .*`vit_jax '
    with pytest.raises(UserError, match=words):
        Model(**{**TINY, 'eos': 49407})


@pytest.mark.slow
def test_the_largest_id_in_place_of_an_end():
    model = Model(**{**TINY, 'eos': 'largest'})
    ends = Model(**{**TINY, 'eos': 10})
    ids = jnp.array([[3, 10, 4, 0, 0, 0], [10, 4, 9, 10, 0, 0]], jnp.int32)
    params = jax.jit(model.init)(jax.random.key(0), IMAGES[:2], ids)
    found, expected = (jax.jit(one.apply)(params, IMAGES[:2], ids)['text'] for one in (model, ends))
    np.testing.assert_array_equal(found, expected)
    assert (model.end_of_text, ends.end_of_text) == (None, 10)
    with pytest.raises(UserError, match="unknown eos 'last'"):
        Model(**{**TINY, 'eos': 'last'})


@pytest.mark.fault(125)
def test_an_end_that_the_data_do_not_have_is_refused(tmp_path, capsys):
    keys = ('model.name=clip', 'model.eos=7', 'task.loss_name=softmax')
    words = ['--config', f'{ROOT}/experiments/siglip/scenes.py:smoke', '--workdir', str(tmp_path)]
    assert main(['train', *words, *(f'--config.{key}' for key in keys)]) == 2
    *_, line = capsys.readouterr().err.splitlines()
    assert 'model.eos=7' in line and 'set config.model.eos=2 to train' in line


@pytest.mark.slow
@pytest.mark.long
def test_a_clip_is_trained(tmp_path):
    """Its logits are never scaled by more than 100."""
    clip_s = ('model.name=clip', 'model.eos=2', 'task.loss_name=softmax', 'model.init_scale=150')
    config = load.load(f'{ROOT}/experiments/siglip/scenes.py:smoke', clip_s)
    found = vit_jax.train(config, tmp_path)
    assert np.isfinite(found['test/loss']) and 'retrieval/text_recall_1' in found
    _, variables = vit_jax.load(tmp_path)
    assert 99 < np.exp(variables['params']['log_scale']) < 100.001
