"""Expected errors of designs, compared with laws that are drawn and fitted."""

from __future__ import annotations

import numpy as np
import pytest
from helpers.messages import mentions

from vit_jax.__main__ import main
from vit_jax.scaling import coverage, curve_fit, forms, isoflop, isoflop_design
from vit_jax.scaling.noise import Seeds
from vit_jax.scaling.table import OBJECTIVES

LADDER, GAP = (1.0, 2.0, 4.0, 8.0, 16.0), (1.0, 3.0, 10.0, 30.0, 300.0)


def simulate(law, design, target, largest, draws, noise=0.002):
    """Standard deviation of predictions by weighted least squares, in units of the noise."""
    form, theta, _ = coverage.DESIGN_LAWS[law]
    form, theta = forms.find_form(form), np.array(theta)
    rng = np.random.default_rng(0)
    curve = form.log_value(theta, design.x[:, None] / largest)[0]
    truth = form.log_value(theta, np.array([[target / largest]]))[0][0]
    runs = Seeds(design.counts, np.zeros(len(design.x)))
    missed = []
    for _ in range(draws):
        y = np.exp(curve + noise * rng.standard_normal(len(curve)) / np.sqrt(design.counts))
        fit = curve_fit.fit(form, design.x, y, objective=OBJECTIVES['log squares'], seeds=runs)
        missed.append(np.log(fit.predict(np.array([target]))[0]) - truth)
    return np.sqrt(np.mean(np.square(missed))) / noise


@pytest.mark.slow
@pytest.mark.parametrize(
    ('law', 'x', 'better'),
    [('a x^-b', GAP, 'small'), ('a x^-b', LADDER, 'large'), ('a x^-b + c', LADDER, 'large')],
)
def test_one_large_run_or_several_small_ones(law, x, better):
    target = 4 * x[-1]
    planned, *_, small = coverage.designs(x, 3, target)
    assert small.name.startswith('without the largest') and small.cost <= planned.cost
    for design in (planned, small):
        assert design.errors[law] == pytest.approx(
            simulate(law, design, target, x[-1], 40), rel=0.35
        )
    assert (small.errors[law] < planned.errors[law]) == (better == 'small')


def test_seeds_of_each_divide_the_error_by_their_root():
    planned, all_seeds, half, _ = coverage.designs(LADDER, 4, 64.0)
    assert all_seeds.cost == 4 * planned.cost == 4 * sum(LADDER)
    for law in coverage.DESIGN_LAWS:
        assert all_seeds.errors[law] == pytest.approx(planned.errors[law] / 2)
        assert all_seeds.errors[law] < half.errors[law] < planned.errors[law]
    assert (planned.runs, all_seeds.runs, half.runs) == (5, 20, 11)
    repeated = coverage.designs([*LADDER, *LADDER], 1, 64.0)
    assert repeated[0].errors == pytest.approx(
        {law: error / np.sqrt(2) for law, error in planned.errors.items()}
    )
    assert coverage.designs(LADDER[:3], 3, 64.0) == []


SWEEP = """
from vit_jax.sweeps.space import Sweep, grid

def get_sweep(arg=None):
    points = grid({'total': [f'{n} epochs' for n in (1, 2, 4, 8)], 'seed': [0, 1]})
    return Sweep(config='experiments/vit/digits.py:smoke', metric='test/loss', points=points)
"""


@pytest.mark.slow
def test_a_plan_prices_seeds(tmp_path, capsys):
    file = tmp_path / 'sweep.py'
    file.write_text(SWEEP)
    assert main(['scaling', 'plan', str(file), '--seeds', '3']) == 0
    output = capsys.readouterr().out
    assert mentions(output, '4', '8', '50%', 'FLOPs')
    lines = [
        line for line in output.splitlines() if line.startswith(('as planned', '3 seeds of e'))
    ]
    planned, all_seeds = (line.rsplit(maxsplit=6) for line in lines)
    assert int(all_seeds[1]) == 3 * int(planned[1]) == 24
    assert float(all_seeds[2]) == pytest.approx(3 * float(planned[2]), rel=1e-3)
    argv = ['scaling', 'plan', '--config', 'experiments/vit/digits.py:smoke', '--seeds', '3']
    assert main(argv) == 0
    assert '3 seeds of each: ' in capsys.readouterr().out
    assert main([*argv, '--noise', '2']) == 2
    assert mentions(capsys.readouterr().err, '--noise', '2', '0', '1')


BUDGETS = (1e18, 3e18, 1e19, 3e19)


def study(kind, seeds=1):
    """Six sizes at each budget, the same for all (`fixed`) or around its optimum (`moved`)."""
    sizes = {
        c: 1e8 * (c / 1e19) ** 0.45 * np.geomspace(0.25, 4, 6)
        if kind == 'moved'
        else np.geomspace(1e7, 1e9, 6)
        for c in BUDGETS
    }
    runs = [(n, c) for c in BUDGETS for n in sizes[c]] * seeds
    return isoflop_design.from_runs(kind, *zip(*runs, strict=True))


@pytest.mark.parametrize(
    ('kind', 'seeds', 'noise'),
    [('fixed', 1, 0.004), ('moved', 1, 0.004), ('moved', 3, 0.004), ('moved', 1, 0.02)],
)
def test_the_error_of_an_optimum_is_the_spread_of_simulations(kind, seeds, noise):
    design, best, target = study(kind, seeds), (1e8, 1e19), 1.2e20
    assert design.runs == 24 * seeds and design.counts.tolist() == [seeds] * 24
    expected = isoflop_design.expected_errors(design, target, noise, best)
    law = isoflop_design.typical_law(design, best)
    y, rng = isoflop_design.predict(law, design.x), np.random.default_rng(7)
    spread = noise / np.sqrt(design.counts)
    sizes = [
        isoflop.parabolas(design.n, design.c, y * np.exp(spread * errors), np.ones(24))[0].size(
            target
        )
        for errors in rng.standard_normal((200, 24))
    ]
    assert expected.isoflop == pytest.approx(np.std(np.log(sizes)), rel=0.25)


def test_sizes_around_each_optimum_halve_the_error_of_fixed_ones():
    errors = []
    for kind in ('fixed', 'moved'):
        expected = isoflop_design.expected_errors(study(kind), 1.2e20, 0.002, (1e8, 1e19))
        errors.append(np.hypot(expected.isoflop, expected.bias))
    assert errors[1] < 0.6 * errors[0]
    (_, moved) = isoflop_design.alternatives(study('fixed'), 0, (1e8, 1e19))
    assert moved.cost == study('fixed').cost
    assert sorted(moved.n) == pytest.approx(sorted(study('moved').n), rel=0.05)


@pytest.mark.slow
def test_a_plan_of_a_study_counts_its_runs_and_prices_a_precision(capsys):
    argv = ['scaling', 'plan', 'tests/helpers/isoflop_file.py:branched', '--seeds', '3']
    argv += ['--precision', '0.1', '--noise', '0.005', '--optimum', '900@4e8']
    assert main(argv) == 0
    output = capsys.readouterr().out
    (planned,) = (line for line in output.splitlines() if line.startswith('as planned'))
    assert planned.split()[2] == '9', 'trunks are not runs'
    assert float(planned.split()[3]) == pytest.approx(3 * (1e8 + 4e8 + 1.6e9) / 1e18, rel=0.01)
    (line,) = (line for line in output.splitlines() if 'sizes within' in line and 'joint' in line)
    assert '--precision 0.1' in line
    assert mentions(output, '9', '4 times')
    assert main([*argv[:3], '--optimum', '900']) == 2
    assert '--optimum' in capsys.readouterr().err
