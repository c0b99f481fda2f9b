"""Compute-optimal sizes: synthetic truths are recovered; bad tables give a line or a note."""

from __future__ import annotations

import csv
import itertools
import json

import numpy as np
import pytest
from helpers.messages import mentions, says

from vit_jax import __main__ as cli
from vit_jax.errors import UserError
from vit_jax.scaling import drift, inference_cost, isoflop, optimal, plots_optimal, points
from vit_jax.scaling import joint as joint_law

TRUE = {'E': 1.7, 'A': 400.0, 'alpha': 0.34, 'B': 1000.0, 'beta': 0.28}
BUDGETS = (1e18, 3e18, 1e19, 3e19, 1e20)
COLUMNS = points.Columns('N', 'D', None, 'loss')


def best_size(c, law=TRUE):
    alpha, beta = law['alpha'], law['beta']
    scale = (alpha * law['A'] / (beta * law['B'])) ** (1 / (alpha + beta))
    return scale * (c / 6) ** (beta / (alpha + beta))


def loss(n, d, law=TRUE):
    return law['E'] + law['A'] * n ** -law['alpha'] + law['B'] * d ** -law['beta']


def runs(noise=0.0, center=1.0, law=TRUE, wide=8.0, seed=0):
    """Seven sizes around the optimum of each of five budgets."""
    rng, rows = np.random.default_rng(seed), []
    for c in BUDGETS:
        for n in center * best_size(c, law) * np.geomspace(1 / wide, wide, 7):
            d = c / 6 / n
            y = loss(n, d, law) * np.exp(noise * rng.standard_normal())
            rows.append({'N': n, 'D': d, 'C': c, 'loss': y})
    return [{name: repr(float(number)) for name, number in row.items()} for row in rows]


def analyze(rows, columns=COLUMNS, **options):
    (runs,) = points.read(rows, columns)
    return optimal.analyze(runs, optimal.AnalysisOptions(**{'bootstrap': 0} | options))


@pytest.mark.parametrize('center', [1.0, 3.0])
def test_the_joint_law_recovers_the_truth_and_parabolas_do_not(center):
    analysis = analyze(runs(center=center), target=1e22)
    joint, parabolas = analysis.summary['joint'], analysis.summary['isoflop']
    assert {name: joint[name] for name in TRUE} == pytest.approx(TRUE, rel=1e-3)
    assert joint['a'] == pytest.approx(0.28 / 0.62, rel=1e-3)
    assert joint['a'] + joint['b'] == pytest.approx(1)
    assert joint['target']['N'] == pytest.approx(best_size(1e22), rel=1e-3)
    n, d = joint['target']['N'], joint['target']['D']
    assert 6 * n * d == pytest.approx(1e22)
    assert joint['target']['loss'] == pytest.approx(loss(n, d))
    error = abs(np.log(parabolas['target']['N'] / best_size(1e22)))
    assert 0.01 < error < 0.2, 'biased without noise'


def test_how_far_parabolas_are_off():
    law = TRUE | {'alpha': 0.6, 'A': 4e4}
    for center in (0.5, 2.0):
        summary = analyze(runs(center=center, law=law)).summary
        middle = summary['isoflop']['budgets'][2]
        assert 0.04 < abs(np.log(middle['N'] / best_size(middle['C'], law))) < 0.2
        assert summary['joint']['alpha'] == pytest.approx(0.6, rel=1e-3)


def test_the_optimum_is_that_of_the_law():
    """A minimum over N by search, also where C is no multiple of N D."""
    for cost in (points.Cost(), points.Cost(k=3.0, p=0.9, q=1.1)):
        n, d, y = (v[0] for v in joint_law.optimum(TRUE, cost, np.array([1e20])))
        assert cost.k * n**cost.p * d**cost.q == pytest.approx(1e20)
        sizes = n * np.geomspace(0.9, 1.1, 201)
        losses = loss(sizes, cost.data(sizes, np.full(201, 1e20)))
        assert sizes[np.argmin(losses)] == pytest.approx(n, rel=2e-3)
        assert y == pytest.approx(losses.min())


