"""Tables: groups, hold-outs that are never fitted to, and published curves."""

import dataclasses
import operator

import numpy as np
import pytest
import threadpoolctl
from helpers.messages import mentions, says
from matplotlib.colors import to_rgb
from scipy import stats

from vit_jax.errors import UserError
from vit_jax.scaling import averaging, curve_fit, forms, plots, table
from vit_jax.scaling.curve_fit import Fit
from vit_jax.scaling.parallel import map_items
from vit_jax.scaling.report import summarize
from vit_jax.scaling.rows import number_format, power, read_csv, short

pytestmark = pytest.mark.slow  # as a whole

X = np.geomspace(1e6, 1e9, 24)


def rows(spoil=1.0):
    """Two curves; what is held out, x > 5e8, is multiplied by `spoil`."""
    table_rows = []
    for name, floor in (('S', 0.3), ('B', 0.2)):
        for x in X:
            y = (400 * (x + 1e6) ** -0.45 + floor) * (spoil if x > 5e8 else 1)
            mark = int(x <= 5e8)
            table_rows.append({'model': name, 'x': str(x), 'loss': str(y), 'fit': str(mark)})
    return table_rows


def ask(**options):
    return table.FitOptions(
        **{'x': ('x',), 'y': 'loss', 'by': ('model',), 'bootstrap': 0} | options
    )


def test_a_worker_has_one_thread(monkeypatch):
    """More only wait for each other: fits took three times the CPU time."""
    monkeypatch.setenv('OPENBLAS_NUM_THREADS', '2')
    infos = map_items(operator.call, [threadpoolctl.threadpool_info] * 8, 'asking', workers=2)
    threads = [pool['num_threads'] for info in infos for pool in info if pool['user_api'] == 'blas']
    assert set(threads) == {1}


def test_one_curve_a_group():
    options = ask(against=('m2',))
    curves = table.fit_curves(rows(), options)
    result = summarize(curves, options)
    assert [c['by'] for c in result['curves']] == [{'model': 'S'}, {'model': 'B'}]
    floors = [c['params']['c'] for c in result['curves']]
    assert floors == pytest.approx([0.3, 0.2], rel=0.01)
    assert result['median_holdout_rmse'] < 1e-3
    assert result['against']['m2']['of'] == 2


@pytest.mark.parametrize(
    'options',
    [
        pytest.param({}, marks=pytest.mark.long),
        pytest.param({'holdout_column': 'fit'}, marks=pytest.mark.long),
        {'frontier': True},
    ],
)
def test_what_is_held_out_has_no_part_in_the_fit(options):
    honest, spoilt = (table.fit_curves(rows(s), ask(**options)) for s in (1.0, 3.0))
    for a, b in zip(honest, spoilt, strict=True):
        # Spoilt points are off the frontier: then the law is that without them.
        assert a.tested.params == (b.tested or b.fit).params
        assert a.fit.params != b.fit.params
    if 'frontier' not in options:
        assert spoilt[0].holdout_rmse == pytest.approx(np.log(3), rel=1e-2)


def test_without_a_holdout_all_points_count():
    (curve, _) = table.fit_curves(rows(), ask(holdout=0.0))
    assert curve.fit_mask.all()
    assert curve.holdout_rmse is None


def test_accuracies_become_errors():
    table_rows = [row | {'accuracy': str(1 - float(row['loss']))} for row in rows()]
    (curve, _), (expected, _) = (
        table.fit_curves(table_rows, ask(y=y)) for y in ('1-accuracy', 'loss')
    )
    assert curve.fit.params == pytest.approx(expected.fit.params, rel=1e-3)


def test_curves_are_in_the_order_of_their_numbers():
    table_rows = [row | {'model': {'S': '128', 'B': '64'}[row['model']]} for row in rows()]
    curves = table.fit_curves(table_rows, ask(form='power'))
    assert [curve.label for curve in curves] == ['model 64', 'model 128']


