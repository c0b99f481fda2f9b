"""Compute-optimal sizes N*(C), D*(C) and their loss, by three methods, with bands.

Hoffmann et al. 2022, section 3: the frontier of curves, parabolas at equal compute, and the joint
law L = E + A N^-alpha + B D^-beta. Parabolas are biased even without noise if alpha and beta differ
or the sizes are not centered on the optimum; the joint law is unbiased.

Laws do not hold exactly beyond the runs. On published isoFLOP studies the optimum drifts away from
the prediction of every method as the budget grows, so bands at larger budgets have a drift term.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from scipy import stats
from threadpoolctl import threadpool_limits

from vit_jax.errors import UserError
from vit_jax.scaling import curve_fit, isoflop
from vit_jax.scaling.contradictions import compare, has_vague_exponent, is_determined
from vit_jax.scaling.drift import add_drift, half_band, size_std
from vit_jax.scaling.inference_cost import summarize_inference
from vit_jax.scaling.joint import exponents, fit_joint, optimum, warn_outside
from vit_jax.scaling.noise import pool_noise
from vit_jax.scaling.points import Cost, Points
from vit_jax.scaling.repeats import convert_to_new_data

BIAS = (
    'parabolas are biased even without noise, N* by 3 to 19 % on synthetic laws, where alpha and '
    'beta differ or the sizes are not centered on the optimum'
)
_QUANTILES = 1000  # number of quantiles of the Gaussian from which errors are drawn
_SIZES = 3  # least number of different sizes of a law of the frontier
_VAGUE_LOSS = 1.5  # ratio of the ends of a 90 % interval above which a loss is not identified
_PAST = 1.05  # budget over the largest fitted one above which it is beyond the runs


@dataclasses.dataclass(frozen=True)
class AnalysisOptions:
    """Options of `analyze`.

    Attributes:
      target: Budget whose optimum is predicted; None for no prediction.
      holdout: Factor; runs with more than 1 / holdout of the largest C are held out. 0 for none.
      bootstrap: Replicates for the bands.
      served: Data of inference over the model's life, in the unit of D; None for training only.
    """

    target: float | None = None
    holdout: float = 0.0
    bootstrap: int = 100
    served: float | None = None


@dataclasses.dataclass(frozen=True)
class Analysis:
    """Optima of a group of runs.

    Attributes:
      points: All runs, ascending in C.
      fit_mask: Mask [M] of the fitted runs.
      joint: Joint law; None if it cannot be fitted, with the reason in `notes`.
      parabolas, frontier: Optima; their exponent is None if there are too few.
      summary: All results as JSON values; None for unidentified values.
      shown: Method whose prediction is shown, if they differ: a key of `summary`, or ''.
      notes: Warnings, a line each.
      replicates: Optima of bootstrap samples by method; None without points to spare.
    """

    points: Points
    fit_mask: np.ndarray
    joint: curve_fit.Fit | None
    parabolas: isoflop.Optima
    frontier: isoflop.Optima
    summary: dict[str, Any]
    shown: str
    notes: tuple[str, ...]
    replicates: Mapping[str, list[isoflop.Optima] | None]

    def size_band(self, law: str, budgets: np.ndarray) -> tuple[np.ndarray, np.ndarray] | None:
        """Compute the 90 % band [K] of N* at budgets [K]; NaN too far away, None without a band."""
        ratio, gap = budgets / self.points.c[self.fit_mask].max(), np.zeros(len(budgets))
        if law == 'joint':
            spread = self._joint_spread(budgets)
        else:
            optima = self.parabolas if law == 'isoflop' else self.frontier
            spread = _optima_spread(optima, self.replicates.get(law), budgets)
        if spread is None:
            return None
        center, down, up = spread
        if law == 'joint' and (other := self.summary['isoflop']) and other['a'] is not None:
            gap = center - np.log([self.parabolas.size(c) for c in budgets])
        drift = half_band(size_std(ratio, gap))
        drift[ratio > curve_fit.FARTHEST] = np.nan
        return np.exp(center - np.hypot(down, drift)), np.exp(center + np.hypot(up, drift))

    def _joint_spread(self, budgets: np.ndarray) -> tuple[np.ndarray, ...] | None:
        """Log N* [K] of the joint law, and its distances to the ends of the sampling band."""
        law, cost = self.joint, self.points.cost
        if law is None or not len(law.replicates):
            return None
        redrawn = [law.form.params(theta, *law.scales) for theta in law.replicates]
        sizes = np.array([optimum(params, cost, budgets)[0] for params in redrawn])
        if not (np.isfinite(sizes).all() and np.all(sizes)):
            return None  # some replicates do not have an optimum
        half = curve_fit.half_width(np.std(np.log(sizes), axis=0), law.dof)
        return np.log(optimum(law.params, cost, budgets)[0]), half, half


def _optima_spread(
    optima: isoflop.Optima, replicates: Sequence[isoflop.Optima] | None, budgets: np.ndarray
) -> tuple[np.ndarray, ...] | None:
    """Log N* [K] of a law of optima, and its distances to the ends of the sampling band."""
    if optima.exponent is None or not replicates:
        return None
    logs = [np.log([law.size(c) for c in budgets]) for law in replicates]
    center = np.log([optima.size(c) for c in budgets])
    low, high = np.quantile(logs, curve_fit.BAND, axis=0)
    return center, np.maximum(center - low, 0.0), np.maximum(high - center, 0.0)


def analyze(points: Points, options: AnalysisOptions) -> Analysis:
    """Apply the three methods to the runs that are not held out."""
    fit_mask = (
        points.c <= points.c.max() / options.holdout
        if options.holdout
        else np.ones(len(points.y), bool)
    )
    runs = points.take(fit_mask)
    with threadpool_limits(1, user_api='blas'):
        runs, _, repeats = convert_to_new_data(runs, options.bootstrap)
        joint, notes = fit_joint(runs, options.bootstrap)
        level = _level_losses(runs, joint, notes)
        parabolas, parabola_notes = isoflop.parabolas(runs.n, runs.c, level, runs.seeds.weights)
        frontier, frontier_notes = isoflop.frontier(runs.n, runs.c, runs.y)
        frontier = _require_sizes(frontier)
        target = options.target or float(runs.c.max())
        replicates = {
            'isoflop': _draw_parabolas(runs, level, options),
            'frontier': _draw_frontiers(runs, joint, frontier, options),
        }
        laws_by_method: dict[str, dict[str, Any] | None] = {
            'joint': _summarize_joint(points, fit_mask, joint, target, notes),
            'isoflop': _summarize_optima(
                parabolas, runs.cost, target, replicates['isoflop'], options
            ),
            'frontier': _summarize_optima(
                frontier, runs.cost, target, replicates['frontier'], options
            ),
        }
        notes += (
            parabola_notes + frontier_notes + _note_missing(laws_by_method, parabolas, replicates)
        )
        preferred, contradictions = compare(runs, level, laws_by_method, len(parabolas.c))
    notes += [
        *repeats,
        *contradictions,
        *_clear_unidentified(laws_by_method, beyond=target > _PAST * runs.c.max()),
    ]
    if options.served is not None:
        notes += _add_inference(laws_by_method['joint'], joint, runs, target, options.served)
    notes += add_drift(laws_by_method, runs.cost, target / runs.c.max())
    if options.target is None:
        laws_by_method = {
            name: method_law and {k: method_law[k] for k in method_law if k != 'target'}
            for name, method_law in laws_by_method.items()
        }
    lines = (*points.notes, *notes)
    return Analysis(
        points, fit_mask, joint, parabolas, frontier, laws_by_method, preferred, lines, replicates
    )


def require_law(analyses: Sequence[Analysis]) -> None:
    """Raise UserError if none of the methods gives a law for a curve."""
    if not any(any(a.summary.values()) for a in analyses):
        reasons = [note for note in analyses[0].notes if note.startswith('no ')]
        raise UserError(f'no law of the optimum can be fitted: {"; ".join(reasons)}')


def _level_losses(runs: Points, joint: curve_fit.Fit | None, notes: list[str]) -> np.ndarray:
    """Move losses along the joint law to the mean of their budget."""
    level = runs.y.copy()
    largest_gap = 0.0
    for indices in isoflop.budgets(runs.n, runs.c):
        largest_gap = max(largest_gap, float(np.exp(np.ptp(np.log(runs.c[indices])))) - 1)
        if joint is not None:
            ratio = np.exp(np.log(runs.c[indices]).mean() - np.log(runs.c[indices]))
            moved = np.stack(
                [runs.n[indices], runs.d[indices] * ratio ** (1 / runs.cost.q)], axis=1
            )
            level[indices] *= joint.predict(moved) / joint.predict(runs.x[indices])
    if largest_gap > 1e-3:
        how = 'moved to their mean by the joint law' if joint is not None else 'taken as equal'
        notes.append(f'isoflop: budgets differ by up to {100 * largest_gap:.2g} %; {how}')
    return level


def _require_sizes(frontier: isoflop.Optima) -> isoflop.Optima:
    """Drop the frontier's law if too few sizes are best: a power law goes through any two."""
    several = isoflop.count_distinct(frontier.n) >= _SIZES
    return frontier if several else dataclasses.replace(frontier, exponent=None)


