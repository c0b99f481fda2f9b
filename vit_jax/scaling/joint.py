"""Joint law L = E + A N^-alpha + B D^-beta, and its optimum at a budget."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from vit_jax.errors import UserError
from vit_jax.scaling import curve_fit, forms, isoflop
from vit_jax.scaling.points import Cost, Points

_TIED = 1.2  # factor by which D must vary at equal N to separate the two terms


def fit_joint(runs: Points, bootstrap: int) -> tuple[curve_fit.Fit | None, list[str]]:
    """Fit the joint law; None and the reason if it cannot be fitted."""
    for name, values in (('N', runs.n), ('D', runs.d)):
        if len(np.unique(isoflop.label_clusters(np.log(values), isoflop.ALIKE))) < 3:
            few = f'{len(np.unique(values))} value(s) of {name}'
            return None, [f'no joint law: {few}, whose exponent needs three']
    if len(runs.y) < 6:
        return None, [f'no joint law: {len(runs.y)} runs for its 5 parameters']
    if reason := _explain_proportional(runs):
        return None, [f'no joint law: {reason}']
    try:
        form = forms.find_form('joint')
        fit = curve_fit.fit(form, runs.x, runs.y, bootstrap=bootstrap, seeds=runs.seeds)
    except UserError as e:
        return None, [f'no joint law: {e}']
    for name, term in (('N', 'A'), ('D', 'B')):
        exponent = fit.params['alpha' if term == 'A' else 'beta']
        if fit.params[term] < 1e-9 or not 1e-3 < exponent < forms.MAX_EXPONENT - 1e-3:
            return None, [f'no joint law: the losses do not depend on {name} as a power of it']
    return fit, [f'joint: {line}' for line in fit.warnings]


def _explain_proportional(runs: Points) -> str:
    """Explain that D follows from N, so a fit cannot separate their terms; '' if it does not."""
    slope, start = np.polyfit(np.log(runs.n), np.log(runs.d), 1)
    if np.ptp(np.log(runs.d) - slope * np.log(runs.n) - start) > np.log(_TIED):
        return ''
    law = f'D = {np.exp(start):.3g} N^{slope:.3g}'
    if np.ptp(np.log(runs.d / runs.n)) <= np.log(_TIED):
        law = f'D = {np.exp(np.log(runs.d / runs.n).mean()):.3g} N'
    return f'all runs have {law}, so neither the split of a budget nor the loss there is identified'


def exponents(params: Mapping[str, float], cost: Cost) -> tuple[float, float]:
    """Compute a and b of N* ~ C^a and D* ~ C^b."""
    alpha, beta = np.float64(params['alpha']), np.float64(params['beta'])
    total = alpha * cost.q + beta * cost.p
    with np.errstate(invalid='ignore'):
        return float(beta / total), float(alpha / total)


def optimum(params: Mapping[str, float], cost: Cost, c: np.ndarray) -> tuple[np.ndarray, ...]:
    """Compute N*, D* and the loss [K] at budgets C [K] (Hoffmann et al. 2022, equation 4).

    Infinite or NaN where the exponent of a term is zero.
    """
    alpha, beta, q = (np.float64(v) for v in (params['alpha'], params['beta'], cost.q))
    with np.errstate(divide='ignore', invalid='ignore', over='ignore'):
        a, _ = exponents(params, cost)
        ratio = alpha * params['A'] * q / (beta * params['B'] * cost.p)
        scale = ratio ** (q / (alpha * q + beta * cost.p))
        n = scale * (c / cost.k) ** a
        d = cost.data(n, c)
        return n, d, params['E'] + params['A'] * n**-alpha + params['B'] * d**-beta


def warn_outside(runs: Points, joint: curve_fit.Fit) -> list[str]:
    """Warn if the joint law's optima are outside the sizes of most budgets."""
    groups = isoflop.budgets(runs.n, runs.c)
    budgets = np.array([np.exp(np.log(runs.c[indices]).mean()) for indices in groups])
    best = optimum(joint.params, runs.cost, budgets)[0]
    is_outside = [
        not runs.n[indices].min() <= n <= runs.n[indices].max()
        for indices, n in zip(groups, best, strict=True)
    ]
    if sum(is_outside) <= len(groups) / 2:
        return []
    return [
        f'joint: N* is outside the sizes of the runs at {sum(is_outside)} of {len(groups)} '
        'budgets, an extrapolation; run sizes on both sides of it'
    ]