def test_rows_with_gaps_are_left_out_and_short_curves_named():
    table_rows = [*rows(), {'model': 'L', 'x': '1e6', 'loss': '1', 'fit': '1'}]
    table_rows.append({'model': 'L', 'x': '', 'loss': '1', 'fit': '1'})
    options = ask()
    last = summarize(table.fit_curves(table_rows, options), options)['curves'][-1]
    assert last['params'] is None
    assert last['warnings'][0].startswith('1 points cannot determine')
    assert says(last['notes'], 'line 51', 'x')


@pytest.mark.parametrize(('points', 'form'), [(3, 'power'), (4, 'irreducible'), (5, 'shifted')])
def test_points_that_any_law_would_go_through_get_a_simpler_one(points, form):
    table_rows = [{'x': f'{10**i}', 'loss': f'{3 * 0.5**i + 0.1 * (i % 2)}'} for i in range(points)]
    options = table.FitOptions(x=('x',), y='loss', holdout=0.0, form='shifted', bootstrap=0)
    (curve,) = summarize(table.fit_curves(table_rows, options), options)['curves']
    assert curve['form'] == form
    note = f'{points} points', '4 parameters', 'shifted', f'by {form}'
    assert mentions(curve['warnings'], note) == (form != 'shifted')


@pytest.mark.parametrize(
    ('options', 'message'),
    [
        ({'x': ('X',)}, "--x: unknown column 'X'"),
        ({'by': ('modl',)}, "did you mean 'model'"),
        ({'form': 'shiftd'}, "did you mean 'shifted'"),
        ({'y': 'model'}, "line 2 has 'S',"),
        ({'holdout_column': 'loss'}, '--holdout-column loss'),
        ({'form': 'joint'}, 'takes 2 column'),
    ],
)
def test_mistakes_are_one_line(options, message):
    with pytest.raises(UserError, match=message) as caught:
        table.fit_curves(rows(), ask(**options))
    assert '\n' not in str(caught.value)


def test_figures_show_every_curve():
    curves = table.fit_curves(rows(), ask(bootstrap=5))
    figure = plots.draw_curves(curves, ask())
    assert len(figure.axes) == 1
    assert [t.get_text().split(':')[0] for t in figure.legends[0].get_texts()] == ['S', 'B']
    assert len(plots.draw_curves(curves * 4, ask()).axes) == 8


def test_panels_of_a_narrow_range_and_long_names_can_be_read():
    table_rows = [
        {'x': str(x), 'loss': str(2.1 * x**-0.01), 'name': f'{name}, a long name of many letters'}
        for name in 'abcdefgh'
        for x in (1, 2, 4, 8)
    ]
    figure = plots.draw_curves(table.fit_curves(table_rows, ask(by=('name',))), ask(by=('name',)))
    figure.draw_without_rendering()
    for axes in figure.axes:
        ticks = [text.get_text() for text in axes.get_yticklabels()]
        assert len(set(ticks)) == len(ticks) > 1
        title = axes.get_title('left')
        assert '\n' in title and all(len(line) < 30 for line in title.splitlines())


def test_a_frontier_is_drawn_over_all_runs_with_a_star_at_the_target():
    options = ask(by=(), form='irreducible', frontier=True, bootstrap=5)
    (curve,) = table.fit_curves(rows(), options)
    assert len(curve.beaten) + len(curve.y) == len(rows())
    axes = plots.draw_curves([curve], dataclasses.replace(options, target=1e10)).axes[0]
    (star,) = [line for line in axes.lines if line.get_marker() == '*']
    assert star.get_ydata() == pytest.approx(curve.fit.predict(np.array([1e10])))
    assert any('irreducible' in text.get_text() for text in axes.texts)
    assert axes.get_xlim()[1] > 1e10 and axes.get_ylim()[0] < curve.fit.params['c']
    (faint,) = [line for line in axes.lines if line.get_alpha() == 0.3]
    assert len(faint.get_xdata()) == len(curve.beaten)


