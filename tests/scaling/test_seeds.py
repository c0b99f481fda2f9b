"""Runs that differ only in the seed: means, weights, measured noise, and notes."""

from __future__ import annotations

import json

import numpy as np
import pytest
from helpers.messages import mentions, says

from vit_jax.errors import UserError
from vit_jax.scaling import (
    curve_fit,
    forms,
    manifest,
    noise,
    optimal,
    pages,
    plots,
    points,
    report,
    runs,
    table,
)
from vit_jax.scaling.report import summarize
from vit_jax.scaling.table import OBJECTIVES

pytestmark = pytest.mark.slow  # as a whole

X = np.geomspace(1e3, 1e6, 6)
COUNTS = (4, 3, 2, 2, 1, 1)


def make_rows(sigma=0.03, counts=COUNTS, seed=0, law=lambda x: 5 * x**-0.4):
    """Rows of a table: several seeds at most x."""
    rng = np.random.default_rng(seed)
    return [
        {'x': repr(float(x)), 'loss': repr(float(law(x) * np.exp(sigma * e))), 'seed': str(i)}
        for x, count in zip(X, counts, strict=True)
        for i, e in enumerate(rng.standard_normal(count))
    ]


def ask(**options):
    shared = {'x': ('x',), 'y': 'loss', 'holdout': 0.0, 'bootstrap': 0, 'form': 'power'}
    return table.FitOptions(**shared | {'seed': 'seed'} | options)


def fit_one(rows, **options):
    (curve,) = table.fit_curves(rows, ask(**options))
    return curve


def test_rows_of_one_x_are_a_point_with_their_spread():
    rows = make_rows()
    curve = fit_one(rows)
    logs = [np.log([float(r['loss']) for r in rows if float(r['x']) == x]) for x in X]
    assert curve.x[:, 0].tolist() == X.tolist()
    assert curve.y == pytest.approx(np.exp([np.mean(values) for values in logs]))
    assert tuple(curve.seeds.counts) == COUNTS
    assert curve.seeds.stds[:4] == pytest.approx([np.std(v, ddof=1) for v in logs[:4]])
    shown = summarize([curve], ask())['curves'][0]['seeds']
    assert (shown['runs'], shown['points'], shown['repeated']) == (13, 6, 4)
    assert shown['noise'] == pytest.approx(0.03, rel=0.5)
    page = pages.markdown(report.report_blocks(summarize([curve], ask()), []))
    assert mentions(page, '13', '6 points', '4')


def test_weighted_means_are_fitted_like_all_runs():
    rows = make_rows()
    x, y = (np.array([float(row[name]) for row in rows]) for name in ('x', 'loss'))
    curve, power = fit_one(rows), forms.find_form('power')
    squares = OBJECTIVES['log squares']
    all_runs = curve_fit.fit(power, x, y, objective=squares)
    means = curve_fit.fit(power, curve.x, curve.y, objective=squares, seeds=curve.seeds)
    alike = curve_fit.fit(power, curve.x, curve.y, objective=squares)
    assert means.params == pytest.approx(all_runs.params, rel=1e-4)
    assert abs(alike.params['b'] / all_runs.params['b'] - 1) > 1e-4


def test_seeds_measure_the_noise_of_points_that_a_curve_goes_through():
    rows = [row for row in make_rows(counts=(3,) * 6) if float(row['x']) < 5e3]
    curve = fit_one(rows, bootstrap=20)
    lonely = curve_fit.fit(forms.find_form('power'), curve.x, curve.y, bootstrap=20)
    assert len(curve.y) == 2 == len(forms.find_form('power').names)
    assert lonely.noise.std < 1e-6
    assert curve.fit.noise.measured and curve.fit.dof == 4
    assert curve.fit.noise.std == pytest.approx(curve.seeds.noise / np.sqrt(3))
    low, high = curve.fit.predict_band(np.array([1e6]))
    assert low < 5 * 1e6**-0.4 < high


def test_a_form_that_misses_the_points_by_more_than_seeds_differ():
    curve = fit_one(
        make_rows(sigma=0.002, counts=(3,) * 6, law=lambda x: 5 * x**-0.4 + 0.1), bootstrap=3
    )
    assert not curve.fit.noise.measured
    assert mentions(curve.fit.warnings[0], 'misses', 'points')
    free = len(X) - 2
    assert noise.pool_noise(np.full(6, 1e-3), free, curve.seeds).measured


