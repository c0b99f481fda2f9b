"""Data whose images a trained model does not take are refused in one line, before anything runs."""

from __future__ import annotations

import numpy as np
import pytest
from helpers.messages import mentions
from PIL import Image

from vit_jax.__main__ import main
from vit_jax.config import load
from vit_jax.errors import UserError
from vit_jax.trainer import build


@pytest.fixture
def colors(tmp_path):
    """A folder of ten classes of images of 8 x 8 in color."""
    for label in range(10):
        folder = tmp_path / 'colors' / str(label)
        folder.mkdir(parents=True)
        Image.fromarray(np.full((8, 8, 3), label, np.uint8)).save(folder / '0.png')
    return f'folder:{tmp_path / "colors"}'


def refuse(capsys, *argv):
    """Run a command that is refused, and return its one line."""
    assert main([str(word) for word in argv]) == 2
    error = capsys.readouterr().err
    assert error.count('\n') == 1
    return error


@pytest.mark.parametrize('evaluator', [(), ('--evaluator', 'knn(k=3)', '--fit', 'train')])
def test_other_channels(smoke_run, colors, capsys, evaluator):
    argv = ['--source', colors, '--split', 'train', '--batch-size', 4, *evaluator]
    error = refuse(capsys, 'evaluate', '--workdir', smoke_run, *argv)
    assert mentions(error, 'patch_embed/kernel', '(2, 2, 1, 32)', '(2, 2, 3, 32)')
    assert 'images of 8 x 8 (3 channels), trained on 8 x 8 (1 channel)' in error


def test_another_kind_of_data(smoke_run, capsys):
    argv = ['--source', 'synthetic:reverse', '--split', 'train']
    error = refuse(capsys, 'evaluate', '--workdir', smoke_run, *argv)
    assert mentions(error, 'examples', "'image'")


@pytest.mark.parametrize('transforms', ['resize(12)', 'resize((8, 6))'])
def test_evaluations_of_another_size_are_refused_before_training(repo, transforms, one_device):
    flags = ['model.posemb=learn', f'evals.test.transforms={transforms}']
    config = load.load(f'{repo}/experiments/vit/digits.py:smoke', flags)
    with pytest.raises(UserError, match=r'config.evals.test: .* pos_embed .* 8 x 8 \(1 channel\)'):
        build.build(config)


def test_a_model_of_any_size_takes_other_sizes(repo, one_device):
    config = load.load(
        f'{repo}/experiments/vit/digits.py:smoke', ['evals.test.transforms=resize(12)']
    )
    assert build.build(config).evaluations['test'].data.image_size == (12, 12)


@pytest.mark.parametrize(
    ('experiment', 'flags', 'message'),
    [
        ('mae/cifar10', 'task.name=classify', ('classify', "'logits'")),
        ('detr/scenes', 'task.name=classify', ('classify', "'label'")),
        (
            'vit/digits',
            'data.source=synthetic:copy data.transforms=',
            ("'image'", 'example'),
        ),
        ('detr/scenes', 'data.sizes=((0,0),)', 'sizes=((0, 0),)'),
    ],
)
def test_a_task_that_model_or_data_do_not_serve(
    repo, tmp_path, capsys, one_device, experiment, flags, message
):
    config = f'{repo}/experiments/{experiment}.py:smoke'
    overrides = [f'--config.{flag}' for flag in flags.split(' ')]
    argv = ['--config', config, '--workdir', tmp_path / 'run', *overrides]
    assert mentions(refuse(capsys, 'train', *argv), message)
    assert not (tmp_path / 'run').exists()


def test_images_too_large_for_any_memory(smoke_run, capsys):
    argv = ['--workdir', smoke_run, '--image-size', '1000000', 'a.png']
    assert 'the limit is 67,108,864 pixels' in refuse(capsys, 'predict', *argv)