def test_a_frontier_has_one_run_of_each_budget():
    """Whole steps miss it by a little; a learning curve of many points keeps them all."""
    budgets = [(1e12 * (1 + off), loss) for off, loss in ((-0.002, 1.4), (0, 1.2), (0.003, 1.3))]
    runs = [*budgets, (9e10, 1.6), (9.1e10, 1.7)]
    table_rows = [{'x': str(x), 'loss': str(y)} for x, y in runs]
    options = ask(by=(), form='power', frontier=True, holdout=0)
    (curve,) = table.fit_curves(table_rows, options)
    assert curve.y.tolist() == [1.6, 1.2]
    dense = [{'x': str(1.01**i), 'loss': str(1.01**-i)} for i in range(40)]
    (curve,) = table.fit_curves(dense, options)
    assert len(curve.y) == 40


@pytest.mark.parametrize(('floor', 'drawn'), [(0.5, True), (1e-4, False)])
def test_a_floor_far_below_the_prediction_is_not_drawn(floor, drawn):
    x = np.geomspace(1, 1e4, 12)
    table_rows = [{'x': str(a), 'loss': str(a**-0.5 + floor)} for a in x]
    options = ask(by=(), form='irreducible', holdout=0)
    (curve,) = table.fit_curves(table_rows, options)
    assert curve.fit.params['c'] == pytest.approx(floor, rel=1e-2)
    axes = plots.draw_curves([curve], dataclasses.replace(options, target=1e3)).axes[0]
    low = axes.get_ylim()[0]
    assert any('irreducible' in text.get_text() for text in axes.texts) == drawn
    assert low < floor if drawn else low > 1e-3


@pytest.mark.long
def test_a_mean_of_forms_is_named_in_the_legend():
    table_rows = [
        row | {'loss': str(float(row['loss']) * (1 + 0.01 * (-1) ** i))}
        for i, row in enumerate(rows())
    ]
    curves = table.fit_curves(table_rows, ask())
    labels = [text.get_text() for text in plots.draw_curves(curves, ask()).legends[0].get_texts()]
    for curve, line in zip(curves, labels, strict=True):
        assert ('mean of' in line) == (len(curve.fit.parts) > 1)


def test_a_mean_approaches_its_floor_and_its_bands_hold_its_forms_and_widen_beyond():
    x = np.geomspace(1, 64, 12)
    y = (x**-0.5 + 0.1) * np.exp(0.02 * np.random.default_rng(0).standard_normal(12))
    mean = averaging.fit_average(x, y, bootstrap=10)
    assert len(mean.parts) > 1
    assert mean.floor == pytest.approx(mean.predict(np.array([1e60]))[0], rel=1e-3)
    out = np.array([64.0, 640.0])
    low, high = mean.predict_band(out)
    for part in mean.parts:
        assert ((low < part.fit.predict(out)) & (part.fit.predict(out) < high)).all()
    assert np.log(high / low)[1] > 2 * np.log(high / low)[0]


def test_no_band_where_the_points_show_a_break_or_cannot_tell():
    x = np.geomspace(1, 64, 24)
    y = np.where(x < 32, x**-0.5, 4 * 32**-0.5 * (x / 32) ** -3.0)
    noisy = y * np.exp(0.005 * np.random.default_rng(0).standard_normal(24))
    mean = averaging.fit_average(x, noisy, bootstrap=4)
    few = averaging.fit_average(x[:4], y[:4], bootstrap=4)
    assert mentions(mean.warnings[0], 'points', 'break')
    assert 'no band' in few.warnings[0]
    for fit in (mean, few):
        assert fit.predict_band(x) is None and fit.bands == {}


@pytest.mark.parametrize(
    ('points', 'fitted', 'lines'),
    [(slice(1), False, 0), (slice(0, 24, 10), True, 0), (slice(0, 24, 2), True, 1)],
)
def test_few_points_are_drawn_without_a_line(points, fitted, lines):
    """Runs of one length have no law; one through three points has no line without a band."""
    options = ask(holdout=0.0, by=())
    curves = table.fit_curves(rows()[:24][points], options)
    assert (curves[0].fit is not None) == fitted
    (axes,) = plots.draw_curves(curves, options).axes
    assert sum(line.get_linestyle() == '-' for line in axes.lines) == lines