def measure_coverage(count, draws=8):
    results = []
    for i in range(draws):
        curve = fit_one(
            make_rows(counts=(count,) * 6, seed=i), form='power', bootstrap=20, seed='seed'
        )
        low, high = curve.fit.predict_band(np.array([4e6]))
        results.append((low <= 5 * 4e6**-0.4 <= high, np.log(high / low)))
    return np.mean(results, axis=0)


def test_bands_of_repeated_points_hold_the_truth_and_are_narrower():
    share, width = measure_coverage(4)
    _, single_width = measure_coverage(1)
    assert share >= 0.8
    assert width < 0.8 * single_width


def test_one_seed_twice_at_one_x_is_a_mistake():
    rows = make_rows()
    rows[1] = rows[1] | {'seed': '0'}
    with pytest.raises(UserError, match='lines 2 and 3'):
        fit_one(rows)
    with pytest.raises(UserError, match='--seed: unknown column'):
        fit_one(make_rows(), seed='sead')


def test_without_the_flag_each_row_is_a_point():
    assert len(fit_one(make_rows(), seed=None).y) == sum(COUNTS)


def test_copies_count_once_and_one_run_has_one_loss():
    rows = [row | {'run': str(i)} for i, row in enumerate(make_rows())]
    curve = fit_one([*rows, rows[2]])
    assert curve.seeds.counts.sum() == len(rows)
    assert says(curve.notes, '1 row(s) are copies')
    rows[2]['finished'] = '0'
    assert mentions(fit_one(rows).notes[0], '1', 'unfinished')
    with pytest.raises(UserError, match=r"lines 4 and 15: .* '2' .* x=1000\.0"):
        fit_one([*rows, rows[2] | {'loss': '1'}])


def make_run(folder, seed, steps=100, **sections):
    folder.mkdir(parents=True)
    config = {'batch_size': 10, 'seed': seed, 'model': {'name': 'vit'}, 'total': steps, **sections}
    (folder / 'config.json').write_text(json.dumps(config))
    line = {'step': steps, 'test/loss': 3 / steps**0.5 + 0.01 * seed}
    (folder / 'metrics.jsonl').write_text(json.dumps(line) + '\n')
    return folder


def collect_settings(folder):
    rows = runs.collect([folder], lambda meta: None)
    return {row['run'].rpartition('/')[2]: row.get('setting') for row in rows}


def test_collect_recognizes_seeds_of_a_setting(tmp_path):
    for name, seed, steps in (('a', 0, 100), ('b', 1, 100), ('c', 0, 200)):
        make_run(tmp_path / name, seed, steps)
    settings = collect_settings(tmp_path)
    assert settings['a'] == settings['b'] != settings['c']
    notes = '; '.join(
        manifest.diagnostics(manifest.entries(runs.collect([tmp_path], lambda m: None)))
    )
    assert mentions(notes, '1', '2 settings', '2 seeds')
    rows = [
        {key: str(value) for key, value in row.items()}
        for row in runs.collect([tmp_path], lambda meta: None)
    ]
    curve = fit_one(rows, x=('examples_seen',), y='test/loss', seed=None)
    assert sorted(curve.seeds.counts) == [1, 2]


def test_branches_of_trunks_that_differ_in_the_seed_are_one_setting(tmp_path):
    for seed in (0, 1):
        # One goes on for a longer branch.
        trunk = make_run(tmp_path / f'trunk{seed}', seed, 100 * (1 + seed))
        make_run(tmp_path / f'branch{seed}', seed, 50, branch={'from': str(trunk), 'step': 40})
    settings = collect_settings(tmp_path)
    assert set(settings) == {'branch0', 'branch1'}
    assert settings['branch0'] == settings['branch1'] is not None
    (tmp_path / 'trunk1' / 'config.json').write_text('damaged')
    assert runs.setting({'seed': 1, 'branch': {'from': str(tmp_path / 'trunk1')}})


def test_without_repetitions_there_is_no_column(tmp_path):
    for seed in (0, 1):
        make_run(tmp_path / str(seed), seed, steps=100 + seed)
    assert set(collect_settings(tmp_path).values()) == {None}
    notes = manifest.diagnostics(manifest.entries(runs.collect([tmp_path], lambda meta: None)))
    assert mentions(notes, '2 settings', 'measured')


