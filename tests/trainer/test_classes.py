"""A model is evaluated on the classes that it has learned, by their number and their names."""

import itertools
import pathlib

import jax
import numpy as np
import pytest
from PIL import Image

from vit_jax.__main__ import main
from vit_jax.config import load as config_lib
from vit_jax.errors import EXIT_PREEMPTED
from vit_jax.trainer import build

DIGITS = 'tests/helpers/linear.py'

pytestmark = pytest.mark.usefixtures('one_device')


@pytest.fixture
def folder(tmp_path):
    """`folder('cat', 'dog')`: a source with eight gray images of each class."""
    numbers = itertools.count()

    def write(*names):
        root = tmp_path / f'images{next(numbers)}'
        for name, i in itertools.product(names, range(8)):
            (root / name).mkdir(parents=True, exist_ok=True)
            Image.fromarray(np.full((8, 8), i, np.uint8)).save(root / name / f'{i}.png')
        return f'folder:{root}'

    return write


def refused(capsys, *words):
    """The one line of a command that was refused."""
    assert main([str(word) for word in words]) == 2
    error = capsys.readouterr().err
    assert error.count('\n') == 1
    return error


def training(repo, workdir, train, test):
    flags = [f'--config.data.source={train}', f'--config.evals.test.source={test}']
    split = ['--config.evals.test.split=train', '--config.batch_size=16']
    return ['train', '--config', repo / DIGITS, '--workdir', workdir, *flags, *split]


def test_another_number_of_classes_is_refused_before_training(repo, folder, tmp_path, capsys):
    words = training(repo, tmp_path / 'run', folder('rose', 'tulip'), 'digits')
    error = refused(capsys, *words)
    assert 'config.evals.test: digits train has 10 classes' in error
    assert 'the model has 2 (rose, tulip)' in error
    assert not (tmp_path / 'run' / 'config.json').exists()


def test_other_names_are_refused_before_training(repo, folder, tmp_path, capsys):
    words = training(repo, tmp_path / 'run', folder('cat', 'dog'), folder('cat', 'emu'))
    assert "is 'emu', that of the model 'dog'" in refused(capsys, *words)


def test_a_run_is_not_evaluated_on_other_classes(smoke_run, folder, capsys):
    words = ['evaluate', '--workdir', smoke_run]
    other = ['--source', folder('rose', 'tulip'), '--split', 'train']
    assert '2 classes (rose, tulip), the model has 10' in refused(capsys, *words, *other)
    assert 'has 3 classes (7, 8, 9)' in refused(capsys, *words, '--classes', '7,8,9')


@pytest.mark.slow
def test_an_evaluator_that_learns_takes_any_classes(smoke_run, capsys):
    words = ['--evaluator', 'knn(k=3)', '--fit', 'train[:100]', '--classes', '7,8,9']
    assert main(['evaluate', '--workdir', str(smoke_run), *words]) == 0
    assert 'knn_accuracy' in capsys.readouterr().out


def test_classes_that_have_only_numbers_may_have_names_elsewhere(repo, folder):
    sources = [f'data.source={folder("0", "1")}', f'evals.test.source={folder("cat", "dog")}']
    flags = [*sources, 'evals.test.split=train', 'batch_size=16']
    training = build.build(config_lib.load(str(repo / DIGITS), flags), jax.devices()[:1])
    assert training.evaluations['test'].data.info.class_names == ('cat', 'dog')


@pytest.mark.slow
def test_a_run_does_not_go_on_with_other_classes(tmp_path, folder, repo, capsys):
    images = folder('cat', 'dog')
    words = training(repo, tmp_path / 'run', images, images)
    assert main([*map(str, words), '--stop-at', '1']) == EXIT_PREEMPTED
    root = pathlib.Path(images.removeprefix('folder:'))
    (root / 'dog').rename(root / 'emu')
    assert "class 1 is 'emu', and was 'dog' when the run was saved" in refused(capsys, *words)