def _note_missing(
    laws_by_method: dict[str, dict[str, Any] | None],
    parabolas: isoflop.Optima,
    replicates: dict[str, list[isoflop.Optima] | None],
) -> list[str]:
    """Explain each law that is missing, or goes through only two budgets."""
    reasons = {
        'isoflop': 'needs two budgets with a minimum, each of three sizes or more',
        'frontier': f'fewer than {_SIZES} sizes, extreme ones excluded, are best at a budget',
    }
    if parabolas.exponent is not None and replicates['isoflop'] is not None:
        reasons['isoflop'] = 'most bootstrap samples do not have one'
    elif len(parabolas.c) == 2:
        reasons['isoflop'] = 'two budgets of three runs each; a power law goes through any two'
    notes = [
        f'no {name} law: {reason}'
        for name, reason in reasons.items()
        if laws_by_method[name] is None
    ]
    if laws_by_method['isoflop'] and len(parabolas.c) == 2:
        notes.append('isoflop: two budgets; a power law goes through any two')
    return notes


def _clear_unidentified(
    laws_by_method: dict[str, dict[str, Any] | None], beyond: bool
) -> list[str]:
    """Replace values that the runs do not determine by None, with a line for each.

    Args:
      laws_by_method: {method: its law}.
      beyond: Whether the target is beyond the runs, where N* needs the exponent.
    """
    notes = []
    for name, method_law in laws_by_method.items():
        if method_law is None:
            continue
        low, high = method_law['bands'].get('a', (method_law['a'], method_law['a']))
        vague = has_vague_exponent(method_law)
        if vague:
            notes.append(
                f'{name}: a and b are not identified: a is within {low:.2g} and {high:.2g}'
            )
            method_law['a'] = method_law['b'] = None
        target, spread = method_law['target'], method_law['target']['bands']
        vague_keys = [
            k for k in ('N', 'D', 'loss') if k in target and not _is_identified(spread, k)
        ]
        if set(vague_keys) & {'N', 'D'}:
            vague_keys = ['N', 'D', *(k for k in vague_keys if k == 'loss')]
        elif vague and beyond:
            notes.append(
                f'{name}: no N* at C = {target["C"]:.3g}: beyond the runs it needs the exponent'
            )
            target['N'] = target['D'] = None
        for key in vague_keys:
            target[key] = None
            limits = ' to '.join(f'{end:.2g}' for end in spread.get(key, ())) or 'infinite values'
            start = f'{name}: {key} at C = {target["C"]:.3g} is not identified'
            notes.append(f'{start}: the runs allow {limits}')
    return notes