@pytest.mark.parametrize(
    ('form', 'theta', 'text'),
    [
        ('power', (1.2, 0.5, 0, 0), r'y\,=\,3.32\,x^{-0.5}'),
        (
            'shifted',
            (0, 0.25, 1e-6, 3e5),
            r'y\,=\,1\,(x\,+\,3{\cdot}10^{5})^{-0.25}\,+\,1{\cdot}10^{-6}',
        ),
        ('joint', (0, 0.5, 0, 0.25, 2), r'y\,=\,2\,+\,1\,N^{-0.5}\,+\,1\,D^{-0.25}'),
        ('m4', (0, 0.5, 0.1, 2, 3), r'(y\,-\,0.1)\,/\,(2\,-\,y)^{3}\,=\,1\,x^{-0.5}'),
    ],
)
def test_the_legend_has_the_formula_with_its_numbers(form, theta, text):
    scales = np.ones(2 if form == 'joint' else 1), 1.0
    theta = np.array(theta, float)
    fit = Fit(forms.find_form(form), theta, scales, 9, 0.0, np.zeros((0, len(theta))), ())
    assert plots.formula(fit) == text
    vague = dataclasses.replace(fit, unidentified=frozenset(fit.params))
    assert plots.formula(vague).count(r'{\sim}') == len(fit.params)


@pytest.mark.parametrize(
    ('value', 'text'),
    [(1e11, '10¹¹'), (4.6e-12, '4.6·10⁻¹²'), (1.234e20, '1.23·10²⁰'), (2e13, '2·10¹³')],
)
def test_powers_of_ten(value, text):
    assert power(value) == text
    assert number_format(1e11) is short and number_format(1e12) is power


@pytest.mark.parametrize(
    ('value', 'text'), [(1e6, '1M'), (2.5e9, '2.5G'), (4e18, '4e+18'), (0.25, '0.25')]
)
def test_short_numbers(value, text):
    assert short(value) == text


def test_the_default_weights_forms_by_an_inner_holdout():
    (curve, _) = table.fit_curves(rows(), ask())
    weights = [part.weight for part in curve.fit.parts]
    assert sum(weights) == pytest.approx(1) and weights == sorted(weights, reverse=True)
    assert curve.fit.form is curve.fit.parts[0].fit.form
    fitted = curve.x[:, 0], curve.y
    for part in curve.fit.parts:
        assert part.inner_rmse == averaging.hold_out_upper(part.fit.form.name, *fitted)[0]
    logs = [part.weight * np.log(part.fit.predict(X)) for part in curve.fit.parts]
    assert curve.fit.predict(X) == pytest.approx(np.exp(np.sum(logs, axis=0)))
    shown = summarize([curve], ask())['curves'][0]
    assert list(shown['forms']) == [part.fit.form.name for part in curve.fit.parts]


def test_the_default_with_few_points_is_a_form_that_they_allow():
    table_rows = [{'x': f'{10**i}', 'loss': f'{3 * 0.5**i + 0.1 * (i % 2)}'} for i in range(4)]
    (curve,) = table.fit_curves(table_rows, ask(by=(), holdout=0.0))
    assert curve.fit.form.name == 'irreducible'
    assert mentions(curve.fit.warnings[:1], '4 points', 'hold', 'irreducible')


def test_against_all_varies_form_objective_and_starts():
    curves = table.fit_curves(rows()[:24], ask(form='shifted', against=('all',)))
    errors = curves[0].against
    assert {'auto', 'm4', 'shifted, delta 0.1', 'shifted, linear squares'} <= set(errors)
    assert 'shifted' not in errors and errors['shifted, log squares'] < 1e-3
    assert errors['power'] > 10 * errors['shifted, linear, delta 0.001']


def test_two_four_and_eight_times_stand_side_by_side():
    options = ask(form='power', beside=(0.5, 0.75, 0.875))
    result = summarize(table.fit_curves(rows(), options), options)
    for curve in result['curves']:
        assert list(curve['beside']) == ['2x', '4x', '8x']
        assert curve['beside']['2x'] == curve['holdout_rmse']
    assert result['beside']['4x'] == pytest.approx(
        np.median([curve['beside']['4x'] for curve in result['curves']])
    )


