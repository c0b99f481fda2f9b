"""Compute-optimal sizes: N*(C), D*(C) and the loss there, by three methods, with bands.

Hoffmann et al. 2022, section 3: the frontier of curves, parabolas at equal compute, and the joint
law L = E + A N^-alpha + B D^-beta. Parabolas are biased even without noise where alpha and beta
differ or the sizes do not lie around the optimum; the joint law is not.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from scipy import stats
from threadpoolctl import threadpool_limits

from vit_jax.errors import UserError
from vit_jax.scaling import curve_fit, forms, isoflop
from vit_jax.scaling.noise import pooled
from vit_jax.scaling.points import Cost, Points

BIAS = (
    'parabolas are biased even without noise, N* by 3 to 19 % on synthetic laws, where alpha and '
    'beta differ or the sizes do not lie around the optimum'
)
_QUANTILES = 1000  # of the Gaussian that errors are drawn from


@dataclasses.dataclass(frozen=True)
class AnalysisOptions:
    """Options of `analyze`.

    Attributes:
      target: a budget whose optimum is predicted; None for none.
      holdout: runs with more than 1 / holdout of the largest C are held out; 0 for none.
      bootstrap: replicates for the bands.
    """

    target: float | None = None
    holdout: float = 0.0
    bootstrap: int = 100


@dataclasses.dataclass(frozen=True)
class Analysis:
    """Optima of a group of runs.

    Attributes:
      points: all runs, ascending in C.
      kept: [M], whether a run was fitted.
      joint: the joint law; None if it cannot be fitted, `notes` has the reason.
      parabolas, frontier: their exponent is None if there are too few.
      summary: all results as JSON values.
      notes: warnings, a line each.
    """

    points: Points
    kept: np.ndarray
    joint: curve_fit.Fit | None
    parabolas: isoflop.Optima
    frontier: isoflop.Optima
    summary: dict[str, Any]
    notes: tuple[str, ...]


def analyze(points: Points, options: AnalysisOptions) -> Analysis:
    """Apply the three methods to the runs that are not held out."""
    kept = (
        points.c <= points.c.max() / options.holdout
        if options.holdout
        else np.ones(len(points.y), bool)
    )
    seen = points.take(kept)
    with threadpool_limits(1, user_api='blas'):
        joint, notes = _joint(seen, options.bootstrap)
        level = _level(seen, joint, notes)
        parabolas, more = isoflop.parabolas(seen.n, seen.c, level, seen.seeds.weights)
        frontier = isoflop.frontier(seen.n, seen.c, seen.y)
        notes += more + _missing(parabolas, frontier)
        summary = {
            'joint': _joint_summary(points, kept, joint, options),
            'isoflop': _optima_summary(
                parabolas, seen.cost, options, _parabola_replicates(seen, level, options)
            ),
            'frontier': _optima_summary(
                frontier, seen.cost, options, _frontier_replicates(seen, joint, frontier, options)
            ),
        }
    notes = [*points.notes, *notes]
    return Analysis(points, kept, joint, parabolas, frontier, summary, tuple(notes))


def require_law(analyses: Sequence[Analysis]) -> None:
    """Raise UserError if no method gives a law for any curve."""
    if not any(any(a.summary.values()) for a in analyses):
        reasons = [note for note in analyses[0].notes if note.startswith('no ')]
        raise UserError(f'no law of the optimum can be fitted: {"; ".join(reasons)}')


def _joint(seen: Points, bootstrap: int) -> tuple[curve_fit.Fit | None, list[str]]:
    """The joint law, or None and the reason."""
    for name, values in (('N', seen.n), ('D', seen.d)):
        if len(np.unique(isoflop.clusters(np.log(values), isoflop.ALIKE))) < 3:
            few = f'{len(np.unique(values))} value(s) of {name}'
            return None, [f'no joint law: {few}, whose exponent needs three']
    if len(seen.y) < 6:
        return None, [f'no joint law: {len(seen.y)} runs for its 5 parameters']
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


def _level(seen: Points, joint: curve_fit.Fit | None, notes: list[str]) -> np.ndarray:
    """The losses, moved along the joint law to the mean of their budget."""
    level = seen.y.copy()
    off = 0.0
    for at in isoflop.budgets(seen.n, seen.c):
        off = max(off, float(np.exp(np.ptp(np.log(seen.c[at])))) - 1)
        if joint is not None:
            ratio = np.exp(np.log(seen.c[at]).mean() - np.log(seen.c[at]))
            moved = np.stack([seen.n[at], seen.d[at] * ratio ** (1 / seen.cost.q)], axis=1)
            level[at] *= joint.predict(moved) / joint.predict(seen.x[at])
    if off > 1e-3:
        done = 'moved to their mean by the joint law' if joint is not None else 'taken as equal'
        notes.append(f'isoflop: budgets differ by up to {100 * off:.2g} %; {done}')
    return level


def _missing(parabolas: isoflop.Optima, frontier: isoflop.Optima) -> list[str]:
    notes = []
    if parabolas.exponent is None:
        notes.append(
            'no isoflop law: needs two budgets with a minimum, each of three sizes or more'
        )
    elif len(parabolas.c) == 2:
        notes.append('isoflop: two budgets, through which any power law goes')
    if frontier.exponent is None:
        notes.append('no frontier law: the best size does not change, or is an extreme one')
    return notes


def _exponents(params: dict[str, float], cost: Cost) -> tuple[float, float]:
    alpha, beta = params['alpha'], params['beta']
    total = alpha * cost.q + beta * cost.p
    return beta / total, alpha / total


def optimum(params: dict[str, float], cost: Cost, c: np.ndarray) -> tuple[np.ndarray, ...]:
    """N* [K], D* [K] and the loss [K] at budgets C [K]; Hoffmann et al. 2022, equation 4."""
    a, _ = _exponents(params, cost)
    alpha, beta, q = params['alpha'], params['beta'], cost.q
    ratio = alpha * params['A'] * q / (beta * params['B'] * cost.p)
    scale = ratio ** (q / (alpha * q + beta * cost.p))
    n = scale * (c / cost.k) ** a
    d = cost.data(n, c)
    return n, d, params['E'] + params['A'] * n**-alpha + params['B'] * d**-beta


def _joint_summary(
    points: Points, kept: np.ndarray, joint: curve_fit.Fit | None, options: AnalysisOptions
) -> dict[str, Any] | None:
    if joint is None:
        return None
    cost = points.cost
    drawn = [joint.form.params(theta, *joint.scales) for theta in joint.replicates]
    a, b = _exponents(joint.params, cost)
    both = np.array([_exponents(params, cost) for params in drawn]).reshape(-1, 2)
    bands = joint.bands | _widened_bands(joint.dof, a=(a, both[:, 0]), b=(b, both[:, 1]))
    held = ~kept
    error = curve_fit.rmse(joint, points.x[held], points.y[held]) if held.any() else None
    result: dict[str, Any] = {
        **joint.params,
        'a': a,
        'b': b,
        'bands': bands,
        'n_fit': joint.n_points,
        'n_holdout': int(held.sum()),
        'fit_rmse': joint.rmse,
        'holdout_rmse': error,
        'identified': not joint.warnings,
    }
    if options.target is not None:
        at = np.array([options.target])
        samples = np.array([[v[0] for v in optimum(p, cost, at)] for p in drawn]).reshape(-1, 3)
        n, d, loss = (float(v[0]) for v in optimum(joint.params, cost, at))
        values = {'N': (n, samples[:, 0]), 'D': (d, samples[:, 1]), 'loss': (loss, samples[:, 2])}
        spread = _widened_bands(joint.dof, **values)
        result['target'] = {'C': options.target, 'N': n, 'D': d, 'loss': loss, 'bands': spread}
    return result


def _widened_bands(dof: float, **drawn: tuple[float, np.ndarray]) -> dict[str, list[float]]:
    """Bands of values from bootstrap samples, widened as for the fit; none if one is infinite."""
    return {
        name: curve_fit.widened(value, samples, dof)
        for name, (value, samples) in drawn.items()
        if len(samples) and np.isfinite(samples).all()
    }


def _bands(**samples: np.ndarray) -> dict[str, list[float]]:
    return {
        name: [float(q) for q in np.quantile(values, curve_fit.BAND)]
        for name, values in samples.items()
        if len(values)
    }


def _optima_summary(
    found: isoflop.Optima, cost: Cost, options: AnalysisOptions, replicates: list[isoflop.Optima]
) -> dict[str, Any] | None:
    if found.exponent is None:
        return None
    slopes = np.array([one.exponent for one in replicates])
    a = found.exponent
    result: dict[str, Any] = {
        'a': a,
        'b': (1 - a * cost.p) / cost.q,
        'bands': _bands(a=slopes, b=(1 - slopes * cost.p) / cost.q) if len(slopes) else {},
        'budgets': [
            dict(zip(('C', 'N', 'D', 'loss'), map(float, values), strict=True))
            for values in zip(
                found.c, found.n, cost.data(found.n, found.c), found.loss, strict=True
            )
        ],
    }
    if options.target is not None:
        n = found.size(options.target)
        drawn = np.array([one.size(options.target) for one in replicates])
        spread = _bands(N=drawn, D=cost.data(drawn, np.full(len(drawn), options.target)))
        d = float(cost.data(np.array([n]), np.array([options.target]))[0])
        result['target'] = {'C': options.target, 'N': n, 'D': d, 'bands': spread}
    return result


def _parabola_replicates(
    seen: Points, level: np.ndarray, options: AnalysisOptions
) -> list[isoflop.Optima]:
    """Parabolas through redrawn points, with errors from their residuals or from seeds."""
    groups = isoflop.budgets(seen.n, seen.c)
    free = sum(len(at) - 3 for at in groups)
    if not groups:
        return []
    inside, counts = np.concatenate(groups), seen.seeds.counts
    weights = np.sqrt(counts / counts[inside].mean())
    center = isoflop.fitted(seen.n, seen.c, level, weights)
    errors = (weights * np.log(level / center))[inside]
    noise = pooled(errors, free, seen.seeds.take(inside))
    if noise.measured:
        pool = noise.std * stats.norm.ppf((np.arange(_QUANTILES) + 0.5) / _QUANTILES)
    elif free:
        pool = errors * np.sqrt(len(inside) / free)
    else:
        return []

    def solve(y: np.ndarray) -> isoflop.Optima:
        return isoflop.parabolas(seen.n, seen.c, y, weights)[0]

    return _redrawn(center, pool, options, solve, weights)


def _frontier_replicates(
    seen: Points, joint: curve_fit.Fit | None, found: isoflop.Optima, options: AnalysisOptions
) -> list[isoflop.Optima]:
    """Frontiers of the joint law with noise, shifted to match the measured frontier without it."""
    if joint is None or found.exponent is None:
        return []
    center = joint.predict(seen.x)
    pool = np.log(seen.y / center)
    clean = isoflop.frontier(seen.n, seen.c, center)
    if clean.exponent is None:
        return []
    da, ds = found.exponent - clean.exponent, found.log_scale - clean.log_scale
    drawn = _redrawn(center, pool, options, lambda y: isoflop.frontier(seen.n, seen.c, y))
    width, rng = isoflop.spacing(seen.n, seen.c), np.random.default_rng(1)
    return [
        dataclasses.replace(one, exponent=one.exponent + da, log_scale=one.log_scale + ds)
        for one in (isoflop.jittered(one, width, rng) for one in drawn)
        if one.exponent is not None
    ]


def _redrawn(
    center: np.ndarray,
    pool: np.ndarray,
    options: AnalysisOptions,
    solve: Callable[[np.ndarray], isoflop.Optima],
    weights: np.ndarray | float = 1.0,
) -> list[isoflop.Optima]:
    rng = np.random.default_rng(0)
    pool = pool - pool.mean()
    drawn = (rng.choice(pool, len(center)) / weights for _ in range(options.bootstrap))
    found = [solve(center * np.exp(errors)) for errors in drawn]
    return [one for one in found if one.exponent is not None]
