"""Compute-optimal sizes: N*(C), D*(C) and the loss there, by three methods, with bands.

Hoffmann et al. 2022, section 3: the frontier of curves, parabolas at equal compute, and the joint
law L = E + A N^-alpha + B D^-beta. Parabolas are biased even without noise where alpha and beta
differ or the sizes do not lie around the optimum; the joint law is not.

No law holds exactly beyond the runs. On published isoFLOP studies the optimum drifts away from the
prediction of every method as the budget grows, so bands at larger budgets have a drift term.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from scipy import stats
from threadpoolctl import threadpool_limits

from vit_jax.errors import UserError
from vit_jax.scaling import curve_fit, isoflop
from vit_jax.scaling.contradictions import compare, has_vague_exponent, is_determined
from vit_jax.scaling.inference_cost import inference_summary
from vit_jax.scaling.joint import exponents, fit_joint, optimum, outside
from vit_jax.scaling.noise import pooled
from vit_jax.scaling.points import Cost, Points
from vit_jax.scaling.repeats import to_new_data

BIAS = (
    'parabolas are biased even without noise, N* by 3 to 19 % on synthetic laws, where alpha and '
    'beta differ or the sizes do not lie around the optimum'
)
_QUANTILES = 1000  # of the Gaussian that errors are drawn from
_SIZES = 3  # least number of different sizes of a law of the frontier
_VAGUE_LOSS = 1.5  # ratio of the ends of a 90 % interval of a loss that is not identified
MEASURED = 30.0  # budgets over the largest fitted one up to which bands were measured
_PAST = 1.05  # a budget above this times the largest fitted one lies beyond the runs
# Standard deviation of ln N*, and of ln loss, per factor of e in compute beyond the largest fitted
# budget: tests/bench/optimal_bands.py, on the isoFLOP studies of Chinchilla, Llama 3 and Marin.
DRIFT = {'joint': 0.30, 'isoflop': 0.20, 'frontier': 0.20}
LOSS_DRIFT = 0.012


@dataclasses.dataclass(frozen=True)
class AnalysisOptions:
    """Options of `analyze`.

    Attributes:
      target: a budget whose optimum is predicted; None for none.
      holdout: runs with more than 1 / holdout of the largest C are held out; 0 for none.
      bootstrap: replicates for the bands.
      served: data of inference over the model's life, in the unit of D; None to train alone.
    """

    target: float | None = None
    holdout: float = 0.0
    bootstrap: int = 100
    served: float | None = None


@dataclasses.dataclass(frozen=True)
class Analysis:
    """Optima of a group of runs.

    Attributes:
      points: all runs, ascending in C.
      kept: [M], whether a run was fitted.
      joint: the joint law; None if it cannot be fitted, `notes` has the reason.
      parabolas, frontier: their exponent is None if there are too few.
      summary: all results as JSON values; None for what is not identified.
      shown: the method whose prediction is shown, if they differ: a key of `summary`, or ''.
      notes: warnings, a line each.
    """

    points: Points
    kept: np.ndarray
    joint: curve_fit.Fit | None
    parabolas: isoflop.Optima
    frontier: isoflop.Optima
    summary: dict[str, Any]
    shown: str
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
        seen, _, repeats = to_new_data(seen, options.bootstrap)
        joint, notes = fit_joint(seen, options.bootstrap)
        level = _level(seen, joint, notes)
        parabolas, more = isoflop.parabolas(seen.n, seen.c, level, seen.seeds.weights)
        frontier, beyond = isoflop.frontier(seen.n, seen.c, seen.y)
        frontier = _of_several_sizes(frontier)
        at = options.target or float(seen.c.max())
        drawn = {
            'isoflop': _parabola_replicates(seen, level, options),
            'frontier': _frontier_replicates(seen, joint, frontier, options),
        }
        ways: dict[str, dict[str, Any] | None] = {
            'joint': _joint_summary(points, kept, joint, at, notes),
            'isoflop': _optima_summary(parabolas, seen.cost, at, drawn['isoflop'], options),
            'frontier': _optima_summary(frontier, seen.cost, at, drawn['frontier'], options),
        }
        notes += more + beyond + _missing(ways, parabolas, drawn)
        shown, against = compare(seen, level, ways, len(parabolas.c))
    notes += [*repeats, *against, *_unidentified(ways, beyond=at > _PAST * seen.c.max())]
    if options.served is not None:
        notes += _add_inference(ways['joint'], joint, seen, at, options.served)
    notes += _add_drift(ways, seen.cost, at / seen.c.max())
    if options.target is None:
        ways = {
            name: way and {k: way[k] for k in way if k != 'target'} for name, way in ways.items()
        }
    return Analysis(points, kept, joint, parabolas, frontier, ways, shown, (*points.notes, *notes))


def require_law(analyses: Sequence[Analysis]) -> None:
    """Raise UserError if no method gives a law for any curve."""
    if not any(any(a.summary.values()) for a in analyses):
        reasons = [note for note in analyses[0].notes if note.startswith('no ')]
        raise UserError(f'no law of the optimum can be fitted: {"; ".join(reasons)}')


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


def _of_several_sizes(found: isoflop.Optima) -> isoflop.Optima:
    """The frontier, without a law if too few sizes are best: any power law goes through two."""
    several = isoflop.distinct(found.n) >= _SIZES
    return found if several else dataclasses.replace(found, exponent=None)


def _missing(
    ways: dict[str, dict[str, Any] | None],
    parabolas: isoflop.Optima,
    drawn: dict[str, list[isoflop.Optima] | None],
) -> list[str]:
    """A line for each law that is missing, or through two budgets."""
    reasons = {
        'isoflop': 'needs two budgets with a minimum, each of three sizes or more',
        'frontier': f'fewer than {_SIZES} sizes are best at a budget, others than its extreme ones',
    }
    if parabolas.exponent is not None and drawn['isoflop'] is not None:
        reasons['isoflop'] = 'most redrawn runs have none'
    elif len(parabolas.c) == 2:
        reasons['isoflop'] = 'two budgets of three runs each, through which any power law goes'
    notes = [f'no {name} law: {reason}' for name, reason in reasons.items() if ways[name] is None]
    if ways['isoflop'] and len(parabolas.c) == 2:
        notes.append('isoflop: two budgets, through which any power law goes')
    return notes


def _unidentified(ways: dict[str, dict[str, Any] | None], beyond: bool) -> list[str]:
    """Replace values that the runs do not determine by None; a line for each.

    Args:
      ways: {method: its law}.
      beyond: whether the target lies beyond the runs, where N* needs the exponent.
    """
    notes = []
    for name, way in ways.items():
        if way is None:
            continue
        low, high = way['bands'].get('a', (way['a'], way['a']))
        vague = has_vague_exponent(way)
        if vague:
            notes.append(
                f'{name}: a and b are not identified: a is within {low:.2g} and {high:.2g}'
            )
            way['a'] = way['b'] = None
        target, spread = way['target'], way['target']['bands']
        open_ = [k for k in ('N', 'D', 'loss') if k in target and not _is_known(spread, k)]
        if set(open_) & {'N', 'D'}:
            open_ = ['N', 'D', *(k for k in open_ if k == 'loss')]
        elif vague and beyond:
            notes.append(
                f'{name}: no N* at C = {target["C"]:.3g}, beyond the runs: it needs the exponent'
            )
            target['N'] = target['D'] = None
        for key in open_:
            target[key] = None
            ends = ' to '.join(f'{end:.2g}' for end in spread.get(key, ())) or 'infinite values'
            start = f'{name}: {key} at C = {target["C"]:.3g} is not identified'
            notes.append(f'{start}: the runs allow {ends}')
    return notes


def _add_inference(
    way: dict[str, Any] | None, joint: curve_fit.Fit | None, seen: Points, at: float, served: float
) -> list[str]:
    """Add the cheapest model with inference to the joint law; return lines on its limits."""
    if way is None or way['target']['N'] is None or way['target']['loss'] is None:
        return ['no optimum with inference: it needs N* and the loss of the joint law']
    way['inference'], notes = inference_summary(joint, seen, at, served)
    return notes


def drift_half_width(std: float, ratio: np.ndarray | float) -> np.ndarray:
    """Half of a 90 % band of the drift at budgets `ratio` times the largest fitted one, in logs."""
    return stats.norm.ppf(curve_fit.BAND[1]) * std * np.log(np.maximum(ratio, 1.0))


def _add_drift(ways: dict[str, dict[str, Any] | None], cost: Cost, ratio: float) -> list[str]:
    """Widen the bands at the target by the drift; return a line on a target that is far away."""
    for name, way in ways.items():
        if way is None:
            continue
        target = way['target']
        if ratio > curve_fit.FARTHEST:
            for one in filter(None, (target, way.get('inference'))):
                one['bands'].clear()
        stds = {'N': DRIFT[name], 'D': DRIFT[name] * cost.p / cost.q, 'loss': LOSS_DRIFT}
        for one in filter(None, (target, way.get('inference'))):
            for key, band in one['bands'].items():
                if one[key] is not None:
                    drift = float(drift_half_width(stds[key], ratio))
                    one['bands'][key] = _widen_logs(one[key], band, drift)
    note = curve_fit.distance_note('the target budget', ratio, MEASURED)
    return [note] if note and any(ways.values()) else []


def _widen_logs(value: float, band: list[float], drift: float) -> list[float]:
    """A band [low, high] with an independent error of half-width `drift`, in logs, added."""
    low, high = band
    down = np.log(value / low) if low > 0 else np.inf
    return [
        float(value * np.exp(-np.hypot(down, drift))),
        float(value * np.exp(np.hypot(np.log(high / value), drift))),
    ]


def _is_known(bands: dict[str, list[float]], key: str) -> bool:
    """Whether the runs determine a value; without any replicates, it is taken as known."""
    band = bands.get(key)
    if key == 'loss' and band is not None and band[1] > _VAGUE_LOSS * band[0]:
        return False
    return is_determined(band) and (key in bands or not bands)


def _joint_summary(
    points: Points,
    kept: np.ndarray,
    joint: curve_fit.Fit | None,
    at: float,
    notes: list[str],
) -> dict[str, Any] | None:
    """The joint law, with its optimum at a budget; notes get a line on optima beyond the sizes."""
    if joint is None:
        return None
    cost = points.cost
    notes += outside(points.take(kept), joint)
    drawn = [joint.form.params(theta, *joint.scales) for theta in joint.replicates]
    a, b = exponents(joint.params, cost)
    both = np.array([exponents(params, cost) for params in drawn]).reshape(-1, 2)
    bands = joint.bands | _widened_bands(joint.dof, a=(a, both[:, 0]), b=(b, both[:, 1]))
    held = ~kept
    error = curve_fit.rmse(joint, points.x[held], points.y[held]) if held.any() else None
    budget = np.array([at])
    samples = np.array([[v[0] for v in optimum(p, cost, budget)] for p in drawn]).reshape(-1, 3)
    best = [float(v[0]) for v in optimum(joint.params, cost, budget)]
    values = dict(zip(('N', 'D', 'loss'), zip(best, samples.T, strict=True), strict=True))
    target = {name: value for name, (value, _) in values.items()}
    return {
        **joint.known,
        'a': a,
        'b': b,
        'bands': bands,
        'n_fit': joint.n_points,
        'n_holdout': int(held.sum()),
        'fit_rmse': joint.rmse,
        'holdout_rmse': error,
        'identified': not joint.warnings,
        'target': {'C': at, **target, 'bands': _widened_bands(joint.dof, **values)},
    }


def _widened_bands(dof: float, **drawn: tuple[float, np.ndarray]) -> dict[str, list[float]]:
    """Bands of values from bootstrap samples, widened as for the fit; none if one is infinite."""
    return {
        name: curve_fit.widened(value, samples, dof)
        for name, (value, samples) in drawn.items()
        if len(samples) and np.isfinite(samples).all()
    }


def _bands(**drawn: tuple[float, np.ndarray]) -> dict[str, list[float]]:
    """Percentiles of bootstrap samples, extended to the value itself."""
    found = {}
    for name, (value, samples) in drawn.items():
        if len(samples):
            low, high = np.quantile(samples, curve_fit.BAND)
            found[name] = [float(min(low, value)), float(max(high, value))]
    return found


def _optima_summary(
    found: isoflop.Optima,
    cost: Cost,
    at: float,
    replicates: list[isoflop.Optima] | None,
    options: AnalysisOptions,
) -> dict[str, Any] | None:
    """A law through optima at budgets; None if it is missing, or in most of the replicates.

    Replicates are None if there are no runs to spare to draw them; then two budgets give no law.
    """
    few = len(found.c) == 2 if replicates is None else 2 * len(replicates) < options.bootstrap
    if found.exponent is None or few:
        return None
    drawn = replicates or []
    slopes = np.array([one.exponent for one in drawn])
    sizes = np.array([one.size(at) for one in drawn])
    a, n = found.exponent, found.size(at)

    def data(sizes: np.ndarray) -> np.ndarray:
        return cost.data(sizes, np.full(len(sizes), at))

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
                found.c, found.n, cost.data(found.n, found.c), found.loss, strict=True
            )
        ],
        'target': {'C': at, 'N': n, 'D': d, 'bands': _bands(N=(n, sizes), D=(d, data(sizes)))},
    }


def _parabola_replicates(
    seen: Points, level: np.ndarray, options: AnalysisOptions
) -> list[isoflop.Optima] | None:
    """Parabolas through redrawn points, with errors from their residuals or from seeds.

    None without points to spare, or seeds.
    """
    groups = isoflop.budgets(seen.n, seen.c)
    free = sum(len(at) - 3 for at in groups)
    if not groups:
        return None
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
        return None

    def solve(y: np.ndarray) -> isoflop.Optima:
        return isoflop.parabolas(seen.n, seen.c, y, weights)[0]

    return _redrawn(center, pool, options, solve, weights)


def _frontier_replicates(
    seen: Points, joint: curve_fit.Fit | None, found: isoflop.Optima, options: AnalysisOptions
) -> list[isoflop.Optima] | None:
    """Frontiers of the joint law with noise, shifted to match the measured frontier without it.

    None without a joint law, or where it has no frontier.
    """
    if joint is None or found.exponent is None:
        return None
    center = joint.predict(seen.x)
    pool = np.log(seen.y / center)
    clean, _ = isoflop.frontier(seen.n, seen.c, center)
    if clean.exponent is None:
        return None
    da, ds = found.exponent - clean.exponent, found.log_scale - clean.log_scale
    drawn = _redrawn(center, pool, options, lambda y: isoflop.frontier(seen.n, seen.c, y)[0])
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
