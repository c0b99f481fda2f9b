"""Examples that come or go while a run is stopped: another order of every epoch, so refused."""

import numpy as np
import pytest
from PIL import Image

from vit_jax.__main__ import main
from vit_jax.errors import EXIT_PREEMPTED
from vit_jax.storage import run_folder

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures('one_device')]


@pytest.fixture
def images(tmp_path):
    """A folder of 16 images of two classes."""
    for name in ('a', 'b'):
        (tmp_path / 'images' / name).mkdir(parents=True)
        for i in range(8):
            write(tmp_path / 'images' / name / f'{i}.png', i)
    return tmp_path / 'images'


def write(file, value):
    Image.fromarray(np.full((8, 8, 3), value, np.uint8)).save(file)


def contents(folder):
    return {path: path.read_bytes() for path in folder.rglob('*') if path.is_file()}


def refused(capsys, words, count):
    capsys.readouterr()
    assert main(words) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert f'has {count} examples, and had 16 when the run was saved' in line


@pytest.mark.fault(80)
def test_examples_that_came_or_went_are_told(repo, images, tmp_path, capsys):
    source, folder = f'folder:{images}', tmp_path / 'run'
    keys = {'data.source': source, 'evals.test.source': source, 'evals.test.split': 'train'}
    words = [f'--config.{key}={value}' for key, value in {**keys, 'batch_size': 8}.items()]
    words = ['train', '--config', f'{repo}/tests/helpers/linear.py', *words]
    words += ['--workdir', str(folder)]
    assert main([*words, '--stop-at=1']) == EXIT_PREEMPTED
    before = contents(folder)

    extra = images / 'b' / '8.png'
    write(extra, 8)
    refused(capsys, words, 17)
    extra.unlink()
    (images / 'a' / '0.png').rename(tmp_path / '0.png')
    refused(capsys, words, 15)
    assert contents(folder) == before
    (tmp_path / '0.png').rename(images / 'a' / '0.png')
    assert main([*words, '--stop-at=2']) == EXIT_PREEMPTED
    assert run_folder.steps(folder) == [1, 2]
