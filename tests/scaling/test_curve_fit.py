"""Fits: known parameters come back, gradients are right, and problems are reported."""

import csv
import functools

import numpy as np
import pytest
from scipy import optimize

from vit_jax.errors import UserError
from vit_jax.scaling import averaging, curve_fit, forms, isoflop, joint, noise
from vit_jax.scaling.points import Cost

pytestmark = pytest.mark.slow  # as a whole

X = np.geomspace(1e5, 1e9, 40)
TRUE = {'a': 400.0, 'b': 0.45, 'c': 0.2, 'd': 3e6}


def shifted(x, a, b, c, d):
    return a * (x + d) ** -b + c


def noisy(y, sigma, seed=0):
    return y * np.exp(sigma * np.random.default_rng(seed).normal(size=y.shape))


def close(params, expected, rel):
    assert params == pytest.approx(expected, rel=rel)


def entry(form, x, i, theta):
    return form.log_value(theta, x)[i][0]


@pytest.mark.parametrize('name', forms.FORMS)
def test_gradients_agree_with_differences(name):
    form = forms.find_form(name)
    x = np.random.default_rng(1).uniform(0.3, 3, (7, form.columns))
    theta = {
        'm4': [-0.5, 0.6, 0.2, 1.9, 0.7],
        'joint': [-0.5, 0.4, -0.8, 0.6, 0.3],
        'repeated': [-0.5, 0.4, -0.8, 0.6, 0.3, 8.0, 4.0],
    }.get(name, [-0.3, 0.5, 0.2, 0.4])
    for row in x[:, None]:
        value, slope = (functools.partial(entry, form, row, i) for i in (0, 1))
        assert optimize.check_grad(value, slope, np.array(theta)) < 1e-6


def test_known_parameters_come_back_exactly_without_noise():
    close(curve_fit.fit(forms.find_form('shifted'), X, shifted(X, **TRUE)).params, TRUE, rel=1e-3)


@pytest.mark.parametrize('seed', range(3))
def test_known_parameters_come_back_from_noise(seed):
    fit = curve_fit.fit(
        forms.find_form('shifted'), X, noisy(shifted(X, **TRUE), 0.01, seed), bootstrap=20
    )
    assert fit.params['b'] == pytest.approx(TRUE['b'], rel=0.1)
    assert fit.params['c'] == pytest.approx(TRUE['c'], rel=0.1)
    assert fit.rmse == pytest.approx(0.01, rel=0.3)
    assert not fit.warnings
    assert fit.bands['c'][0] < fit.params['c'] < fit.bands['c'][1]


def test_the_fit_does_not_depend_on_units_or_order():
    y = noisy(shifted(X, **TRUE), 0.01)
    fit = curve_fit.fit(forms.find_form('shifted'), X, y)
    order = np.random.default_rng(0).permutation(len(X))
    other = curve_fit.fit(forms.find_form('shifted'), X[order] / 1e6, 50 * y[order])
    assert other.params['b'] == pytest.approx(fit.params['b'], rel=1e-3)
    assert other.params['c'] == pytest.approx(50 * fit.params['c'], rel=1e-3)
    assert other.predict(X / 1e6) == pytest.approx(50 * fit.predict(X), rel=1e-3)


def test_equal_points_are_searched_once(monkeypatch):
    """Hold-outs of a table fit the same points several times; other seeds weigh them otherwise."""
    y, searches = noisy(shifted(X, **TRUE), 0.02, seed=9), []
    search = curve_fit.search
    monkeypatch.setattr(curve_fit, 'search', lambda *a, **k: searches.append(0) or search(*a, **k))
    first, again = (curve_fit.fit(forms.find_form('irreducible'), X, y) for _ in range(2))
    assert len(searches) == 1 and first.params == again.params
    seeds = noise.Seeds(np.where(X > 1e7, 4.0, 1.0), np.zeros(len(X)))
    assert curve_fit.fit(forms.find_form('irreducible'), X, y, seeds=seeds).params != first.params
    assert len(searches) == 2


@pytest.mark.parametrize('name', ['power', 'irreducible', 'm2'])
def test_the_simpler_forms(name):
    expected = {'a': 30.0, 'b': 0.3} | ({} if name == 'power' else {'c': 0.1})
    y = expected['a'] * X ** -expected['b'] + expected.get('c', 0)
    close(curve_fit.fit(forms.find_form(name), X, y).params, expected, rel=0.02)


