"""A run on images of mixed sizes: evaluated, predicted, drawn, and resumed with the same bits."""

from __future__ import annotations

import dataclasses
import json
import shutil

import jax
import numpy as np
import pytest
from helpers.experiments import ROOT
from helpers.finished import smoke_run_of
from helpers.messages import numbers
from helpers.runs import digest
from PIL import Image

import vit_jax
from vit_jax import __main__ as cli
from vit_jax.config import load
from vit_jax.data.dataset import open_dataset
from vit_jax.errors import EXIT_PREEMPTED
from vit_jax.inference.load import open_run
from vit_jax.inference.predict import predictor
from vit_jax.profiling import cost

pytestmark = pytest.mark.slow

EXPERIMENT = 'experiments/vit/digits_naflex.py'


@pytest.fixture(scope='module')
def run(tmp_path_factory):
    """A run that was stored, of a smaller model."""
    return shutil.copytree(
        ROOT / 'tests/golden/run_naflex', tmp_path_factory.mktemp('naflex') / 'run'
    )


@pytest.fixture(scope='module')
def trained(tmp_path_factory):
    return smoke_run_of(tmp_path_factory, EXPERIMENT)


@pytest.fixture(scope='module')
def photos(tmp_path_factory):
    """A wide file and a narrow one."""
    pixels = np.zeros((60, 60, 3), np.uint8)
    pixels[8:52, 8:14] = 255
    folder = tmp_path_factory.mktemp('photos')
    for name, image in {'wide': pixels[:40], 'narrow': pixels[:, :21]}.items():
        Image.fromarray(image).save(folder / f'{name}.png')
    return [str(folder / 'wide.png'), str(folder / 'narrow.png')]


@pytest.mark.usefixtures('one_device')
def test_images_without_padding_are_classified_as_in_batches(run):
    predict = predictor(open_run(run))
    entry = load.to_run(load.load(f'{ROOT / EXPERIMENT}:smoke')).evals['test']
    data = open_dataset(dataclasses.replace(entry, split='test[:12]'), 8)
    found = [predict(data.read(i), i)['probs'] for i in range(4)]
    (batch, *_) = data.eval_batches()
    apply = jax.jit(open_run(run).model.apply)
    variables, task = open_run(run).variables, open_run(run).task
    logits = apply(variables, *task.inputs(jax.tree.map(jax.numpy.asarray, batch)))['logits']
    np.testing.assert_allclose(found, jax.nn.softmax(logits)[:4], atol=1e-6)


@pytest.mark.usefixtures('one_device')
def test_predict_takes_files_of_any_size(run, photos, capsys):
    assert cli.main(['predict', '--workdir', str(run), '--json', *photos]) == 0
    images = json.loads(capsys.readouterr().out.splitlines()[-1])['images']
    sizes = [numbers(image['read_as']) for image in images]
    assert sizes == [[60, 40, 36, 24], [21, 60, 20, 48]]


@pytest.mark.usefixtures('one_device')
def test_attention_is_drawn_on_the_grid_of_the_file(run, photos, tmp_path, capsys):
    out = tmp_path / 'attention.png'
    words = ['attention', '--workdir', str(run), '--query', '1,2', '--out', str(out), photos[0]]
    assert cli.main(words) == 0
    assert '1 layers x 2 heads, 9 x 6 patches' in capsys.readouterr().out
    assert out.read_bytes().startswith(b'\x89PNG')


def test_batches_are_drawn(tmp_path):
    out = tmp_path / 'batch.png'
    words = ['data', '--config', f'{ROOT / EXPERIMENT}:smoke', '--batches', '1', '--out', str(out)]
    assert cli.main(words) == 0
    assert out.read_bytes().startswith(b'\x89PNG')


def test_costs_are_those_of_the_lengths():
    """Of data that is not here; the average of four lengths is that of their programs."""
    config = load.load(f'{ROOT}/experiments/vit/imagenet2012.py:naflex,B/16', ['model.scan=True'])
    facts = cost.data_facts(config)
    lengths = [kind.spec['patches'].shape for kind in facts.kinds]
    assert lengths == [(n, 768) for n in (64, 128, 196, 256)]
    assert facts.steps == round(90 * 1_268_356 / 1024)
    planned = cost.price(config)
    assert planned.parameters == 87_202_792
    assert 20e9 < planned.forward < 40e9


@pytest.mark.long
def test_evaluate_counts_every_image_once(trained):
    result = json.loads((trained / 'result.json').read_text())
    found = vit_jax.evaluate(str(trained), batch_size=16)
    assert {name: found[name] for name in result} == pytest.approx(result, rel=1e-5)


@pytest.mark.long
@pytest.mark.usefixtures('one_device')
def test_a_run_that_was_stopped_ends_with_the_same_bits(trained, tmp_path):
    words = ['train', '--config', f'{ROOT / EXPERIMENT}:smoke', '--workdir', str(tmp_path)]
    assert cli.main([*words, '--stop-at', '7']) == EXIT_PREEMPTED
    assert cli.main(words) == 0
    assert digest(tmp_path) == digest(trained)
