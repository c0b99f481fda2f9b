"""A ViT on rows of several images of mixed sizes, from outside of the package, does what any does.

The files of `helpers/packed_vit` are copied to a folder on the path: a source, a plan of rows that
hold several images, a model, a task whose loss is a mean over images, pictures and an experiment.
"""

from __future__ import annotations

import itertools
import json
import pathlib
import shutil
import sys

import jax
import numpy as np
import pytest
from helpers.messages import numbers
from helpers.runs import digest
from helpers.xla import use_one_device
from PIL import Image
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

import vit_jax
from vit_jax import __main__ as cli
from vit_jax.config import load
from vit_jax.data.dataset import open_dataset
from vit_jax.errors import EXIT_PREEMPTED
from vit_jax.evaluators import confusion
from vit_jax.inference.load import open_run
from vit_jax.inference.predict import predictor
from vit_jax.trainer import build, early_stopping, evaluate
from vit_jax.trainer.examples import ExampleDisplay

# `test_outside_system.py` takes one system through the same commands in `make test`.
pytestmark = [pytest.mark.slow, pytest.mark.long]

SYSTEM = pathlib.Path(__file__).parent / 'helpers' / 'packed_vit'
LAYOUTS = {'jit': {}, 'fsdp': {'fsdp': 4, 'min_split_size': 64}, 'pmap': {'strategy': 'pmap'}}


@pytest.fixture(scope='module')
def home(tmp_path_factory):
    """The folder of the system, which lies on the path."""
    folder = tmp_path_factory.mktemp('home')
    shutil.copytree(SYSTEM, folder / 'packed_vit')
    sys.path.insert(0, str(folder))
    yield folder
    sys.path.remove(str(folder))
    for name in [name for name in sys.modules if name.partition('.')[0] == 'packed_vit']:
        del sys.modules[name]


@pytest.fixture(scope='module')
def config(home):
    return f'{home}/packed_vit/experiment.py:smoke'


@pytest.fixture(scope='module')
def run(home, config, undrawn_pictures):
    """The folder of a finished run of one device, which has shown its examples."""
    with pytest.MonkeyPatch.context() as patch:
        use_one_device(patch)
        if 'examples' in undrawn_pictures:
            patch.setattr(ExampleDisplay, 'show', undrawn_pictures['examples'])
        folder = home / 'run'
        assert cli.main(['train', '--config', config, '--workdir', str(folder)]) == 0
    return folder


@pytest.fixture(scope='module')
def photos(home):
    """Files of other sizes than the data have: a wide one and a narrow one."""
    pixels = np.zeros((60, 60, 3), np.uint8)
    pixels[8:52, 8:14] = 255
    for name, image in {'wide': pixels[:40], 'narrow': pixels[:, :21]}.items():
        Image.fromarray(image).save(home / f'{name}.png')
    return [str(home / 'wide.png'), str(home / 'narrow.png')]


def mine(run):
    """The flags of what reads a run of my own code."""
    return ['--workdir', str(run), '--allow', 'packed_vit']


def test_a_run_shows_its_examples_and_where_it_looks(run):
    (file,) = run.glob('events.*')
    events = EventAccumulator(str(file), size_guidance={'images': 0}).Reload()
    assert {'test/examples', 'test/attention'} <= set(events.Tags()['images'])


def result(run):
    return json.loads((run / 'result.json').read_text())


@pytest.mark.usefixtures('one_device')
def test_a_run_that_was_stopped_ends_with_the_same_bits(run, config, tmp_path):
    words = ['train', '--config', config, '--workdir', str(tmp_path)]
    assert cli.main([*words, '--stop-at', '3']) == EXIT_PREEMPTED
    assert cli.main(words) == 0
    assert digest(tmp_path) == digest(run)
    assert result(tmp_path) == result(run)