def test_m4():
    expected = {'a': 3e4, 'b': 0.6, 'c': 0.25, 'e': 0.99, 'alpha': 0.6}
    y = [
        optimize.brentq(
            lambda y, x=x: (
                (y - expected['c']) / (expected['e'] - y) ** expected['alpha']
                - expected['a'] * x ** -expected['b']
            ),
            expected['c'] + 1e-12,
            expected['e'] - 1e-12,
        )
        for x in X
    ]
    fit = curve_fit.fit(forms.find_form('m4'), X, np.array(y))
    assert fit.params['b'] == pytest.approx(expected['b'], rel=0.02)
    assert fit.params['c'] == pytest.approx(expected['c'], rel=0.02)
    assert fit.rmse < 1e-3


def test_the_joint_law_of_model_and_data():
    n, d = (m.ravel() for m in np.meshgrid(np.geomspace(1e6, 1e9, 7), np.geomspace(1e8, 1e11, 7)))
    expected = {'E': 1.7, 'A': 400.0, 'alpha': 0.34, 'B': 410.0, 'beta': 0.28}
    y = 1.7 + 400 * n**-0.34 + 410 * d**-0.28
    fit = curve_fit.fit(forms.find_form('joint'), np.stack([n, d], axis=1), noisy(y, 0.002))
    for name, rel in {'E': 0.05, 'alpha': 0.1, 'beta': 0.1}.items():
        assert fit.params[name] == pytest.approx(expected[name], rel=rel)


def test_bands_of_an_optimum_hold_where_large_runs_are_noisier():
    """Five sizes at each of four budgets; at the last, size and data weigh alike."""
    budget, ratio = (m.ravel() for m in np.meshgrid(4.0 ** np.arange(4), 2.0 ** np.arange(-2, 3)))
    x = np.stack([np.sqrt(budget) * ratio, np.sqrt(budget) / ratio], axis=1)
    law = {'E': 0.4, 'A': 0.3, 'alpha': 0.34, 'B': 0.3, 'beta': 0.28}
    clean = law['E'] + law['A'] * x[:, 0] ** -law['alpha'] + law['B'] * x[:, 1] ** -law['beta']
    errors = 0.003 * budget**0.55 * np.random.default_rng(6).standard_normal((12, 20))

    def best(params):
        return joint.optimum(params, Cost(1.0), np.array([64.0]))[0][0]

    inside = []
    for i, error in enumerate(errors):
        fit = curve_fit.fit(
            forms.find_form('joint'), x, clean * np.exp(error), bootstrap=30, seed=i
        )
        drawn = [best(fit.form.params(theta, *fit.scales)) for theta in fit.replicates]
        low, high = curve_fit.widen_band(best(fit.params), np.array(drawn), fit.dof)
        inside.append(low <= best(law) <= high)
    assert np.mean(inside) > 0.8


def test_outliers_hardly_count():
    y = shifted(X, **TRUE)
    y[[5, 20]] *= 1.5
    close(curve_fit.fit(forms.find_form('shifted'), X, y).params, TRUE, rel=0.02)


def test_warns_without_a_bend():
    fit = curve_fit.fit(forms.find_form('shifted'), X, noisy(30 * X**-0.3, 0.02))
    assert any(w.startswith(('no bend: c = 0', 'c is not identified')) for w in fit.warnings)


def test_what_is_not_identified_has_no_value():
    """A curve that barely bends leaves its limit open, but not its exponent."""
    fit = curve_fit.fit(forms.find_form('irreducible'), X, noisy(30 * X**-0.3 + 0.001, 0.05))
    assert fit.unidentified == {'c'}
    identified = fit.identified_params
    assert identified['c'] is None and identified['a'] == fit.params['a']
    exact = curve_fit.fit(forms.find_form('irreducible'), X, 30 * X**-0.3 + 0.1)
    assert not exact.unidentified and exact.identified_params == exact.params


def test_warns_of_too_few_points():
    y = shifted(X, **TRUE)
    fit = curve_fit.fit(forms.find_form('shifted'), X[::8], y[::8])
    assert 'too few points: 5 for 4 parameters' in fit.warnings[0]
    with pytest.raises(UserError, match=r'3 points.*4 parameters'):
        curve_fit.fit(forms.find_form('shifted'), X[:3], y[:3])


