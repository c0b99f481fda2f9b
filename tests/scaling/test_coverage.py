"""`scaling coverage`: share of known laws inside the bands."""

from __future__ import annotations

import dataclasses
import json

import numpy as np
import pytest
from helpers.messages import mentions

from vit_jax.__main__ import main
from vit_jax.scaling import coverage, forms, table
from vit_jax.scaling.report import summarize

FEW = ['--form', 'power', '--points', '6', '--curves', '6', '--bootstrap', '20']


def measure(capsys, *argv):
    assert main(['scaling', 'coverage', *FEW, *argv, '--json']) == 0
    return json.loads(capsys.readouterr().out)


@pytest.mark.slow
def test_shares_of_truths(capsys):
    shares = measure(capsys)
    assert shares.keys() == {'fitted', 'beyond', 'far', 'past a break', 'b'}
    assert 0.5 < shares['fitted'] <= 1
    assert shares == measure(capsys)
    assert shares != measure(capsys, '--seed', '1')
    assert main(['scaling', 'coverage', *FEW]) == 0
    assert f'past a break  {shares["past a break"]:.2f}\n' in capsys.readouterr().out


def test_a_break_that_is_larger_than_the_noise_is_outside(capsys):
    assert measure(capsys, '--noise', '0.001')['past a break'] == 0


@pytest.mark.parametrize(
    ('argv', 'message'),
    [
        (['--form', 'joint'], '--form joint'),
        (['--points', '1'], ('--points', '1', '2')),
        (['--curves', '0'], ('--curves', '0', '1')),
        (['--noise', '0'], 'more than 0'),
    ],
)
def test_mistakes_are_one_line(capsys, argv, message):
    assert main(['scaling', 'coverage', *FEW, *argv]) == 2
    error = capsys.readouterr().err
    assert mentions(error, message) and error.count('\n') == 1


def test_a_law_holds_itself():
    law = {'a': 1.0, 'b': 0.5, 'c': 0.1, 'd': 2.0}
    x = np.array([coverage.SPAN])
    assert coverage.broken_law_value(law, x) == pytest.approx(coverage.law_value(law, x))
    assert coverage.broken_law_value(law, 4 * x) > coverage.law_value(law, 4 * x)


def test_a_caveat_names_each_fitted_form():
    text = coverage.caveat(['power', 'm4', 'power'])
    share = f'{100 * coverage.MEASURED["power"][0]:.0f} %'
    assert mentions(text, 'power', '90 %', share)
    assert 'm4' in text.rpartition('; ')[2]
    text = coverage.caveat(['auto'])
    inside, of = coverage.MEASURED_REAL['image']
    assert text.startswith(f'bands of 90 % held {inside} of {of} image, ') and 'break' in text
    assert coverage.MEASURED_KINDS.keys() == {law.name for law in coverage.LAWS}


@pytest.mark.long
@pytest.mark.slow
def test_auto_is_measured_on_every_kind_of_law(capsys):
    argv = ['--form', 'auto', '--points', '12', '--curves', '1', '--bootstrap', '1']
    shares = measure(capsys, *argv)
    names = [f'{law.name}: {at}' for law in coverage.LAWS for at in ('beyond', 'far')]
    assert list(shares) == names
    assert all(share in (0, 1) or np.isnan(share) for share in shares.values())
    assert np.nanmean([*shares.values()]) > 0.6


@pytest.mark.parametrize('law', coverage.LAWS, ids=lambda law: law.name)
def test_synthetic_laws(law):
    rng = np.random.default_rng(0)
    x = coverage.SPAN * np.geomspace(1 / coverage.SPAN, 10, 14)[:, None]
    log_y = forms.find_form(law.form).log_value(coverage.draw_law(law.form, rng), x)[0]
    assert np.isfinite(log_y).all() and log_y[-1] < log_y[0]
    growth = law.growth ** np.linspace(-0.5, 0.5, 4000)
    errors = coverage.draw_noise(law, 4000, rng) / growth
    assert errors.std() == pytest.approx(law.noise, rel=0.1)
    assert np.corrcoef(errors[1:], errors[:-1])[0, 1] == pytest.approx(law.correlation, abs=0.08)


def test_kinks_and_wiggles_are_part_of_the_truth():
    x = np.geomspace(1, coverage.SPAN, 200)[:, None]
    plain = coverage.SyntheticLaw('plain', 'power', 0.0)
    straight = coverage.draw_curve(plain, np.random.default_rng(3))(x)
    kinked = dataclasses.replace(plain, kink=0.1)
    bent = coverage.draw_curve(kinked, np.random.default_rng(3))(x) - straight
    slopes = np.diff(bent) / np.diff(np.log(x[:, 0]))
    assert np.abs(slopes[:50]).max() < 1e-9 < np.ptp(slopes) <= 0.1
    waves = coverage.draw_curve(dataclasses.replace(plain, wiggle=0.02), np.random.default_rng(3))
    assert 0.019 < np.abs(waves(x) - straight).max() <= 0.02


def test_a_curve_of_the_table_is_held_by_the_band_without_its_last_points():
    x = np.geomspace(1, 64, 14)
    rows = [{'x': str(a), 'loss': str(1 + a**-0.5)} for a in x]
    options = table.FitOptions(('x',), 'loss', form='irreducible', bootstrap=1)
    (curve,) = table.fit_curves(rows, options)
    assert coverage.holds_last(curve)
    assert summarize([curve], options)['bands_hold_last'] == {'held': 1, 'of': 1}
    far = dataclasses.replace(curve, y=np.where(curve.fit_mask, curve.y, 2 * curve.y))
    assert coverage.holds_last(far) is False
    (without,) = table.fit_curves(rows, dataclasses.replace(options, bootstrap=0))
    assert coverage.holds_last(without) is None
