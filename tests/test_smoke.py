"""Experiments train a few steps at their smoke size, by the command line, and leave a run.

Those whose runs other tests read as well do so in `make test`, every one in `make smoke`. In `make
test`, `test_lowering` gives the steps of other systems batches of their data.
"""

from __future__ import annotations

import json
import math
import shutil

import jax
import pytest
from helpers.experiments import PATHS, ROOT
from helpers.finished import smoke_run_of

from vit_jax import __main__
from vit_jax.checkpoints import checkpointer
from vit_jax.config import load
from vit_jax.trainer import build

DIGITS = 'experiments/vit/digits.py'
# Other tests take the runs of these as well, and each run is trained once.
TRAINED = (DIGITS, 'experiments/mae/cifar10.py')
# These evaluators read masks or depth from the source, where batches may hold images alone.
READERS = ('mean_iou', 'panoptic_quality', 'patch_probe', 'patch_knn')
WITHOUT_TEXTS = ('zero_shot', 'patch_probe', 'patch_knn')
TRUTH = {'labels', 'segments', 'object_mask', 'depth'}
OTHERS = [path for path in PATHS if path not in TRAINED]


def read_metrics(folder):
    return [json.loads(line) for line in (folder / 'metrics.jsonl').read_text().splitlines()]


def params_of(folder):
    return checkpointer.load_variables(folder / 'checkpoints', None)[1]['params']


def check_small(config, steps, parameters):
    """Few steps of a small model, on data that need no download."""
    assert steps <= 50
    assert parameters < 2_000_000
    sections = (config['data'], *config['evals'].values())
    sources = {section['source'].partition(':')[0] for section in sections}
    scenes = {'scenes', 'scenes_captions', 'scenes_depth', 'scenes_panoptic'}
    assert sources <= scenes | {'digits', 'endless', 'synthetic'}


def check_run_folder(folder):
    """Config, metrics, a loss that is finite, a final evaluation, a checkpoint."""
    config = json.loads((folder / 'config.json').read_text())
    total = int(config['total'].split()[0])
    check_small(config, total, sum(leaf.size for leaf in jax.tree.leaves(params_of(folder))))
    rows = read_metrics(folder)
    assert [row['step'] for row in rows] == sorted(row['step'] for row in rows)
    assert rows[-1]['step'] == total
    losses = [row['train/loss'] for row in rows if 'train/loss' in row]
    assert losses and all(map(math.isfinite, losses))
    result = json.loads((folder / 'result.json').read_text())
    assert {key.partition('/')[0] for key in result} == set(config['evals'])
    by_task = {k for k, section in config['evals'].items() if 'evaluator' not in section}
    assert {f'{name}/loss' for name in by_task} <= result.keys()
    assert result.items() <= {k: v for row in rows for k, v in row.items()}.items()
    assert (folder / 'checkpoints' / str(total)).is_dir()
    assert list(folder.glob('**/events.out.tfevents.*'))


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.parametrize('path', OTHERS)
def test_steps_take_batches_of_the_data(path):
    training = build.build(load.load(f'{ROOT / path}:smoke'), jax.devices()[:1])
    program, data = training.program, training.data
    state, batch = program.abstract_state, next(data.train_batches())
    parameters = sum(leaf.size for leaf in jax.tree.leaves(state.params))
    check_small(training.config, training.timetable.total, parameters)
    # `build` has traced model and loss for examples of these shapes.
    made = {name: (x.shape, x.dtype) for name, x in batch.items()}
    assert made in [
        {name: ((kind.rows, *s.shape), s.dtype) for name, s in kind.arrays.items()}
        for kind in data.shapes
    ]
    second = getattr(training.config.task, 'second_text', '')
    # Only training reads views of images and second texts.
    unread = {name for name in batch if name.endswith('_image')} | {second, f'{second}_mask'}
    for name, one in training.evaluations.items():
        evaluator = training.config.evals[name].get('evaluator')
        truth = TRUTH if evaluator in READERS else set()
        if evaluator in WITHOUT_TEXTS:
            truth = truth | {'caption', 'caption_mask'}
        assert batch.keys() - unread - truth <= next(one.data.eval_batches()).keys()


@pytest.mark.slow
@pytest.mark.parametrize(
    'path', [*TRAINED, *(pytest.param(path, marks=pytest.mark.long) for path in OTHERS)]
)
def test_smoke_size_trains(path, tmp_path_factory):
    check_run_folder(smoke_run_of(tmp_path_factory, path))


@pytest.mark.slow
def test_a_complete_run_says_so_and_trains_no_further(smoke_run, one_device, tmp_path, capsys):
    folder = shutil.copytree(smoke_run, tmp_path / 'run')
    words = ['train', '--config', f'{ROOT / DIGITS}:smoke', '--workdir', str(folder)]
    capsys.readouterr()
    assert __main__.main(words) == 0
    assert 'complete' in capsys.readouterr().out
    assert read_metrics(folder) == read_metrics(smoke_run)


@pytest.mark.process
@pytest.mark.long
def test_train_and_evaluate_in_processes_of_their_own(tmp_path, run_cli):
    words = ['train', '--config', 'experiments/vit/digits.py:smoke', '--workdir', tmp_path]
    done = run_cli(*words)
    assert done.returncode == 0, done.stderr
    check_run_folder(tmp_path)
    assert (tmp_path / 'curves.png').read_bytes().startswith(b'\x89PNG')

    done = run_cli('evaluate', '--workdir', tmp_path)
    assert done.returncode == 0, done.stderr
    accuracy = json.loads((tmp_path / 'result.json').read_text())['test/accuracy']
    assert f'{accuracy:.4f}' in done.stdout


@pytest.mark.slow
def test_commands_are_listed(run_cli):
    done = run_cli()
    assert done.returncode == 0
    for name in ('train', 'evaluate'):
        assert f'\n  {name} ' in done.stdout


@pytest.mark.slow
@pytest.mark.parametrize(
    ('arguments', 'words'),
    [
        (['trian'], ["'trian'", "did you mean 'train'?"]),
        (['train', '--workdir', 'runs/none'], ['train CONFIG']),
        (['train', '--config', 'no.py', '--workdir', 'runs/none'], ["no file 'no.py'"]),
        (
            [
                *('train', '--config', 'experiments/vit/digits.py', '--workdir', 'runs/none'),
                '--config.optim.learning_rate=1',
            ],
            ['optim.learning_rate', "'learning_rate'"],
        ),
        (['evaluate', '--workdir', 'runs/none'], ['runs/none', 'no run']),
    ],
)
def test_a_mistake_is_one_line_and_exit_code_2(arguments, words, run_cli):
    done = run_cli(*arguments)
    assert done.returncode == 2
    assert done.stderr.startswith('error: ')
    assert len(done.stderr.splitlines()) == 1
    assert all(word in done.stderr for word in words)