def test_pictures_have_a_bar_at_each_repeated_point():
    curve = fit_one(make_rows())
    figure = plots.draw_curves([curve], ask())
    (bars,) = figure.axes[0].containers
    segments = bars.lines[2][0].get_segments()
    assert len(segments) == 4
    ratio = segments[0][1, 1] / curve.y[0]
    assert np.log(ratio) == pytest.approx(curve.seeds.stds[0])
    assert mentions(figure.legends[0].get_title().get_text(), 'standard', 'deviation')


def test_rows_of_one_size_and_data_weigh_in_the_joint_law():
    rng, rows = np.random.default_rng(0), []
    for n in np.geomspace(1e6, 1e8, 4):
        for d in np.geomspace(1e8, 1e10, 4):
            y = 1.7 + 400 * n**-0.34 + 410 * d**-0.28
            draws = np.exp(0.01 * rng.standard_normal(3 if n < 1e7 else 1))
            rows += [{'N': str(n), 'D': str(d), 'loss': str(y * draw)} for draw in draws]
    (read,) = points.read(rows, points.Columns('N', 'D', None, 'loss'))
    assert sorted(set(read.seeds.counts)) == [1, 3]
    assert read.seeds.noise == pytest.approx(0.01, rel=0.4)
    analysis = optimal.analyze(read, optimal.AnalysisOptions(bootstrap=0))
    assert analysis.joint.noise.measured and mentions(analysis.notes[0], 'weighted', 'number')


def test_the_text_on_seeds():
    counts, squares = np.array([2, 1]), np.array([0.0008, 0.0])
    text = noise.Seeds(counts, squares).text
    assert says(text, '3 runs at 2 points', '1 with several seeds', '2.8 %')
    assert noise.single_runs(3).text == ''


def at_equal_compute(sigma=0.002, sizes=3):
    """Three budgets of some sizes, of which the smaller have three seeds."""
    rng, rows = np.random.default_rng(0), []
    for c in (1e18, 1e19, 1e20):
        best = 1e8 * (c / 1e18) ** 0.5
        for i, ratio in enumerate(np.geomspace(1 / 3, 3, sizes)):
            y = 2 + 0.1 * np.log(ratio) ** 2 + 1e3 * c**-0.2
            for draw in np.exp(sigma * rng.standard_normal(3 if i < 2 else 1)):
                # Counted from rates, data differs a little between seeds of one setting.
                n, d = best * ratio, c / 6 / best / ratio * rng.uniform(0.9999, 1.0001)
                row = {'N': repr(float(n)), 'D': repr(float(d)), 'loss': repr(float(y * draw))}
                rows.append(row | {'C': repr(c), 'setting': f'{c:g} {i}', 'run': str(len(rows))})
    return rows


def parabolas(rows, **options):
    (read,) = points.read(rows, points.Columns('N', None, 'C', 'loss'))
    return optimal.analyze(read, optimal.AnalysisOptions(**{'bootstrap': 0} | options))


def test_parabolas_weigh_means_by_their_runs():
    rows = at_equal_compute(sizes=5)
    analysis = parabolas(rows)
    assert (len(analysis.points.y), analysis.points.seeds.counts.max()) == (15, 3)
    first = [row for row in rows if row['C'] == repr(1e18)]
    log_n, y = (np.array([float(row[name]) for row in first]) for name in ('N', 'loss'))
    square, linear, _ = np.polyfit(np.log(log_n), y, 2)
    assert np.log(analysis.parabolas.n[0]) == pytest.approx(-linear / (2 * square), abs=1e-3)


def test_seeds_give_parabolas_of_three_sizes_a_band():
    law = parabolas(at_equal_compute(), bootstrap=40).summary['isoflop']
    low, high = law['bands']['a']
    assert low < law['a'] < high and abs(law['a'] - 0.5) < high - low < 0.05
    single_runs = [row for row in at_equal_compute() if int(row['run']) % 7 in (0, 3, 6)]
    assert parabolas(single_runs, bootstrap=40).summary['isoflop']['bands'] == {}


def test_runs_of_one_setting_are_a_point_of_the_joint_law():
    (read,) = points.read(at_equal_compute(), points.Columns('N', 'D', 'C', 'loss'))
    assert len(read.y) == 9 and read.seeds.counts.sum() == 21