@pytest.mark.parametrize(
    ('x', 'y', 'message'),
    [
        (X, np.zeros(40), 'finite.*positive'),
        (np.full(40, 3.0), shifted(X, **TRUE), 'the same x'),
        (np.stack([X, X], axis=1), shifted(X, **TRUE), 'takes 1 columns'),
    ],
)
def test_refuses_what_has_no_logarithm(x, y, message):
    with pytest.raises(UserError, match=message):
        curve_fit.fit(forms.find_form('shifted'), x, y)


def test_unknown_forms_get_a_hint():
    with pytest.raises(UserError, match="did you mean 'shifted'"):
        forms.find_form('shiftd')


def test_bands_hold_the_curve_and_narrow_with_less_noise():
    widths = []
    for sigma in (0.02, 0.005):
        y = noisy(shifted(X, **TRUE), sigma)
        fit = curve_fit.fit(forms.find_form('shifted'), X, y, bootstrap=20)
        low, high = fit.predict_band(X)
        assert np.mean((low <= fit.predict(X)) & (fit.predict(X) <= high)) > 0.9
        widths.append(np.mean(np.log(high / low)))
    assert widths[1] < widths[0] / 2


def test_frontier():
    x, y = np.array([1, 2, 2, 3, 4]), np.array([9.0, 7, 6, 8, 5])
    np.testing.assert_array_equal(isoflop.pareto_frontier(x, y), [True, False, True, False, True])
    shuffled = [3, 0, 4, 2, 1]
    np.testing.assert_array_equal(
        isoflop.pareto_frontier(x[shuffled], y[shuffled]), [False, True, True, True, False]
    )


def few_points(sigmas, points=7):
    """A fit to a few points for each noise of log y."""
    rng, x = np.random.default_rng(0), np.geomspace(1, 64, points)
    fits = []
    for sigma in sigmas:
        y = (x**-0.5 + 0.1) * np.exp(sigma * rng.standard_normal(points))
        fits.append(curve_fit.fit(forms.find_form('power'), x, y, bootstrap=1))
    return fits


def test_curves_of_few_points_share_their_noise():
    separate = few_points([0.3] * 6)
    shared = averaging.share_noise([*separate, None])
    assert shared[-1] is None
    before, after = ([fit.noise.std for fit in fits] for fits in (separate, shared[:-1]))
    assert np.std(np.log(after)) < 0.5 * np.std(np.log(before))
    widths = [np.log(np.divide(*fit.predict_band(np.array([256.0]))[::-1])) for fit in separate]
    narrower = [np.log(np.divide(*fit.predict_band(np.array([256.0]))[::-1])) for fit in shared[:6]]
    assert np.mean(narrower) < np.mean(widths)


def test_curves_that_differ_in_their_noise_share_little_of_it():
    variances, dof = np.geomspace(1e-6, 1e-2, 9), np.full(9, 5.0)
    _, mixed = noise.common_variance(variances, dof)
    _, equal = noise.common_variance(np.full(9, 1e-4), dof)
    assert mixed < 2 < 40 < equal


def test_two_curves_or_noise_from_seeds_stay_as_they_are():
    two = few_points([0.3] * 2)
    assert averaging.share_noise(two) == two


def test_the_law_of_repeats_has_the_published_constants(shared_data):
    """Muennighoff et al. 2023: R_D = 15.39; without repeats it is the joint law."""
    with (shared_data / 'scaling_laws' / 'repeats_published.csv').open() as file:
        rows = list(csv.DictReader(file))
    names = ('params', 'tokens', 'unique_tokens', 'epochs', 'loss')
    *x, epochs, y = np.array([[float(row[name]) for name in names] for row in rows]).T
    x, few = np.stack(x, axis=1), epochs <= 5
    law = curve_fit.fit(forms.find_form('repeated'), x[few], y[few])
    joint = curve_fit.fit(forms.find_form('joint'), x[few, :2], y[few])
    assert 12 < law.params['R_D'] < 19
    far = epochs > 5
    assert curve_fit.rmse(law, x[far], y[far]) < 0.7 * curve_fit.rmse(joint, x[far, :2], y[far])