def _add_inference(
    law: dict[str, Any] | None,
    joint: curve_fit.Fit | None,
    runs: Points,
    target: float,
    served: float,
) -> list[str]:
    """Add the cheapest model with inference to the joint law; return lines on its limits."""
    if law is None or law['target']['N'] is None or law['target']['loss'] is None:
        return ['no optimum with inference: it needs N* and the loss of the joint law']
    law['inference'], notes = summarize_inference(joint, runs, target, served)
    return notes


def _is_identified(bands: dict[str, list[float]], key: str) -> bool:
    """Return whether the runs determine a value; without replicates, it counts as determined."""
    band = bands.get(key)
    if key == 'loss' and band is not None and band[1] > _VAGUE_LOSS * band[0]:
        return False
    return is_determined(band) and (key in bands or not bands)


def _summarize_joint(
    points: Points,
    fit_mask: np.ndarray,
    joint: curve_fit.Fit | None,
    target_flops: float,
    notes: list[str],
) -> dict[str, Any] | None:
    """Summarize the joint law and its optimum at a budget; notes get lines on outside optima."""
    if joint is None:
        return None
    cost = points.cost
    notes += warn_outside(points.take(fit_mask), joint)
    replicates = [joint.form.params(theta, *joint.scales) for theta in joint.replicates]
    a, b = exponents(joint.params, cost)
    exponent_samples = np.array([exponents(params, cost) for params in replicates]).reshape(-1, 2)
    bands = joint.bands | _widened_bands(
        joint.dof, a=(a, exponent_samples[:, 0]), b=(b, exponent_samples[:, 1])
    )
    held_out = ~fit_mask
    error = (
        curve_fit.rmse(joint, points.x[held_out], points.y[held_out]) if held_out.any() else None
    )
    budget = np.array([target_flops])
    samples = np.array([[v[0] for v in optimum(p, cost, budget)] for p in replicates]).reshape(
        -1, 3
    )
    best = [float(v[0]) for v in optimum(joint.params, cost, budget)]
    values = dict(zip(('N', 'D', 'loss'), zip(best, samples.T, strict=True), strict=True))
    target = {name: value for name, (value, _) in values.items()}
    return {
        **joint.identified_params,
        'a': a,
        'b': b,
        'bands': bands,
        'n_fit': joint.n_points,
        'n_holdout': int(held_out.sum()),
        'fit_rmse': joint.rmse,
        'holdout_rmse': error,
        'identified': not joint.warnings,
        'target': {'C': target_flops, **target, 'bands': _widened_bands(joint.dof, **values)},
    }


