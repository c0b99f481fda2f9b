"""`scaling coverage`: what the bands hold of laws that are known."""

from __future__ import annotations

import json

import numpy as np
import pytest

from vit_jax.__main__ import main
from vit_jax.scaling import coverage, forms

FEW = ['--form', 'power', '--points', '6', '--curves', '6', '--bootstrap', '20']


def measured(capsys, *words):
    assert main(['scaling', 'coverage', *FEW, *words, '--json']) == 0
    return json.loads(capsys.readouterr().out)


@pytest.mark.slow
def test_shares_of_truths(capsys):
    found = measured(capsys)
    assert found.keys() == {'fitted', 'beyond', 'far', 'past a break', 'b'}
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
        (['--form', 'joint'], 'laws can be drawn of auto, power, irreducible'),
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
    assert coverage.broken_law_value(law, x) == pytest.approx(coverage.law_value(law, x))
    assert coverage.broken_law_value(law, 4 * x) > coverage.law_value(law, 4 * x)


def test_readers_of_bands_are_told_the_coverage_of_the_forms_that_were_fitted():
    said = coverage.caveat(['power', 'm4', 'power'])
    share = f'{100 * coverage.MEASURED["power"][0]:.0f} %'
    assert said.startswith(f'on known laws of the form power, bands of 90 % held {share}')
    assert said.endswith('; the coverage of bands of the form m4 is unknown')
    said = coverage.caveat(['auto'])
    assert said.startswith('on synthetic laws of eight kinds') and 'break' in said


@pytest.mark.long
@pytest.mark.slow
def test_auto_is_measured_on_every_kind_of_law(capsys):
    words = ['--form', 'auto', '--points', '12', '--curves', '1', '--bootstrap', '4']
    found = measured(capsys, *words)
    assert all(0 <= share <= 1 for share in found.values())
    assert {f'{law.name}: far' for law in coverage.LAWS} < found.keys()
    of_tuned = [found[f'{law.name}: beyond'] for law in coverage.LAWS if law.tuned]
    assert found['tuned: beyond'] == np.mean(of_tuned)


@pytest.mark.parametrize('law', coverage.LAWS, ids=lambda law: law.name)
def test_synthetic_laws(law):
    rng = np.random.default_rng(0)
    x, out = coverage.design_points(law.form, 12)
    assert np.prod(x.max(axis=0)) == pytest.approx(coverage.SPAN)
    assert np.prod(out, axis=1) == pytest.approx([4 * coverage.SPAN, 10 * coverage.SPAN])
    log_y = forms.find(law.form).log_value(coverage.draw_law(law.form, rng), np.vstack([x, out]))[0]
    assert np.isfinite(log_y).all() and log_y[-1] < log_y[0]
    errors = coverage.draw_noise(law, 4000, rng)
    assert errors.std() == pytest.approx(law.noise, rel=0.1)
    assert np.corrcoef(errors[1:], errors[:-1])[0, 1] == pytest.approx(law.correlation, abs=0.08)