@pytest.mark.slow
def test_bands_hold_the_exponents():
    analysis = analyze(runs(noise=0.003), bootstrap=40, target=1e21)
    for way in ('joint', 'isoflop', 'frontier'):
        law = analysis.summary[way]
        low, high = law['bands']['a']
        assert low < 0.28 / 0.62 < high and low < law['a'] < high
        low, high = law['target']['bands']['N']
        assert low < law['target']['N'] < high
    low, high = analysis.summary['joint']['target']['bands']['loss']
    assert low < analysis.summary['joint']['target']['loss'] < high


FLAT = (  # (N, C, loss) of a study whose smallest size was best at every budget
    (23146, 1.498e11, 1.929),
    (23146, 1.498e11, 1.858),
    (4266, 1.5e11, 1.64),
    (4266, 1.5e11, 1.635),
    (61610, 1.5e11, 2.02),
    (61610, 1.5e11, 1.961),
    (7546, 1.5e11, 1.755),
    (7546, 1.5e11, 1.727),
    (153866, 1.506e11, 2.052),
    (153866, 1.506e11, 2.057),
    (23146, 4.598e11, 1.761),
    (23146, 4.598e11, 1.7),
    (4266, 4.6e11, 1.417),
    (4266, 4.6e11, 1.444),
    (7546, 4.6e11, 1.455),
    (7546, 4.6e11, 1.486),
    (61610, 4.601e11, 1.844),
    (61610, 4.601e11, 1.829),
    (153866, 4.605e11, 1.912),
    (153866, 4.605e11, 1.933),
    (4266, 1.5e12, 1.253),
    (7546, 1.5e12, 1.156),
)


@pytest.mark.slow
def test_no_band_where_a_replicate_has_no_optimum():
    rows = [dict(zip(('N', 'C', 'loss'), map(repr, row), strict=True)) for row in FLAT]
    columns = points.Columns('N', None, 'C', 'loss')
    summary = analyze(rows, columns, target=1.8e13, bootstrap=100).summary
    json.dumps(summary, allow_nan=False)
    assert 'D' not in summary['joint']['target']['bands']


def beyond(center):
    """Runs of three budgets whose sizes lie on one side of the optimum."""
    rows = runs(center=center, wide=2.0)
    return [row for row in rows if float(row['C']) < 2e19]


@pytest.mark.parametrize(('center', 'name'), [(0.1, 'largest'), (10.0, 'smallest')])
def test_an_extreme_best_size_is_not_an_optimum(center, name):
    analysis = analyze(beyond(center))
    assert analysis.summary['frontier'] is None and analysis.summary['isoflop'] is None
    notes = '\n'.join(analysis.notes)
    assert mentions(notes, 'frontier', name, '3', '3 budgets')
    assert any(n.startswith('joint: N*') and '3 of 3' in n for n in analysis.notes)


def test_two_sizes_do_not_give_a_law():
    rows = [
        {'N': str(n), 'C': str(c), 'loss': str(loss(n, c / 6 / n))}
        for c in np.geomspace(1e18, 1e21, 4)
        for n in (1e8, 1e9)
    ]
    with pytest.raises(UserError, match=r'law.*optimum'):
        optimal.require_law([analyze(rows, points.Columns('N', None, 'C', 'loss'))])
    best = {1e18: 3, 1e19: 3, 1e20: 4}  # of the sizes below, at each budget
    rows = [
        {'N': str(n), 'C': str(c), 'loss': str(2 + 0.1 * (i - at) ** 2 / (i + 1))}
        for c, at in best.items()
        for i, n in enumerate(np.geomspace(1e7, 1e9, 7))
    ]
    analysis = analyze(rows, points.Columns('N', None, 'C', 'loss'))
    assert analysis.frontier.n.tolist() == pytest.approx([1e8, 1e8, 10**8.333], rel=1e-2)
    assert analysis.summary['frontier'] is None
    assert any(mentions(note, 'frontier', '3 sizes') for note in analysis.notes)


def test_bands_hold_their_estimate():
    bands = optimal._bands(a=(0.5, np.array([0.6, 0.7])), b=(0.65, np.array([0.6, 0.7])))
    assert bands['a'][0] == 0.5 and bands['a'][1] == pytest.approx(0.695)
    assert bands['b'] == pytest.approx([0.605, 0.695])