@pytest.mark.parametrize(
    ('text', 'fitted_share'), [('4x', 0.25), ('0.5', 0.5), ('0', 1), ('2.5x', 0.4)]
)
def test_holdouts_are_shares_or_factors(text, fitted_share):
    assert 1 - table.parse_holdout_share(text) == pytest.approx(fitted_share)


@pytest.mark.parametrize('text', ['1x', 'x', '1', '-0.5', 'half'])
def test_holdouts_that_leave_nothing_are_mistakes(text):
    with pytest.raises(UserError, match='--holdout'):
        table.parse_holdout_share(text)


@pytest.fixture(scope='module')
def published(shared_data):
    path = shared_data / 'scaling_laws' / 'benchmark.vision.csv'
    if not path.is_file():
        pytest.skip('no published curves in ../shared/data/scaling_laws')
    return read_csv(path)


PUBLISHED = {
    'x': ('Seen Examples',),
    'y': 'Loss',
    'by': ('Model', 'Task'),
    'holdout_column': 'Training',
}


@pytest.mark.long
@pytest.mark.slow
def test_extrapolates_the_published_image_curves(published):
    options = ask(**PUBLISHED, form='shifted', against=('m2',))
    curves = table.fit_curves(published, options)
    result = summarize(curves, options)
    assert len(result['curves']) == result['against']['m2']['of'] == 72
    assert result['median_holdout_rmse'] <= 0.035
    assert result['against']['m2']['better_on'] >= 0.75 * 72
    by_name = {tuple(c['by'].values()): c for c in result['curves']}
    assert by_name['ViT/B/16', 'inet_10']['holdout_rmse'] <= 0.010
    tested = {tuple(curve.by.values()): curve.tested for curve in curves}
    assert tested['MiX/L/16', 'cal_5'].warnings  # all points determine it, those to fit do not
    assert by_name['MiX/L/16', 'cal_5']['identified']


@pytest.mark.long
@pytest.mark.slow
def test_the_default_extrapolates_them_better_than_any_form(published):
    options = ask(**PUBLISHED, bootstrap=1)
    result = summarize(table.fit_curves(published, options), options)
    assert result['median_holdout_rmse'] <= 0.0245
    assert np.mean([curve['holdout_rmse'] for curve in result['curves']]) <= 0.030
    coverage = result['bands_hold_last']
    assert coverage['of'] >= 70 and coverage['held'] >= 0.8 * coverage['of']


@pytest.mark.slow
def test_m4_extrapolates_the_imagenet_curves(published):
    chosen = [row for row in published if row['Task'] == 'inet_10']
    options = ask(**PUBLISHED, form='m4')
    result = summarize(table.fit_curves(chosen, options), options)
    assert result['median_holdout_rmse'] <= 0.035


@pytest.mark.long
def test_families_share_a_color_and_sizes_are_its_shades():
    table_rows = [
        row | {'family': family, 'parameters': size}
        for family, size in (('vit', '305002'), ('vit', '40858'), ('bit', '86602'))
        for row in rows()[:24]
    ]
    curves = table.fit_curves(table_rows, ask(by=('family', 'parameters')))
    assert [curve.label for curve in curves] == [
        'vit 40.9k parameters',
        'vit 305k parameters',
        'bit 86.6k parameters',
    ]
    figure = plots.draw_curves(curves, ask(by=('family', 'parameters')))
    (small, large, other) = [np.array(colors(line)) for line in points(figure.axes[0])]
    assert (small > large).any() and (small >= large - 1e-9).all()  # paler, of the same hue
    assert np.argmax(large) == 2 and np.argmax(other) == 0  # blue and orange
    assert [text.get_text() for text in figure.axes[0].texts] == [' held out']


def points(axes):
    return [line for line in axes.lines if not line.get_label().startswith('_')]


