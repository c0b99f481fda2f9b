"""A contrastive system outside of the package goes through every command without a change of it.

The files of `helpers/two_towers` are a source of images with captions, a tower for each of them, a
loss that couples rows, pictures and an experiment.
"""

from __future__ import annotations

import json

import jax
import pytest
from helpers import runs
from helpers.experiments import ROOT
from helpers.two_towers.source import Source
from helpers.xla import use_one_device
from PIL import Image

import vit_jax
from vit_jax import __main__ as cli
from vit_jax.config import load
from vit_jax.trainer import build

# `test_outside_system.py` takes one system through the same commands in `make test`.
pytestmark = [pytest.mark.slow, pytest.mark.long]

EXPERIMENT = str(ROOT / 'tests' / 'helpers' / 'two_towers' / 'experiment.py')


@pytest.fixture(scope='module')
def words(tmp_path_factory):
    """The flags of a config with the vocabulary of its captions."""
    path = tmp_path_factory.mktemp('vocab') / 'captions.model'
    words = ['--field', 'caption', '--size', '24', '--output', str(path)]
    assert cli.main(['vocab', 'helpers.two_towers.source:', *words]) == 0
    return ['--config', f'{EXPERIMENT}:smoke', f'--config.data.vocab={path}']


@pytest.fixture(scope='module')
def run(tmp_path_factory, words):
    """The folder of a finished run of one device, which was stopped on the way."""
    folder = tmp_path_factory.mktemp('towers') / 'run'
    with pytest.MonkeyPatch.context() as patch:
        use_one_device(patch)
        for stop, code in ((['--stop-at', '12'], 75), ([], 0)):
            assert cli.main(['train', *words, '--workdir', str(folder), *stop]) == code
    return folder


@pytest.fixture(scope='module')
def photo(tmp_path_factory):
    path = tmp_path_factory.mktemp('photo') / 'green_disk.png'
    Image.fromarray(Source('', 'test')[4]['image']).resize((40, 32)).save(path)
    return str(path)


def mine(run):
    return ['--workdir', str(run), '--allow', 'helpers']


def test_it_learns(run):
    losses = [line['train/loss'] for line in runs.metrics(run) if 'train/loss' in line]
    assert losses[-1] < 0.95 * losses[0]
    last = runs.metrics(run)[-1]
    assert {'test/accuracy', 'test/of_image', 'test/of_text'} <= last.keys()


@pytest.mark.usefixtures('one_device')
def test_resumed_is_bit_exact(run, words, tmp_path):
    assert cli.main(['train', *words, '--workdir', str(tmp_path / 'whole')]) == 0
    assert runs.digest(run) == runs.digest(tmp_path / 'whole')


def test_evaluate_on_several_devices(run):
    found = vit_jax.evaluate(run, allowed=['helpers'])
    expected = json.loads((run / 'result.json').read_text())
    assert {k: found[k] for k in expected} == pytest.approx(expected, rel=1e-5)


@pytest.mark.usefixtures('one_device')
def test_its_features_are_measured_by_others(run, capsys):
    assert cli.main(['evaluate', *mine(run), '--evaluator', 'knn(k=1)', '--json']) == 0
    assert json.loads(capsys.readouterr().out.splitlines()[-1])['knn/knn_accuracy'] > 0.5


def test_predict_chooses_among_captions(run, photo, tmp_path, capsys):
    def captions(*words):
        assert cli.main(['predict', *mine(run), '--json', *words, photo]) == 0
        (image,) = json.loads(capsys.readouterr().out.splitlines()[-1])['images']
        assert sum(row['probability'] for row in image['predictions']) == pytest.approx(1)
        return [row['class'] for row in image['predictions']]

    assert sorted(captions('--captions', 'a red disk; green')) == ['a red disk', 'green']
    out = tmp_path / 'captions.png'
    assert set(captions('--top', '99', '--out', str(out))) == {
        f'a {name}' for name in Source.info.class_names
    }
    assert out.read_bytes().startswith(b'\x89PNG')
    (found,) = vit_jax.predict(run, [photo], allowed=['helpers'])
    assert found.keys() == {'features'}


def test_attention(run, photo, tmp_path, capsys):
    out = tmp_path / 'attention.png'
    assert cli.main(['attention', *mine(run), '--out', str(out), photo]) == 0
    assert '1 layers x 2 heads, 4 x 4 patches' in capsys.readouterr().out
    assert out.read_bytes().startswith(b'\x89PNG')


def test_examples_of_the_data(words, tmp_path):
    out = tmp_path / 'data.png'
    assert cli.main(['data', *words, '--batches', '1', '--out', str(out)]) == 0
    assert out.read_bytes().startswith(b'\x89PNG')


@pytest.mark.usefixtures('one_device')
@pytest.mark.parametrize('step', ['forward', 'train'])
def test_benchmark(words, step, tmp_path):
    out = tmp_path / 'numbers.json'
    only = ['--forward-only'] if step == 'forward' else []
    assert cli.main(['benchmark', *words, *only, '--steps', '2', '--json', str(out)]) == 0
    assert json.loads(out.read_text())[step]['step_sec'] > 0


def trained(words, devices, **changes):
    """The metrics of the first steps."""
    overrides = [word.removeprefix('--config.') for word in words[2:]]
    config = load.load(words[1], [*overrides, *(f'{k}={v}' for k, v in changes.items())])
    training = build.build(config, jax.devices()[:devices])
    program, batches, metrics = training.program, training.data.train_batches(), []
    state = program.layout.create(program.init)
    for _ in range(2):
        state, found = program.train_step(state, program.layout.put_batch(next(batches)))
        metrics.append({key: float(value) for key, value in found.items()})
    return metrics


@pytest.fixture(scope='module')
def expected(words):
    return trained(words, 1, **{'step.accum_steps': 1})


@pytest.mark.parametrize('strategy', ['pmap', 'jit'])
def test_four_devices_with_microbatches_train_as_one(words, expected, strategy):
    found = trained(words, 4, **{'parallel.strategy': strategy, 'step.accum_steps': 2})
    for step, wanted in zip(found, expected, strict=True):
        assert step == pytest.approx(wanted, rel=1e-5, abs=1e-6)