def _widened_bands(dof: float, **replicates: tuple[float, np.ndarray]) -> dict[str, list[float]]:
    """Compute widened bands of values from bootstrap samples; none for infinite samples."""
    return {
        name: curve_fit.widen_band(value, samples, dof)
        for name, (value, samples) in replicates.items()
        if len(samples) and np.isfinite(samples).all()
    }


def _bands(**replicates: tuple[float, np.ndarray]) -> dict[str, list[float]]:
    """Compute percentiles of bootstrap samples, extended to the value itself."""
    bands = {}
    for name, (value, samples) in replicates.items():
        if len(samples):
            low, high = np.quantile(samples, curve_fit.BAND)
            bands[name] = [float(min(low, value)), float(max(high, value))]
    return bands


def _summarize_optima(
    optima: isoflop.Optima,
    cost: Cost,
    target_flops: float,
    replicates: list[isoflop.Optima] | None,
    options: AnalysisOptions,
) -> dict[str, Any] | None:
    """Summarize a law through optima; None if it is missing, or in most of the replicates.

    Replicates are None without spare runs to draw them; then two budgets do not give a law.
    """
    few = len(optima.c) == 2 if replicates is None else 2 * len(replicates) < options.bootstrap
    if optima.exponent is None or few:
        return None
    redrawn = replicates or []
    slopes = np.array([replicate.exponent for replicate in redrawn])
    sizes = np.array([replicate.size(target_flops) for replicate in redrawn])
    a, n = optima.exponent, optima.size(target_flops)

    def data(sizes: np.ndarray) -> np.ndarray:
        return cost.data(sizes, np.full(len(sizes), target_flops))

    def share(slopes: np.ndarray | float) -> Any:
        return (1 - slopes * cost.p) / cost.q

    d = float(data(np.array([n]))[0])
    return {
        'a': a,
        'b': share(a),
        'bands': _bands(a=(a, slopes), b=(share(a), share(slopes))),
        'budgets': [
            dict(zip(('C', 'N', 'D', 'loss'), map(float, values), strict=True))
            for values in zip(
                optima.c, optima.n, cost.data(optima.n, optima.c), optima.loss, strict=True
            )
        ],
        'target': {
            'C': target_flops,
            'N': n,
            'D': d,
            'bands': _bands(N=(n, sizes), D=(d, data(sizes))),
        },
    }


