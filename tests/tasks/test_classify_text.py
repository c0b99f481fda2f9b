"""Texts are classified like images, from the tower of a model of images and texts on."""

import json

import jax.numpy as jnp
import numpy as np
import pytest
from helpers import transformers_siglip as siglip
from helpers.messages import mentions

from vit_jax.errors import UserError
from vit_jax.ops import terms
from vit_jax.tasks import classify
from vit_jax.tasks.classify_text import Task

BATCH = {'caption': jnp.arange(8).reshape(2, 4), 'label': jnp.array([1, 0])}


def test_the_inputs_are_ids():
    (ids,) = Task().inputs(BATCH)
    np.testing.assert_array_equal(ids, BATCH['caption'])
    with pytest.raises(UserError, match=r'classify_text.*examples'):
        Task().inputs({'label': BATCH['label']})
    with pytest.raises(UserError, match=r"add tokenize\('target', 64\)"):
        Task(text='target').inputs(BATCH)


def test_the_loss_is_that_of_images():
    outputs = {'logits': jnp.asarray(np.random.default_rng(0).normal(size=(2, 3)))}
    for keywords in ({}, {'loss_name': 'sigmoid'}, {'label_smoothing': 0.2}):
        found, expected = (task(**keywords).loss(outputs, BATCH) for task in (Task, classify.Task))
        assert terms.means(found) == terms.means(expected)


@pytest.mark.parametrize('name', ['mixup', 'cutmix'])
def test_texts_are_not_mixed(name):
    with pytest.raises(UserError, match=f'config.task.{name}=0.5: must be 0 for texts'):
        Task(**{name: 0.5})


CONFIG = """
from ml_collections import ConfigDict
from ml_collections.config_dict import placeholder

def get_config():
    config = ConfigDict(dict(total='60 steps', batch_size=32, model=dict(name=placeholder(str))))
    config.task = dict(name='classify_text')
    config.init = {'from': placeholder(str)}
    steps = "tokenize('caption', 24)|keep('caption', 'label')"
    data = dict(source='scenes_captions:color', transforms=steps, vocab='bytes')
    config.data = dict(data, split='train[:320]', cache=True)
    config.evals = dict(test=dict(data, split='test[:64]'))
    config.optim = dict(name='adamw', lr=3e-2, schedule=dict(name='constant'))
    return config
"""


@pytest.mark.slow
@pytest.mark.process
@pytest.mark.long
def test_a_released_tower_is_fine_tuned(run_cli, tmp_path):
    """To tell colors from captions that name them; `config.model` is the checkpoint's."""
    pytest.importorskip('transformers')
    text = {'vocab_size': 260, 'max_position_embeddings': 24}
    siglip.reference(text=text).save_pretrained(tmp_path / 'siglip')
    (tmp_path / 'texts.py').write_text(CONFIG)
    words = ['--config', tmp_path / 'texts.py', '--workdir', tmp_path / 'run']
    done = run_cli('train', *words, f'--config.init.from={tmp_path / "siglip"}:text')
    assert done.returncode == 0, done.stderr
    assert mentions(done.stdout, 'text_encoder', 'checkpoint')
    result = json.loads((tmp_path / 'run' / 'result.json').read_text())
    assert result['test/accuracy'] > 0.5  # of six colors