def test_what_is_not_identified_has_no_number():
    """Noise of 10 % leaves exponents and optima of 15 runs open: in text, JSON and picture."""
    rows = [row for row in runs(noise=0.1, wide=3.0) if float(row['C']) < 2e19]
    analysis = analyze(rows, bootstrap=20, target=1e24)
    for way in ('joint', 'isoflop'):
        law = analysis.summary[way]
        assert law['a'] is law['b'] is law['target']['N'] is law['target']['D'] is None
        assert any(mentions(line, way, 'identified') for line in analysis.notes)
    assert analysis.summary['joint']['alpha'] is analysis.summary['joint']['A'] is None
    axes = plots_optimal.draw_optima([analysis], COLUMNS).axes[0]
    assert not [line for line in axes.lines if line.get_marker() == '*']
    labels = [text.get_text() for text in axes.get_legend().get_texts()]
    assert [label.partition(':')[0] for label in labels] == ['joint', 'isoflop']
    assert all('not identified' in label for label in labels)


@pytest.mark.slow
def test_a_law_that_is_not_identified_contradicts_nothing():
    """Losses without the joint form: the star is that of the parabolas."""
    rows = []
    for c in np.geomspace(1e15, 1e18, 4):
        for n in np.geomspace(1e5, 1e9, 9):
            y = 2 + 0.1 * np.log(n / 1e6 / (c / 1e15) ** 0.5) ** 2 + 50 * c**-0.1
            rows.append({'N': str(n), 'C': str(c), 'loss': str(y)})
    columns = points.Columns('N', None, 'C', 'loss')
    analysis = analyze(rows, columns, bootstrap=20, target=1e19)
    assert analysis.summary['joint']['a'] is None
    assert not [line for line in analysis.notes if 'contradict' in line]
    assert analysis.shown == 'isoflop'
    axes = plots_optimal.draw_optima([analysis], columns).axes[0]
    (star,) = (line for line in axes.lines if line.get_marker() == '*')
    assert star.get_ydata()[0] == analysis.summary['isoflop']['target']['N']


@pytest.mark.slow
def test_the_budget_that_pulls_is_named():
    rows = runs()
    for row in rows:
        c, n = float(row['C']), float(row['N'])
        if c < 2e18 and n > best_size(c):
            row['loss'] = str(1.03 * float(row['loss']))
    analysis = analyze(rows, bootstrap=20, target=1e22)
    (line,) = (line for line in analysis.notes if 'contradict' in line)
    assert mentions(line, 'C = 1e+18', 'isoflop', 'N*')
    assert mentions(line, 'isoflop', 'contradict')
    assert f'{analysis.shown} is shown' in line


@pytest.mark.parametrize(
    ('factor', 'noted', 'banded'), [(4, False, True), (100, True, True), (1e5, True, False)]
)
def test_far_targets_are_named_and_very_far_ones_have_no_band(factor, noted, banded):
    analysis = analyze(runs(noise=0.003), bootstrap=20, target=factor * BUDGETS[-1])
    law = analysis.summary['joint']
    assert any(f'{factor:.3g} times the largest' in line for line in analysis.notes) == noted
    assert ('N' in law['target']['bands']) == banded and law['target']['N'] is not None


def test_bands_beyond_the_runs_grow_by_the_drift():
    """The drift is added in quadrature to the bootstrap's band, in logs; not within the runs."""

    def width(factor):
        at = np.array([factor * BUDGETS[-1]])
        analysis = analyze(runs(0.003), bootstrap=20, target=at[0])
        band = analysis.summary['isoflop']['target']['bands']['N']
        drawn = np.concatenate(analysis.size_band('isoflop', at))
        assert drawn.tolist() == pytest.approx(band, rel=1e-3)
        return np.diff(np.log(band))[0] / 2

    inside, beyond = width(1), width(30)
    assert inside < 0.2
    assert beyond > 1.645 * drift.SIZE_DRIFT * np.log(30)


