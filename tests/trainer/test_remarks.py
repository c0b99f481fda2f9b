"""Unusual runs are said in one line, usual ones are not."""

from __future__ import annotations

import dataclasses
import json

import jax
import numpy as np
import PIL.Image
import pytest

from vit_jax.__main__ import main
from vit_jax.config import load
from vit_jax.trainer import build
from vit_jax.trainer.remarks import DAY, Remarks

DIGITS = 'experiments/vit/digits.py:smoke'


@pytest.fixture
def make(repo, one_device):
    def make(*overrides: str) -> Remarks:

        config = load.load(str(repo / DIGITS), ['step.ema_decay=0', *overrides])
        return Remarks(build.build(config, jax.devices()[:1]))

    return make


@pytest.mark.parametrize(
    ('overrides', 'said'),
    [
        ((), ''),
        (('evals.test.split=train',), 'config.evals.test'),
        (('step.ema_decay=0.999',), '98%'),
        (('step.ema_decay=0.89',), ''),  # holds 0.89^20 = 0.097 after 20 steps
        (('step.ema_decay=0.9',), '12%'),
        (('step.accum_steps=2',), ''),
    ],
)
def test_what_a_config_tells(make, overrides, said):
    lines = make(*overrides).at_start()
    assert len(lines) == bool(said)
    assert all(said in line and '\n' not in line for line in lines)


def test_files_of_both_splits_are_said(make, tmp_path, capsys):
    for split, numbers in (('train', range(6)), ('val', (5, 6, 7, 8))):
        for i in numbers:
            path = tmp_path / split / 'ab'[i % 2] / f'{split}{i}.png'
            path.parent.mkdir(parents=True, exist_ok=True)
            pixels = np.random.default_rng(i).integers(0, 256, (8, 8), np.uint8)
            PIL.Image.fromarray(pixels).save(path)
    source = f'folder:{tmp_path}'
    overrides = [f'data.source={source}', 'data.split=train', 'batch_size=4']
    overrides += [f'evals.test.source={source}', 'evals.test.split=val']
    (line,) = make(*overrides).at_start()
    assert 'config.evals.test' in line and '1 of 4' in line
    assert 'train5.png' in line and 'val5.png' in line
    (tmp_path / 'val' / 'b' / 'val5.png').unlink()
    assert not make(*overrides).at_start()
    # The same pixels in another file format are found by reading all.
    picture = PIL.Image.open(tmp_path / 'train' / 'a' / 'train4.png')
    picture.save(tmp_path / 'val' / 'a' / 'val4.png', compress_level=0)
    assert not make(*overrides).at_start()
    words = ['data', DIGITS, '--read-all', '--json', '--batches', '1']
    assert main([*words, *(f'--config.{override}' for override in overrides)]) == 0
    ((ours, theirs),) = json.loads(capsys.readouterr().out)['copies']['test']
    assert ours.endswith('train4.png') and theirs.endswith('val4.png')


def test_batch_norm_of_microbatches_is_said(make):
    """A ViT's own is refused, see tests/models/test_vit.py; this is a model of one's own."""
    training = make('step.accum_steps=2').training
    state = dataclasses.replace(training.program.abstract_state, collections={'batch_stats': {}})
    program = dataclasses.replace(training.program, abstract_state=state)
    (line,) = Remarks(dataclasses.replace(training, program=program)).at_start()
    assert 'config.step.accum_steps' in line


def test_days_on_a_cpu_are_said_once(make):
    remarks = make()
    assert not remarks.about_pace(10, DAY / 10)
    assert '2 days' in remarks.about_pace(10, 0.2 * DAY)
    assert not remarks.about_pace(11, 0.2 * DAY)


def test_accuracy_at_chance_is_said_once_after_a_tenth_of_the_run(make):
    """The test split has 360 digits: chance is at most a tenth and two standard errors."""
    remarks = make()
    assert not remarks.about_accuracy(1, {'test/accuracy': 0.1})
    assert not remarks.about_accuracy(2, {'test/accuracy': 0.2})
    assert not remarks.about_accuracy(2, {'test/loss': 0.1})
    assert 'test/accuracy 0.100' in remarks.about_accuracy(2, {'test/accuracy': 0.1})
    assert not remarks.about_accuracy(4, {'test/accuracy': 0.1})