def colors(line):
    return to_rgb(line.get_color())


def curve_of(y, x=X[:12], **options):
    table_rows = [{'x': str(a), 'loss': str(b)} for a, b in zip(x, y, strict=True)]
    (curve,) = table.fit_curves(table_rows, ask(**{'by': ()} | options))
    return curve


def test_the_law_goes_through_all_points_and_the_error_is_of_a_fit_without_some():
    curve = curve_of(np.geomspace(1, 0.3, 12), form='power')
    assert curve.fit.n_points == 12 and curve.tested.n_points == curve.fit_mask.sum() < 12
    axes = plots.draw_curves([curve], ask(form='power')).axes[0]
    assert '--' in [line.get_linestyle() for line in axes.lines]


def test_a_target_has_a_number_with_its_interval_or_a_reason():
    noise = np.exp(0.01 * np.random.default_rng(0).standard_normal(12))
    options = ask(by=(), form='irreducible', bootstrap=10, target=1e10)
    curve = curve_of((X[:12] ** -0.5 * 1e3 + 0.2) * noise, form='irreducible', bootstrap=10)
    (curve_summary,) = summarize([curve], options)['curves']
    low, high = curve_summary['target']['band']
    assert low < curve_summary['target']['y'] == curve.fit.predict(np.array([1e10]))[0] < high
    few = curve_of([1, 0.7, 0.52], X[[0, 8, 16]])
    (curve_summary,) = summarize([few], options)['curves']
    assert curve_summary['target'] is None
    assert mentions(curve_summary['target_problem'], '3 points', '2 parameters')
    stars = plots.draw_curves([few], options).axes[0].lines
    assert '*' not in [line.get_marker() for line in stars]


def test_rows_without_a_logarithm_are_left_out_by_name():
    table_rows = rows()[:24] + [
        {'model': 'S', 'x': str(x), 'loss': y} for x, y in ((0, '1'), (5, 'nan'))
    ]
    table_rows += [{'model': 'S', 'x': '0', 'loss': '1', 'run': f'r{i}'} for i in range(4)]
    table_rows += [{'model': 'T', 'x': '0', 'loss': '1'}]
    full, none = table.fit_curves(table_rows, ask())
    assert len(full.y) == 24
    zero, nan = full.notes
    assert mentions(zero, 'line 26, r0, r1 and 2 more', 'x is 0')
    assert mentions(nan, 'line 27', 'loss is nan')
    assert none.fit is None and mentions(none.problem, 'fitted', '32')
    assert len(plots.draw_curves([full, none], ask()).axes) == 1


def test_a_rise_at_the_end_is_mentioned_and_noise_is_not():
    x = np.geomspace(1, 1e3, 24)
    y = x**-0.3 + 0.0003 * x
    noise = np.exp(0.01 * np.random.default_rng(0).standard_normal((20, 24)))
    notes = [table._note_upturn(x[:, None], y * factors) for factors in noise]
    assert all(mentions(line, 'rises', 'again') for (line,) in notes)
    assert not any(table._note_upturn(x[:, None], (x**-0.3 + 0.5) * factors) for factors in noise)


def test_the_default_law_goes_on_from_an_error_that_lasts():
    x = np.geomspace(1, 100, 25)
    y = (0.3 + x**-0.5) * np.exp(0.01 * np.sin(2.5 * np.log(x)))
    mean = averaging.fit_average(x, y)
    unshifted = dataclasses.replace(mean, shift=0.0)
    last = float(np.log(y[-1] / unshifted.predict(x[-1:])[0]))
    assert mean.late_share > 0
    assert mean.shift == pytest.approx(last)
    at = np.array([1.0, 50.0, 99.9, 100.0, 1e3])
    parts = np.log(mean.predict(at) / unshifted.predict(at)) / mean.shift
    assert parts == pytest.approx([0, 0.5, 1, 1, 1], abs=1e-3)  # without a corner at the end
    assert mean.floor == pytest.approx(np.exp(mean.shift) * unshifted.floor)


