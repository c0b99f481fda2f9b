"""Profile-likelihood bands: those of linear theory where it is exact, and their ends on the rim."""

from __future__ import annotations

import numpy as np
import pytest
from scipy import stats

from vit_jax.scaling import curve_fit, forms, profile_likelihood

X = np.geomspace(1.0, 64.0, 12)


def points(y, x=X):
    form = forms.find_form('power')
    x = x[:, None]
    return profile_likelihood.FittedPoints(x, np.log(y), np.ones(len(y)), form.bounds(x, y))


def noisy(sigma=0.02, seed=0, correlation=0.0):
    errors = np.random.default_rng(seed).standard_normal(len(X))
    for i in range(1, len(X)):
        errors[i] = correlation * errors[i - 1] + np.sqrt(1 - correlation**2) * errors[i]
    return X**-0.5 * np.exp(sigma * errors)


def test_a_power_law_has_the_interval_of_linear_regression():
    y = noisy()
    fit = curve_fit.fit(forms.find_form('power'), X, y)
    terms = np.stack([np.ones(12), np.log(X)], axis=1)
    covariance = np.linalg.inv(terms.T @ terms)
    at = np.array([[64.0], [640.0]])
    ahead = np.stack([np.ones(2), np.log(at[:, 0])], axis=1)
    expected = np.sqrt(0.003 * np.einsum('ij,jk,ik->i', ahead, covariance, ahead))
    theta = np.array([0.0, 0.5, 0.0, 0.0])
    down, up = profile_likelihood.band_offsets(fit.form, theta, points(y), 0.003, at)
    assert down == pytest.approx(expected, rel=0.03)
    assert up == pytest.approx(expected, rel=0.03)


@pytest.mark.slow
def test_no_law_within_the_rise_leaves_the_interval():
    form, y = forms.find_form('irreducible'), noisy() + 0.05
    fit = curve_fit.fit(form, X, y)
    data, at, rise = fit.points, np.array([[10.0]]), 0.004
    down, up = profile_likelihood.band_offsets(form, fit.theta, data, rise, at)[:, 0]
    low, high = np.array(data.bounds).T
    free = low < high

    def errors(theta):
        return np.sum((data.weights * (form.log_value(theta, data.x)[0] - data.log_y)) ** 2)

    slopes = data.weights[:, None] * form.log_value(fit.theta, data.x)[1][:, free]
    factor = np.linalg.cholesky(np.linalg.inv(slopes.T @ slopes))
    rng, ends = np.random.default_rng(0), []
    for _ in range(4000):
        theta = fit.theta.copy()
        theta[free] += 1.5 * np.sqrt(rise) * factor @ rng.standard_normal(free.sum())
        inside = (low <= theta).all() and (theta <= high).all()
        if inside and errors(theta) <= errors(fit.theta) + rise:
            ends.append((form.log_value(theta, at)[0] - form.log_value(fit.theta, at)[0])[0])
    assert -down * 1.02 <= min(ends) < -0.7 * down
    assert 0.7 * up < max(ends) <= 1.02 * up


def test_an_interval_may_be_lopsided():
    y = X**-0.5 * np.exp(0.02 * np.random.default_rng(3).standard_normal(12))
    fit = curve_fit.fit(forms.find_form('irreducible'), X, y, bootstrap=1)
    low, high = fit.predict_band(np.array([640.0]))
    center = fit.predict(np.array([640.0]))
    assert fit.params['c'] < 0.03
    assert high / center > (center / low) ** 1.2


def test_correlated_errors_widen_the_band():
    independent = [
        profile_likelihood.inflation(forms.find_form('power'), *guess(noisy(seed=i)))
        for i in range(8)
    ]
    chained = [
        profile_likelihood.inflation(
            forms.find_form('power'), *guess(noisy(seed=i, correlation=0.8))
        )
        for i in range(8)
    ]
    assert 1 <= np.mean(independent) < np.mean(chained)
    joint = profile_likelihood.FittedPoints(np.ones((4, 2)), np.zeros(4), np.ones(4), [])
    assert profile_likelihood.inflation(forms.find_form('joint'), np.zeros(5), joint) == 1.0


def guess(y):
    slope, log_a = np.polyfit(np.log(X), np.log(y), 1)
    return np.array([log_a, -slope, 0.0, 0.0]), points(y)


def test_between_knots_a_band_is_interpolated():
    fit = curve_fit.fit(forms.find_form('power'), X, noisy(), bootstrap=1)
    many = np.geomspace(1.0, 640.0, 50)
    low, high = fit.predict_band(many)
    some = np.array([many[0], many[-1]])
    assert [low[[0, -1]], high[[0, -1]]] == pytest.approx(np.array(fit.predict_band(some)))
    assert (np.log(high / low)[-1] > np.log(high / low)[20]).all()


def test_the_width_is_a_quantile_of_student():
    y = noisy()
    fit = curve_fit.fit(forms.find_form('power'), X, y, bootstrap=1)
    grown = profile_likelihood.inflation(fit.form, fit.theta, fit.points)
    rise = grown * (stats.t.ppf(0.95, 10) * fit.noise.std) ** 2
    at = np.array([640.0]) / fit.scales[0]
    assert fit.band_offsets(np.array([640.0])) == pytest.approx(
        profile_likelihood.band_offsets(fit.form, fit.theta, fit.points, rise, at[:, None])
    )
