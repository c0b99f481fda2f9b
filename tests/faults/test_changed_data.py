"""Examples that come or go while a run is stopped: another order of every epoch, so refused."""

import numpy as np
import pytest
from helpers.messages import mentions
from helpers.runs import linear
from PIL import Image

from vit_jax.__main__ import main
from vit_jax.data.dataset import Dataset
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
    assert mentions(line, count, 'examples', '16')


@pytest.fixture
def words(images, tmp_path):
    """A training on these images."""
    source = f'folder:{images}'
    keys = {'data.source': source, 'evals.test.source': source, 'evals.test.split': 'train'}
    return linear(tmp_path / 'run', **keys, batch_size=8)


@pytest.mark.fault(80)
def test_examples_that_came_or_went_are_told(words, images, tmp_path, capsys):
    folder = tmp_path / 'run'
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


MOVED = {
    'to another class': ('a/0.png', 'b/8.png'),
    'to another name, and so to another place in the order': ('a/0.png', 'a/9.png'),
}


@pytest.mark.fault(121)
@pytest.mark.parametrize('change', MOVED)
def test_as_many_examples_of_other_names_or_labels_are_told(
    words, images, tmp_path, capsys, change
):
    assert main([*words, '--stop-at=1']) == EXIT_PREEMPTED
    before = contents(tmp_path / 'run')
    old, new = (images / name for name in MOVED[change])
    old.rename(new)
    capsys.readouterr()
    assert main(words) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert 'names or labels' in line and str(images) in line
    assert contents(tmp_path / 'run') == before
    new.rename(old)
    assert main([*words, '--stop-at=2']) == EXIT_PREEMPTED


@pytest.mark.fault(122)
def test_a_file_that_was_replaced_is_told_once(words, images, capsys):
    """It may have been repaired: the order of the examples is the same."""
    assert main([*words, '--stop-at=1']) == EXIT_PREEMPTED
    noise = np.random.default_rng(0).integers(0, 256, (8, 8, 3), np.uint8)
    Image.fromarray(noise).save(images / 'a' / '0.png')
    told = []
    for step in (2, 3):
        capsys.readouterr()
        assert main([*words, f'--stop-at={step}']) == EXIT_PREEMPTED
        told.append(mentions(capsys.readouterr().out, 'sizes', 'checksums'))
    assert told == [True, False]


def test_a_checkpoint_that_is_older_than_listings_goes_on(words, images, monkeypatch):
    facts = Dataset.facts
    with monkeypatch.context() as patch:
        without = lambda data: {k: v for k, v in facts(data).items() if k != 'listing'}  # noqa: E731
        patch.setattr(Dataset, 'facts', without)
        assert main([*words, '--stop-at=1']) == EXIT_PREEMPTED
    (images / 'a' / '0.png').rename(images / 'a' / '9.png')
    assert main([*words, '--stop-at=2']) == EXIT_PREEMPTED