def test_the_band_of_a_mean_of_one_form_has_the_noise_of_the_last_point_and_a_drift_beyond_it():
    x = np.geomspace(1, 100, 25)
    noise = np.exp(0.01 * np.random.default_rng(0).standard_normal(25))
    mean = averaging.fit_average(x, (0.3 + x**-0.5) * noise)
    (first, *_) = mean.parts
    single = dataclasses.replace(mean, parts=(dataclasses.replace(first, weight=1.0),), late=())
    end = np.array([400.0])
    last = stats.t.ppf(0.95, single.dof) * single.noise.std
    part, drift = 0.3 * first.fit.band_offsets(end), 0.042 * np.log(4)
    expected = single.growth * np.sqrt(part**2 + last**2 + drift**2) * [[1.5], [1]]
    assert single.band_offsets(end) == pytest.approx(expected)


def test_the_band_of_a_mean_of_two_forms_has_their_spread():
    x, end = np.geomspace(1, 100, 25), np.array([400.0])
    noise = np.exp(0.01 * np.random.default_rng(0).standard_normal(25))
    mean = averaging.fit_average(x, (0.3 + x**-0.5) * noise)
    fits = [curve_fit.fit(forms.find_form(name), x, mean.predict(x)) for name in ('power', 'm4')]
    parts = tuple(averaging.WeightedFit(fit, 0.5, 0.01, np.inf) for fit in fits)
    two = dataclasses.replace(mean, parts=parts, late=())
    spread = abs(np.log(fits[0].predict(end) / fits[1].predict(end))) / 2
    inside = np.mean([fit.band_offsets(end) for fit in fits], axis=0)
    between = stats.t.ppf(0.95, two.dof) * np.hypot(1.5 * spread, two.noise.std)
    expected = two.growth * np.sqrt((0.3 * inside) ** 2 + between**2 + (0.042 * np.log(4)) ** 2)
    assert spread > two.noise.std
    assert two.band_offsets(end) == pytest.approx(expected * [[1.5], [1]])


def test_bands_are_wider_where_noise_grows():
    even = np.array([1, -1.0] * 8)
    assert averaging._growth(even) == 1
    growing = even * np.repeat([0.5, 1, 2], [5, 5, 6])
    assert averaging._growth(growing) == pytest.approx(2 / np.sqrt(np.mean(growing**2)))
    assert averaging._growth(growing[::-1]) == 1
    assert averaging._growth(np.zeros(4)) == 1


def test_where_the_forms_miss_the_points_laws_of_the_last_ones_take_over():
    x, ends = np.geomspace(1, 100, 25), np.array([200.0, 400.0])
    bent = 0.3 + x**-0.5 + 0.15 * np.exp(-(np.log(x / 3) ** 2))
    mean = averaging.fit_average(x, bent, bootstrap=1)
    without_late = dataclasses.replace(mean, late=(), late_share=0.0)
    assert {part.span for part in mean.late} == {16.0, 8.0} and mean.late_share == 0.9
    assert sum(part.weight for part in mean.late) == pytest.approx(1)
    for part in mean.late:
        assert part.fit.n_points == (x >= 100 / part.span).sum()
        hold_out = averaging.hold_out_upper(part.fit.form.name, x, bent, span=part.span)
        assert part.inner_rmse == hold_out[0]
    errors = [np.log(fit.predict(ends) / (0.3 + ends**-0.5)) for fit in (mean, without_late)]
    assert (np.abs(errors[0]) < 0.7 * np.abs(errors[1])).all()
    early = x[x <= 100 / 8]
    assert mean.predict(early) == pytest.approx(without_late.predict(early))
    share = mean._weights_at(np.geomspace(100 / 8, 100, 200))[len(mean.parts) :].sum(axis=0)
    rises = np.diff(np.sqrt(share))  # the spread of the laws rises alike: no corner in the band
    assert share[[0, -1]] == pytest.approx([0, 0.9])
    assert (rises > 0).all() and max(rises[0], rises[-1]) < 0.2 * rises.max()
    assert mentions(mean.chosen, '90%', '16x', '8x')
    noisy = bent * np.exp(0.3 * np.random.default_rng(0).standard_normal(25))
    assert averaging.fit_average(x, noisy).late == ()


