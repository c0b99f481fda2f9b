"""The joint law L = E + A N^-alpha + B D^-beta of runs, and its optimum at a budget."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from vit_jax.errors import UserError
from vit_jax.scaling import curve_fit, forms, isoflop
from vit_jax.scaling.points import Cost, Points

_TIED = 1.2  # factor by which D must vary at equal N, to tell the two terms apart


def fit_joint(seen: Points, bootstrap: int) -> tuple[curve_fit.Fit | None, list[str]]:
    """The joint law, or None and the reason."""
    for name, values in (('N', seen.n), ('D', seen.d)):
        if len(np.unique(isoflop.clusters(np.log(values), isoflop.ALIKE))) < 3:
            few = f'{len(np.unique(values))} value(s) of {name}'
            return None, [f'no joint law: {few}, whose exponent needs three']
    if len(seen.y) < 6:
        return None, [f'no joint law: {len(seen.y)} runs for its 5 parameters']
    if tied := _proportional(seen):
        return None, [f'no joint law: {tied}']
    try:
        form = forms.find('joint')
        found = curve_fit.fit(form, seen.x, seen.y, bootstrap=bootstrap, seeds=seen.seeds)
    except UserError as e:
        return None, [f'no joint law: {e}']
    for name, term in (('N', 'A'), ('D', 'B')):
        exponent = found.params['alpha' if term == 'A' else 'beta']
        if found.params[term] < 1e-9 or not 1e-3 < exponent < forms.MAX_EXPONENT - 1e-3:
            return None, [f'no joint law: the losses do not depend on {name} as a power of it']
    return found, [f'joint: {line}' for line in found.warnings]


def _proportional(seen: Points) -> str:
    """The reason if D follows from N, so that no fit can tell their terms apart."""
    slope, start = np.polyfit(np.log(seen.n), np.log(seen.d), 1)
    if np.ptp(np.log(seen.d) - slope * np.log(seen.n) - start) > np.log(_TIED):
        return ''
    law = f'D = {np.exp(start):.3g} N^{slope:.3g}'
    if np.ptp(np.log(seen.d / seen.n)) <= np.log(_TIED):
        law = f'D = {np.exp(np.log(seen.d / seen.n).mean()):.3g} N'
    return f'all runs have {law}, so neither the split of a budget nor the loss there is identified'


def exponents(params: Mapping[str, float], cost: Cost) -> tuple[float, float]:
    """a and b of N* ~ C^a and D* ~ C^b."""
    alpha, beta = np.float64(params['alpha']), np.float64(params['beta'])
    total = alpha * cost.q + beta * cost.p
    with np.errstate(invalid='ignore'):
        return float(beta / total), float(alpha / total)


def optimum(params: Mapping[str, float], cost: Cost, c: np.ndarray) -> tuple[np.ndarray, ...]:
    """N* [K], D* [K] and the loss [K] at budgets C [K]; Hoffmann et al. 2022, equation 4.

    Infinite or NaN where one of the terms has no exponent.
    """
    alpha, beta, q = (np.float64(v) for v in (params['alpha'], params['beta'], cost.q))
    with np.errstate(divide='ignore', invalid='ignore', over='ignore'):
        a, _ = exponents(params, cost)
        ratio = alpha * params['A'] * q / (beta * params['B'] * cost.p)
        scale = ratio ** (q / (alpha * q + beta * cost.p))
        n = scale * (c / cost.k) ** a
        d = cost.data(n, c)
        return n, d, params['E'] + params['A'] * n**-alpha + params['B'] * d**-beta


def outside(seen: Points, joint: curve_fit.Fit) -> list[str]:
    """A line if the joint law's optima lie outside of the sizes of most budgets."""
    groups = isoflop.budgets(seen.n, seen.c)
    budgets = np.array([np.exp(np.log(seen.c[at]).mean()) for at in groups])
    best = optimum(joint.params, seen.cost, budgets)[0]
    away = [
        not seen.n[at].min() <= n <= seen.n[at].max() for at, n in zip(groups, best, strict=True)
    ]
    if sum(away) <= len(groups) / 2:
        return []
    return [
        f'joint: its N* lies outside of the sizes that were run at {sum(away)} of {len(groups)} '
        'budgets: it is an extrapolation, run sizes on both sides of it'
    ]
