"""A run that pre-trains by masks: what starts from it, what it loads as, what `predict` shows."""

import functools
import json

import jax
import numpy as np
import pytest
from helpers.finished import smoke_run_of
from helpers.xla import use_one_device
from PIL import Image

import vit_jax
from vit_jax import __main__ as cli
from vit_jax.config import load
from vit_jax.inference.load import open_run
from vit_jax.models import vit
from vit_jax.trainer import build, start, train

FILE = 'experiments/mae/cifar10.py'
pytestmark = pytest.mark.slow


@pytest.fixture(scope='module')
def folder(tmp_path_factory):
    return smoke_run_of(tmp_path_factory, FILE)


@pytest.fixture(scope='module')
def run(folder):
    return open_run(folder)


def test_fine_tuning_is_a_change_of_the_config(run, folder, repo, one_device):
    config = load.load(str(repo / f'{FILE}:smoke-finetune'))
    config.init['from'] = str(folder)
    origin = start.find_origin(build.build(config))
    encoder = {name: leaf for name, leaf in run.variables['params'].items() if name != 'decoder'}
    assert origin.params.keys() == encoder.keys()
    jax.tree.map(np.testing.assert_array_equal, origin.params, encoder)
    assert any(note.startswith('head: not selected') for note in origin.notes)


def test_what_is_frozen_stays_and_the_norm_before_the_head_follows(folder, repo, tmp_path):
    """A linear probe trains the head alone."""
    config = load.load(str(repo / f'{FILE}:smoke-finetune'))
    full = load.load(str(repo / f'{FILE}:probe'))
    config.init['from'] = str(folder)
    with config.unlocked():
        config.total, config.evals, config.optim = '2 steps', {}, full.optim
        config.model.head_norm = 'batch'
    with pytest.MonkeyPatch.context() as patch:
        use_one_device(patch)
        train.train(config, tmp_path / 'probe')
    model, variables = vit_jax.load(tmp_path / 'probe')
    before = open_run(folder).variables['params']
    for part in ('patch_embed', 'cls_token', 'pos_embed', 'encoder'):
        jax.tree.map(np.testing.assert_array_equal, variables['params'][part], before[part])
    assert np.any(variables['params']['head']['kernel'])
    assert np.any(variables['batch_stats']['head_norm']['mean'])
    assert model.head.norm == 'batch'


def test_the_run_loads_as_a_vit(run, folder):
    model, variables = vit_jax.load(folder)
    assert isinstance(model, vit.Model) and model.pool.kind == 'cls' and not model.num_classes
    assert variables['params'].keys() == {'patch_embed', 'cls_token', 'pos_embed', 'encoder'}
    images = np.random.default_rng(0).normal(size=(2, 8, 8, 1)).astype(np.float32)
    features = functools.partial(run.model.apply, method='features')
    expected = jax.jit(features)(run.variables, images)
    tokens = jax.jit(model.apply)(variables, images)['tokens']
    np.testing.assert_allclose(tokens, expected, atol=1e-5)


def test_masks_of_a_file_are_the_same_at_every_call(folder, tmp_path, capsys):
    rng = np.random.default_rng(0)
    for name in 'ab':
        Image.fromarray(rng.integers(0, 256, (8, 8), dtype=np.uint8)).save(tmp_path / f'{name}.png')
    a, b, out = (str(tmp_path / name) for name in ('a.png', 'b.png', 'out.png'))

    def predict(*words):
        assert cli.main(['predict', '--workdir', str(folder), '--json', *words]) == 0
        images = json.loads(capsys.readouterr().out)['images']
        return {image['image']: image['predictions'][0] for image in images}

    together, alone = predict(a, b), predict(b, '--out', out)
    assert together[b] == alone[b] and together[a] != together[b]
    assert together[a]['patches'] == 4 and together[a]['hidden'] == 3
    assert Image.open(out).width > 1000
    assert predict(b, '--mask-ratio', '0.5', '--seed', '1')[b]['hidden'] == 2