@pytest.mark.parametrize('other', [3e9, None])
def test_the_band_of_the_joint_law_includes_its_distance_to_parabolas(other):
    """Not without an optimum of theirs, nor the other way around, nor within the runs."""

    def half_widths(ratio):
        ways = {
            name: {'target': {'N': n, 'bands': {'N': [n, n]} if n else {}}}
            for name, n in (('joint', 6e9), ('isoflop', other))
        }
        drift.add_drift(ways, points.Cost(), ratio)
        bands = [way['target']['bands'].get('N', (1, 1)) for way in ways.values()]
        return [float(np.log(high / low) / 2) for low, high in bands]

    plain = 1.645 * drift.SIZE_DRIFT * np.log(8)
    expected = [np.hypot(plain, 1.645 * np.log(2)), plain] if other else [plain, 0.0]
    assert half_widths(8.0) == pytest.approx(expected, rel=1e-3)
    assert half_widths(1.0) == pytest.approx([0.0, 0.0], abs=1e-12)


@pytest.mark.parametrize('exponent', [1.0, 0.6])
def test_runs_whose_data_follow_from_their_size_have_no_law(exponent):
    rows = []
    for n in np.geomspace(5e6, 8e8, 14):
        d = 20 * n**exponent * 1e8 ** (1 - exponent)
        rows.append({'N': repr(float(n)), 'D': repr(float(d)), 'loss': repr(float(loss(n, d)))})
    analysis = analyze(rows, bootstrap=20, target=1e22)
    assert analysis.summary['joint'] is None
    assert any(mentions(line, 'D = ') for line in analysis.notes)


def test_inference_wants_a_smaller_model_trained_longer():
    """Against a search over N on a grid; without inference it is the optimum itself."""
    cost = points.Cost()
    little = inference_cost.cheapest(TRUE, cost, 1e20, 1e-3)
    assert little['N'] == pytest.approx(best_size(1e20), rel=1e-2)
    assert little['saved'] == pytest.approx(0, abs=1e-6)
    served = 1e12
    model = inference_cost.cheapest(TRUE, cost, 1e20, served)
    n = best_size(1e20) * np.geomspace(0.3, 1, 2001)
    with np.errstate(invalid='ignore'):
        d = ((model['loss'] - TRUE['E'] - TRUE['A'] * n ** -TRUE['alpha']) / TRUE['B']) ** (
            -1 / TRUE['beta']
        )
    total = 6 * n * d + 2 * n * served
    assert model['total'] == pytest.approx(np.nanmin(total), rel=1e-4)
    assert model['N'] == pytest.approx(n[np.nanargmin(total)], rel=1e-2)
    assert loss(model['N'], model['D']) == pytest.approx(model['loss'])
    law = analyze(runs(0.003), bootstrap=10, target=1e21, served=1e13)
    best = law.summary['joint']['inference']
    low, high = best['bands']['N']
    assert low < best['N'] < high and best['N'] < law.summary['joint']['target']['N']
    assert best['D'] > law.summary['joint']['target']['D'] and 0 < best['saved'] < 1


def repeated(unique, noise=0.0):
    """A grid of sizes, data and unique data; losses by the law of repeats with R_D = 15.4."""
    rng, rows = np.random.default_rng(0), []
    for n, d, most in itertools.product((1e7, 3e7, 1e8, 3e8), (1e9, 3e9, 1e10, 3e10), unique):
        u = min(d, most)
        worth = u + u * 15.4 * (1 - np.exp((1 - d / u) / 15.4))
        y = loss(n, worth) * np.exp(noise * rng.standard_normal())
        rows.append({'N': n, 'D': d, 'data_size': most, 'examples_seen': d, 'loss': y})
    return [{name: repr(float(value)) for name, value in row.items()} for row in rows]


def test_repeated_data_are_converted_to_new_data():
    analysis = analyze(repeated((1e8, 1e9, 1e11), 1e-4), bootstrap=10)
    law = analysis.summary['joint']
    assert {name: law[name] for name in TRUE} == pytest.approx(TRUE, rel=0.1)
    (line,) = (line for line in analysis.notes if 'repeated' in line)
    assert 'R_D = 15' in line and '300 times' in line


def test_repeats_without_other_data_are_named():
    analysis = analyze(repeated((1e8,)), bootstrap=0)
    assert any('repeated up to 300 times' in line for line in analysis.notes)
    assert analysis.points.unique.max() == 1e8


def test_two_of_three_columns_suffice():
    for columns in (('N', 'D', None), ('N', None, 'C'), (None, 'D', 'C')):
        analysis = analyze(runs(), points.Columns(*columns, 'loss'))
        assert analysis.summary['joint']['alpha'] == pytest.approx(0.34, rel=1e-3)
    with pytest.raises(UserError, match='two of --n, --d and --c'):
        points.Columns('N', None, None, 'loss')


