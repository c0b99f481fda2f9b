"""`scaling coverage`: what the bands hold of laws that are known."""

from __future__ import annotations

import json

import numpy as np
import pytest

from vit_jax.__main__ import main
from vit_jax.scaling import coverage

FEW = ['--form', 'power', '--points', '6', '--curves', '6', '--bootstrap', '20']


def measured(capsys, *words):
    assert main(['scaling', 'coverage', *FEW, *words, '--json']) == 0
    return json.loads(capsys.readouterr().out)


@pytest.mark.slow
def test_shares_of_truths(capsys):
    found = measured(capsys)
    assert found.keys() == {'fitted', 'beyond', 'past a break', 'b'}
    assert 0.5 < found['fitted'] <= 1
    assert found == measured(capsys)
    assert found != measured(capsys, '--seed', '1')
    assert main(['scaling', 'coverage', *FEW]) == 0
    assert f'past a break  {found["past a break"]:.2f}\n' in capsys.readouterr().out


def test_a_break_that_is_larger_than_the_noise_is_outside(capsys):
    assert measured(capsys, '--noise', '0.001')['past a break'] == 0


@pytest.mark.parametrize(
    ('words', 'message'),
    [
        (['--form', 'joint'], 'laws can be drawn of power, irreducible'),
        (['--points', '1'], '--points 1: must be at least 2'),
        (['--curves', '0'], '--curves 0: must be at least 1'),
        (['--noise', '0'], 'more than 0'),
    ],
)
def test_mistakes_are_one_line(capsys, words, message):
    assert main(['scaling', 'coverage', *FEW, *words]) == 2
    error = capsys.readouterr().err
    assert message in error and error.count('\n') == 1


def test_a_law_holds_itself():
    law = {'a': 1.0, 'b': 0.5, 'c': 0.1, 'd': 2.0}
    x = np.array([coverage.SPAN])
    assert coverage.broken(law, x) == pytest.approx(coverage.value(law, x))
    assert coverage.broken(law, 4 * x) > coverage.value(law, 4 * x)


def test_readers_of_bands_are_told_the_coverage_of_the_forms_that_were_fitted():
    said = coverage.caveat(['power', 'm4', 'power'])
    assert said.startswith('on known laws of the form power, bands of 90 % held 71 %')
    assert said.endswith('; the coverage of bands of the form m4 is not known')