def test_of_forms_that_predict_alike_the_simplest_comes_first():
    ranked = averaging._rank_forms({'m4': 0.0100, 'shifted': 0.0103, 'irreducible': 0.02})
    assert ranked == ['shifted', 'm4', 'irreducible']
    assert averaging._rank_forms({'shifted': 0.012, 'm4': 0.01}) == ['m4', 'shifted']


def test_published_points_are_drawn_with_their_law(repo):
    options = ask(x=('flops',), y='1-test/accuracy', by=(), form='power', holdout=0)
    paper = read_csv(repo / 'docs' / 'scaling_published_vit.csv')
    published = table.published_curves(paper, options)
    assert [(curve.label, len(curve.y)) for curve in published] == [
        ('ViT', 6),
        ('BiT', 7),
        ('hybrid', 5),
    ]
    table_rows = [{'flops': f'1e{i}', 'test/accuracy': f'0.{i - 13}'} for i in range(16, 22)]
    curves = table.fit_curves(table_rows, options)
    figure = plots.draw_curves(curves, options, published)
    axes, labels = figure.axes[0], [text.get_text() for text in figure.legends[0].get_texts()]
    assert [line.get_marker() for line in axes.lines].count('D') == 3
    assert sum('(published)' in line and 'x^{-' in line for line in labels) == 3
    assert axes.get_xlim()[1] > 4262e18
    with pytest.raises(UserError, match=r'--overlay: .* 6 curves'):
        plots.draw_curves(curves * 7, options, published)


@pytest.mark.parametrize(
    ('y', 'least', 'b', 'c'),
    [
        ('1-fewshot/10_shot', None, 0.255, 0.110),
        ('1-fewshot/10_shot', 0.10, 0.320, 0.122),
        ('1-test/accuracy', None, 0.274, 0.090),
        ('1-test/accuracy', 0.05, 0.352, 0.090),
    ],
)
def test_core_days_explain_the_published_exponents(repo, y, least, b, c):
    """Over core-days, of which small models waste most, Zhai's b is .32 and .35 (published.md)."""
    rows = read_csv(repo / 'docs' / 'scaling_published_zhai.csv')
    for row in rows:
        flops = float(row['flops'])
        rise = np.log(0.4 / (least or 0.4)) / np.log(2e21 / 1.7e17)
        share = min(0.4, (least or 0.4) * (flops / 1.7e17) ** rise)
        row['core-days'] = repr(float(flops / share / 61.5e12 / 86400))
    options = ask(x=('core-days',), y=y, by=(), form='shifted', frontier=True, holdout=0.0)
    (curve,) = table.fit_curves(rows, options)
    found = curve.fit.params
    assert (found['b'], found['c']) == pytest.approx((b, c), abs=0.002)
    page = (repo / 'docs' / 'published.md').read_text()
    assert f' {b:.3f}'.replace('0.', '.') in page and f' {c:.3f}'.replace('0.', '.') in page


def test_of_many_published_points_the_frontier_is_drawn(repo):
    paper = read_csv(repo / 'docs' / 'scaling_published_zhai.csv')
    options = ask(x=('flops',), y='1-fewshot/10_shot', by=(), form='power', bootstrap=0)
    published = table.published_curves(paper, options)
    assert (
        sum(len(curve.y) for curve in published) == 262
    )  # of 265, three without a 10-shot accuracy
    with pytest.raises(UserError, match=r'38.*12'):
        plots.draw_curves([], options, published)
    (frontier,) = table.published_curves(paper, dataclasses.replace(options, frontier=True))
    assert (
        frontier.y[-1] == pytest.approx(1 - 0.849) and len(frontier.y) + len(frontier.beaten) == 262
    )
    axes = plots.draw_curves([], options, [frontier]).axes[0]
    assert [len(line.get_xdata()) for line in axes.lines[:2]] == [
        len(frontier.beaten),
        len(frontier.y),
    ]