def _draw_parabolas(
    runs: Points, level: np.ndarray, options: AnalysisOptions
) -> list[isoflop.Optima] | None:
    """Fit parabolas to redrawn points, with errors from their residuals or from seeds.

    None without spare points or seeds.
    """
    groups = isoflop.budgets(runs.n, runs.c)
    dof = sum(len(indices) - 3 for indices in groups)
    if not groups:
        return None
    indices_inside, counts = np.concatenate(groups), runs.seeds.counts
    weights = np.sqrt(counts / counts[indices_inside].mean())
    center = isoflop.evaluate_parabolas(runs.n, runs.c, level, weights)
    errors = (weights * np.log(level / center))[indices_inside]
    noise = pool_noise(errors, dof, runs.seeds.take(indices_inside))
    if noise.measured:
        pool = noise.std * stats.norm.ppf((np.arange(_QUANTILES) + 0.5) / _QUANTILES)
    elif dof:
        pool = errors * np.sqrt(len(indices_inside) / dof)
    else:
        return None

    def solve(y: np.ndarray) -> isoflop.Optima:
        return isoflop.parabolas(runs.n, runs.c, y, weights)[0]

    return _redraw(center, pool, options, solve, weights)


def _draw_frontiers(
    runs: Points, joint: curve_fit.Fit | None, measured: isoflop.Optima, options: AnalysisOptions
) -> list[isoflop.Optima] | None:
    """Draw frontiers of the joint law with noise, shifted to match the measured frontier.

    None without a joint law, or if it does not have a frontier.
    """
    if joint is None or measured.exponent is None:
        return None
    center = joint.predict(runs.x)
    pool = np.log(runs.y / center)
    clean, _ = isoflop.frontier(runs.n, runs.c, center)
    if clean.exponent is None:
        return None
    da, ds = measured.exponent - clean.exponent, measured.log_scale - clean.log_scale
    redrawn = _redraw(center, pool, options, lambda y: isoflop.frontier(runs.n, runs.c, y)[0])
    width, rng = isoflop.spacing(runs.n, runs.c), np.random.default_rng(1)
    return [
        dataclasses.replace(optima, exponent=optima.exponent + da, log_scale=optima.log_scale + ds)
        for optima in (isoflop.jitter(optima, width, rng) for optima in redrawn)
        if optima.exponent is not None
    ]


def _redraw(
    center: np.ndarray,
    pool: np.ndarray,
    options: AnalysisOptions,
    solve: Callable[[np.ndarray], isoflop.Optima],
    weights: np.ndarray | float = 1.0,
) -> list[isoflop.Optima]:
    rng = np.random.default_rng(0)
    pool = pool - pool.mean()
    samples = (rng.choice(pool, len(center)) / weights for _ in range(options.bootstrap))
    replicates = [solve(center * np.exp(errors)) for errors in samples]
    return [optima for optima in replicates if optima.exponent is not None]
