"""A system of one's own goes through every command without one change of the package.

The files of `helpers/my_lab` are copied to a folder on the path: a model that draws at random in
evaluation, a task with two normalizers, a source with boxes, a transform, pictures, a family of
checkpoints and an experiment.
"""

from __future__ import annotations

import json
import pathlib
import shutil
import sys

import numpy as np
import pytest
from helpers.messages import mentions
from helpers.xla import use_one_device
from PIL import Image
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from vit_jax import __main__ as cli
from vit_jax.trainer.examples import ExampleDisplay
from vit_jax.viz import curves

pytestmark = pytest.mark.slow

LAB = pathlib.Path(__file__).parent / 'helpers' / 'my_lab'


@pytest.fixture(scope='module')
def lab(tmp_path_factory):
    """The folder of the system, which lies on the path."""
    folder = tmp_path_factory.mktemp('lab')
    shutil.copytree(LAB, folder / 'my_lab')
    forget_lab()  # of a test before
    sys.path.insert(0, str(folder))
    yield folder
    sys.path.remove(str(folder))
    forget_lab()


def forget_lab():
    for name in [name for name in sys.modules if name.partition('.')[0] == 'my_lab']:
        del sys.modules[name]


@pytest.fixture(scope='module')
def config(lab):
    return str(lab / 'my_lab' / 'experiments' / 'spots.py')


@pytest.fixture(scope='module')
def run(lab, config, undrawn_pictures):
    """The folder of a finished run of one device; what evaluates it has several."""
    folder = lab / 'run'
    with pytest.MonkeyPatch.context() as patch:
        use_one_device(patch)
        if 'examples' in undrawn_pictures:
            patch.setattr(ExampleDisplay, 'show', undrawn_pictures['examples'])
        assert cli.main(['train', '--config', f'{config}:smoke', '--workdir', str(folder)]) == 0
    return folder


@pytest.fixture(scope='module')
def photo(lab):
    """A file of another size than the model sees."""
    pixels = np.full((24, 18, 3), 120, np.uint8)
    pixels[4:10, 3:9] = [255, 0, 0]
    Image.fromarray(pixels).save(lab / 'photo.png')
    return str(lab / 'photo.png')


def mine(run):
    """The flags of what reads a run of my own code."""
    return ['--workdir', str(run), '--allow', 'my_lab']


def metrics_of(folder):
    return [json.loads(line) for line in (folder / 'metrics.jsonl').read_text().splitlines()]


def test_train(run):
    lines = metrics_of(run)
    last = [line for line in lines if 'train/loss' in line][-1]
    total = last['train/class'] + 5.0 * last['train/box']
    assert last['train/loss'] == pytest.approx(total, rel=1e-5)
    assert json.loads((run / 'config.json').read_text())['model']['num_classes'] == 2
    assert {'test/loss', 'test/accuracy', 'test/box_error'} <= lines[-1].keys()
    assert curves.plot_curves(run) == run / 'curves.png'


@pytest.mark.parametrize('batch_size', [5, 24])
def test_evaluate_draws_the_same_for_an_example_in_any_batch(run, batch_size, capsys):
    words = [*mine(run), '--batch-size', str(batch_size), '--json']
    assert cli.main(['evaluate', *words]) == 0
    found = json.loads(capsys.readouterr().out.splitlines()[-1])
    expected = json.loads((run / 'result.json').read_text())
    assert {k: found[k] for k in expected} == pytest.approx(expected, rel=1e-5)


def test_predict_with_a_picture(run, photo, tmp_path, capsys):
    words = [*mine(run), '--threshold', '0', '--out', str(tmp_path / 'spots.png')]
    assert cli.main(['predict', *words, '--json', photo]) == 0
    (image,) = json.loads(capsys.readouterr().out.splitlines()[-1])['images']
    assert {row['class'] for row in image['predictions']} <= {'red', 'blue'}
    assert all(len(row['box']) == 4 for row in image['predictions'])
    assert (tmp_path / 'spots.png').read_bytes().startswith(b'\x89PNG')
    assert cli.main(['predict', *mine(run), photo]) == 0


def test_predictions_are_drawn_by_the_seed(run, photo, capsys):
    def probabilities(seed):
        words = [*mine(run), '--threshold', '0', '--json', '--seed', str(seed)]
        assert cli.main(['predict', *words, photo]) == 0
        return json.loads(capsys.readouterr().out.splitlines()[-1])['images'][0]['predictions']

    assert probabilities(1) == probabilities(1) != probabilities(2)


def test_attention(run, photo, tmp_path, capsys):
    out = tmp_path / 'attention.png'
    words = [*mine(run), '--query', '1,2', '--out', str(out)]
    assert cli.main(['attention', *words, photo]) == 0
    assert '2 layers x 2 heads, 4 x 4 patches' in capsys.readouterr().out
    assert out.read_bytes().startswith(b'\x89PNG')


def test_examples_of_the_data(config, tmp_path):
    out = tmp_path / 'data.png'
    assert cli.main(['data', '--config', config, '--batches', '1', '--out', str(out)]) == 0
    assert out.read_bytes().startswith(b'\x89PNG')


def test_examples_of_the_run(run):
    (file,) = run.glob('events.*')
    events = EventAccumulator(str(file), size_guidance={'images': 0}).Reload()
    assert {'test/examples', 'test/attention'} <= set(events.Tags()['images'])


@pytest.mark.long
@pytest.mark.usefixtures('one_device')
def test_benchmark_and_inspect(config, tmp_path, capsys):
    words = ['--config', config, '--steps', '2', '--json', str(tmp_path / 'numbers.json')]
    assert cli.main(['benchmark', *words]) == 0
    assert json.loads((tmp_path / 'numbers.json').read_text())['train']['step_sec'] > 0
    capsys.readouterr()
    assert cli.main(['inspect', '--config', config, '--json']) == 0
    assert json.loads(capsys.readouterr().out)['flops']['forward'] > 0


def test_inspect_a_run(run, capsys):
    assert cli.main(['inspect', *mine(run)]) == 0
    assert 'my_lab.models.spots' in capsys.readouterr().out


@pytest.mark.usefixtures('one_device')
def test_convert_there_and_back(run, config, tmp_path, capsys):
    written = tmp_path / 'theirs.npz'
    assert (
        cli.main(['convert', '--allow', 'my_lab', str(run), f'my_lab.interop.spots:{written}']) == 0
    )
    assert mentions(capsys.readouterr().out, 'patches', 'hidden')
    assert 'trunk.norm.scale' in np.load(written)
    words = [
        *('--config', config, '--config.total=1 steps', '--config.optim.lr=0'),
        f'--config.init.from=my_lab.interop.spots:{written}',
    ]
    assert cli.main(['train', *words, '--workdir', str(tmp_path / 'again')]) == 0
    again, before = (json.loads((f / 'result.json').read_text()) for f in (tmp_path / 'again', run))
    assert again == pytest.approx(before, rel=1e-5)


@pytest.mark.usefixtures('one_device')
@pytest.mark.long
def test_part_of_it_starts_another_model(run, config, tmp_path, capsys):
    words = [
        *('--allow', 'my_lab', '--config', config),
        *('--config.total=1 steps', '--config.model.slots=4'),
        *(f'--config.init.from={run}', '--config.init.select=encoder'),
        '--config.data.transforms=pad_objects(4)',
        '--config.evals.test.transforms=pad_objects(4)',
    ]
    assert cli.main(['train', *words, '--workdir', str(tmp_path / 'part')]) == 0
    said = capsys.readouterr().out
    assert 'encoder: ' in said
    assert 'parameters read' in said
    assert 'not selected' in said