def test_compute_as_a_power_law_of_size_and_data():
    rows = [row | {'C': repr(5 * float(row['N']) ** 1.02 * float(row['D']))} for row in runs()]
    (runs_read,) = points.read(rows, points.Columns('N', 'D', 'C', 'loss'))
    assert runs_read.cost.p == pytest.approx(1.02) and 'power law' in runs_read.notes[0]
    rows = [row | {'C': repr(7 * float(row['N']) * float(row['D']))} for row in runs()]
    (runs_read,) = points.read(rows, points.Columns('N', 'D', 'C', 'loss'))
    assert runs_read.cost.text == 'C = 7 N D' and not runs_read.notes
    rows = [row | {'C': str(1e-3 * float(row['N']) * float(row['D']))} for row in runs()]
    (runs_read,) = points.read(rows, points.Columns('N', 'D', 'C', 'loss'))
    assert says(runs_read.notes, 'C is 0.001 N D', 'N', 'D')


def test_held_out_compute_has_no_part_in_the_fit():
    spoilt = [row | {'loss': '9'} if float(row['C']) > 2.5e19 else row for row in runs()]
    honest, other = (analyze(rows, holdout=4.0) for rows in (runs(), spoilt))
    assert honest.summary['joint']['holdout_rmse'] < 1e-6 < other.summary['joint']['holdout_rmse']
    assert (honest.summary['joint']['n_fit'], honest.summary['joint']['n_holdout']) == (21, 14)
    assert other.summary['joint']['A'] == honest.summary['joint']['A']
    assert other.summary['isoflop'] == honest.summary['isoflop']


def test_the_frontier_of_curves():
    rows = []
    for n in np.geomspace(1e6, 1e10, 25):
        for d in np.geomspace(1e7, 1e13, 40):
            rows.append({'N': str(n), 'D': str(d), 'loss': str(loss(n, d))})
    frontier = analyze(rows).frontier
    assert frontier.exponent == pytest.approx(0.28 / 0.62, rel=0.05)
    assert len(frontier.c) > 20


def test_budgets_that_differ_are_moved_along_the_law():
    rng = np.random.default_rng(0)
    rows = runs()
    for row in rows:
        d = float(row['D']) * rng.uniform(0.95, 1.05)
        row |= {'D': repr(d), 'loss': repr(loss(float(row['N']), d))}
    exact, moved = analyze(runs()), analyze(rows)
    assert any(mentions(note, 'budgets', 'differ') for note in moved.notes)
    assert moved.parabolas.n == pytest.approx(exact.parabolas.n, rel=0.03)


def test_budgets_are_told_apart_where_runs_are_dense():
    c = np.concatenate([1e18 * np.geomspace(1, 3, 30), np.full(5, 2e18)])
    n = np.geomspace(1e6, 1e7, len(c))
    assert any(len(at) >= 5 for at in isoflop.budgets(n, c))


@pytest.mark.parametrize(
    ('spoil', 'note'),
    [
        ({'loss': 'nan'}, ('line 4', 'loss', 'nan')),
        ({'loss': '0'}, ('line 4', 'loss', '0')),
        ({'loss': '-2'}, ('line 4', 'loss', '-2')),
        ({'N': ''}, ('line 4', 'N')),
        ({'D': 'inf'}, ('line 4', 'D', 'inf')),
        ({'finished': '0'}, ('line 4', 'finished')),
    ],
)
def test_unusable_rows_are_left_out_by_name(spoil, note):
    rows = runs()
    rows[2] |= spoil
    analysis = analyze(rows)
    assert [mentions(line, note) for line in analysis.points.left_out] == [True]
    assert analysis.summary['joint']['alpha'] == pytest.approx(0.34, rel=1e-3)


def test_two_rows_of_one_run_count_once():
    rows = runs()
    analysis = analyze([*rows, rows[3], rows[3] | {'loss': '3'}])
    assert len(analysis.points.y) == len(rows)
    assert says(analysis.notes[0], '1 row(s) are copies')
    assert mentions(analysis.notes[1], 'losses', 'weighted')