def test_rows_hold_several_images_and_an_epoch_each_of_them_once(run, config):
    data = build.build(load.load(config), jax.devices()[:1]).data
    rows = len(data.plan.rows)
    assert rows < len(data.source) / 2
    batches = list(itertools.islice(data.train_batches(), -(-rows // 8)))
    index, mask, segments = (
        np.concatenate([batch[name] for batch in batches])[:rows]
        for name in ('index', 'mask', 'segments')
    )
    assert sorted(index[mask == 1]) == list(range(len(data.source)))
    np.testing.assert_array_equal(segments.max(axis=1), mask.sum(axis=1))


def test_evaluators_and_metrics_get_images(config):
    early_stopping.check_metric(load.load(config), 'test/accuracy', 'here')
    training = build.build(load.load(config), jax.devices()[:1])
    program, data = training.program, training.evaluations['test'].data
    state = program.layout.create(program.init)
    steps = program.eval_steps
    batches = evaluate.predict(steps.predict, steps.layout, state.variables, data.eval_batches())
    evaluator, seen = confusion.Evaluator(), []
    evaluator.open(data)
    for predictions, batch in batches:
        evaluator.update(predictions, batch)
        assert batch['segments'].shape == (len(batch['index']), 64)  # of the row of each
        seen += batch['index'].tolist()
    assert sorted(seen) == list(range(len(data.source)))
    np.testing.assert_array_equal(evaluator.matrix.sum(1), np.bincount(data.source.labels()))


@pytest.mark.parametrize('batch_size', [3, 16])
def test_evaluate_counts_every_image_once(run, batch_size):
    found = vit_jax.evaluate(str(run), batch_size=batch_size, allowed=['packed_vit'])
    assert {name: found[name] for name in result(run)} == pytest.approx(result(run), rel=1e-5)


@pytest.mark.usefixtures('one_device')
def test_an_image_is_classified_as_if_it_were_alone(run, config):
    trained = open_run(run, allowed=['packed_vit'])
    predict = predictor(trained)
    data = open_dataset(load.to_run(load.load(config)).evals['test'], 8)
    losses = []
    for number in range(len(data.source)):
        row = data.plan.join([data.read(number)], data.spec)
        losses.append(-np.log(predict(row, number)['probs'][0, row['label'][0]]))
    assert np.mean(losses) == pytest.approx(result(run)['test/loss'], rel=1e-5)


def test_predict_with_a_picture(run, photos, tmp_path, capsys):
    out = tmp_path / 'digits.png'
    assert (
        cli.main(['predict', *mine(run), '--top', '10', '--out', str(out), '--json', *photos]) == 0
    )
    images = json.loads(capsys.readouterr().out.splitlines()[-1])['images']
    sizes = [numbers(image['read_as']) for image in images]
    assert sizes == [[60, 40, 36, 24], [21, 60, 16, 52]]
    for image in images:
        assert {row['class'] for row in image['predictions']} == set('0123456789')
        assert sum(row['probability'] for row in image['predictions']) == pytest.approx(1)
    assert out.read_bytes().startswith(b'\x89PNG')


def test_attention(run, photos, tmp_path, capsys):
    out = tmp_path / 'attention.png'
    assert cli.main(['attention', *mine(run), '--query', '1,2', '--out', str(out), photos[0]]) == 0
    assert '2 layers x 2 heads, 9 x 6 patches' in capsys.readouterr().out
    assert out.read_bytes().startswith(b'\x89PNG')


@pytest.mark.usefixtures('one_device')
def test_benchmark(config, tmp_path):
    words = ['--config', config, '--steps', '2', '--json', str(tmp_path / 'numbers.json')]
    assert cli.main(['benchmark', *words]) == 0
    found = json.loads((tmp_path / 'numbers.json').read_text())
    plan = build.build(load.load(config), jax.devices()[:1]).data.plan
    assert plan.examples_per_row == len(plan.examples) / len(plan.rows) > 2
    for step in ('forward', 'train'):
        images = found[step]['images_per_sec'] * found[step]['step_sec']
        assert images == pytest.approx(8 * plan.examples_per_row)


def losses(config, devices, parallel, accum_steps=1):
    """The metrics of the first two steps."""
    config = load.load(config)
    with config.unlocked():
        config.parallel.update(parallel)
        config.step.accum_steps = accum_steps
    training = build.build(config, jax.devices()[:devices])
    program, batches = training.program, training.data.train_batches()
    state, found = program.layout.create(program.init), []
    for _ in range(2):
        state, metrics = program.train_step(state, program.layout.put_batch(next(batches)))
        found.append({name: float(value) for name, value in metrics.items()})
    return found


@pytest.fixture(scope='module')
def losses_of_one_device(config):
    return losses(config, 1, {})


@pytest.mark.parametrize(
    ('layout', 'accum_steps'),
    [
        ('jit', 1),
        ('pmap', 1),
        ('fsdp', 1),
        ('pmap', 2),
    ],
)
def test_four_devices_train_as_one(config, losses_of_one_device, layout, accum_steps):
    found = losses(config, 4, LAYOUTS[layout], accum_steps)
    for step, expected in zip(found, losses_of_one_device, strict=True):
        assert step == pytest.approx(expected, rel=1e-5, abs=1e-6)