@pytest.mark.parametrize(
    ('rows', 'note'),
    [
        ([row for row in runs() if row['N'] == runs()[0]['N']] * 8, 'value(s) of N'),
        (runs()[:5], ('joint', '5 runs', '5 parameters')),
        ([row | {'loss': '2'} for row in runs()], 'no joint law'),
        ([row | {'N': '1e8'} for row in runs()], ('joint', '1', 'N')),
    ],
)
def test_no_joint_law_where_the_points_do_not_determine_one(rows, note):
    analysis = analyze(rows)
    assert analysis.summary['joint'] is None
    assert any(mentions(line, note) for line in analysis.notes)


def test_a_search_that_does_not_converge_gives_no_law(monkeypatch):
    from vit_jax.scaling import curve_fit

    monkeypatch.setattr(curve_fit, '_SETTLE', 0)
    curve_fit._search_once.cache_clear()
    analysis = analyze(runs())
    assert analysis.summary['joint'] is None
    assert mentions(' '.join(analysis.notes), 'joint', 'converge')


def write(path, rows):
    with path.open('w') as file:
        writer = csv.DictWriter(file, rows[0])
        writer.writeheader()
        writer.writerows(rows)


@pytest.mark.slow
def test_the_command(tmp_path, capsys):
    law = TRUE | {'alpha': 0.5, 'A': 3000.0}
    rows = [row | {'m': 'a'} for row in runs(noise=0.002)]
    rows += [row | {'m': 'b'} for row in runs(noise=0.002, law=law)]
    write(tmp_path / 'runs.csv', rows)
    argv = ['--csv', tmp_path / 'runs.csv', '--n', 'N', '--d', 'D', '--y', 'loss', '--c', 'C']
    argv += [
        '--by',
        'm',
        '--target',
        '1e21',
        '--inference-tokens',
        '1e12',
        '--holdout',
        '4x',
        '--bootstrap',
        '9',
    ]
    argv += ['--json', tmp_path / 'out.json', '--output', tmp_path / 'out.png']
    assert cli.main(['scaling', 'optimal', *map(str, argv)]) == 0
    shown = capsys.readouterr().out
    assert shown.count('with inference on 1e+12') == 2
    assert 'C = 6 N D' in shown and 'parabolas are biased' in shown
    curves = json.loads((tmp_path / 'out.json').read_text())['curves']
    assert [curve['by'] for curve in curves] == [{'m': 'a'}, {'m': 'b'}]
    for curve in curves:
        for way in ('joint', 'isoflop', 'frontier'):
            assert set(curve[way]['bands']) >= {'a', 'b'}
            assert curve[way]['target']['C'] == 1e21
        assert curve['joint']['holdout_rmse'] < 0.02
        assert set(TRUE) <= set(curve['joint'])
    assert (tmp_path / 'out.png').read_bytes()[:4] == b'\x89PNG'


@pytest.mark.parametrize(
    ('spoil', 'argv', 'message'),
    [
        ({}, ['--n', 'N'], 'two of --n, --d and --c'),
        ({}, ['--n', 'M', '--d', 'D'], "--n: unknown column 'M'"),
        ({'N': 'big'}, ['--n', 'N', '--d', 'D'], ("'big'", 'number')),
        ({'N': '5', 'D': '5'}, ['--n', 'N', '--d', 'D'], ('optimum', 'fitted')),
        ({'loss': 'nan'}, ['--n', 'N', '--d', 'D'], ('fitted', '2')),
        ({}, ['--n', 'N', '--d', 'D', '--holdout', '1x'], '--holdout 1x'),
        ({}, ['--n', 'N', '--d', 'D', '--inference-tokens', '0'], '--inference-tokens'),
        ({}, ['--n', 'N', '--d', 'D', '--target', '-1'], '--target -1: must be positive'),
    ],
)
def test_mistakes_are_one_line(tmp_path, capsys, spoil, argv, message):
    write(tmp_path / 'runs.csv', [row | spoil for row in runs()])
    argv = ['--csv', str(tmp_path / 'runs.csv'), '--y', 'loss', *argv]
    assert cli.main(['scaling', 'optimal', *argv]) == 2
    error = capsys.readouterr().err
    assert mentions(error, message) and error.count('\n') == 1
