"""Optimal model sizes without a joint law: parabolas at equal compute, and frontiers."""

from __future__ import annotations

import dataclasses

import numpy as np
from numpy.polynomial import Polynomial

GAPS = tuple(np.log([1.1, 1.05, 1.02, 1.005]))  # largest ratios between neighbors in a budget
SPREAD = np.log(1.3)  # largest ratio between runs in a budget
ALIKE = np.log(1.02)  # largest ratio of values that count as equal
_GRID = 60  # number of budgets at which curves are compared
_CURVE = 5  # least number of points of a curve
_FLAT = 1e-9  # relative rise of a parabola that may be a rounding error
_Curve = tuple[float, np.ndarray, np.ndarray]  # size, log C ascending, log y


@dataclasses.dataclass(frozen=True)
class Optima:
    """Best model sizes at several budgets, and the power law through them.

    Attributes:
      c, n, loss: Compute, best size and its loss [K] at each budget.
      points: Number [K] of runs or curves at each budget.
      exponent, log_scale: Log n = log_scale + exponent log c; None for fewer than two budgets.
    """

    c: np.ndarray
    n: np.ndarray
    loss: np.ndarray
    points: np.ndarray
    exponent: float | None = None
    log_scale: float = 0.0

    def size(self, c: float) -> float:
        """Predict N* at a budget."""
        assert self.exponent is not None
        return float(np.exp(self.log_scale + self.exponent * np.log(c)))


def label_clusters(log_values: np.ndarray, gap: float) -> np.ndarray:
    """Number the group [M] of each value; neighbors at most `gap` apart share a group."""
    order = np.argsort(log_values, kind='stable')
    starts = np.diff(log_values[order], prepend=log_values[order][0]) > gap
    groups = np.empty(len(order), int)
    groups[order] = np.cumsum(starts)
    return groups


def merge_close(c: np.ndarray) -> np.ndarray:
    """Replace values of C [M] less than 2 % apart by their mean."""
    level, groups = c.copy(), label_clusters(np.log(c), ALIKE)
    for indices in (groups == group for group in np.unique(groups)):
        if np.ptp(np.log(c[indices])) <= ALIKE:
            level[indices] = np.exp(np.log(c[indices]).mean())
    return level


def budgets(n: np.ndarray, c: np.ndarray) -> list[np.ndarray]:
    """Index the runs of each budget with three sizes or more, ascending in C.

    Smaller gaps separate budgets that are too close to one another.
    """
    indices: list[np.ndarray] = []
    remaining = np.arange(len(n))
    for gap in GAPS:
        groups = label_clusters(np.log(c[remaining]), gap)
        candidates = [remaining[groups == group] for group in np.unique(groups)]
        indices += [
            indices_of_budget
            for indices_of_budget in candidates
            if _is_budget(n[indices_of_budget], c[indices_of_budget])
        ]
        remaining = np.setdiff1d(remaining, np.concatenate([*indices, np.empty(0, int)]))
        if not len(remaining):
            break
    return sorted(indices, key=lambda indices_of_budget: float(c[indices_of_budget].mean()))


def _is_budget(n: np.ndarray, c: np.ndarray) -> bool:
    sizes = len(np.unique(label_clusters(np.log(n), ALIKE)))
    return bool(np.ptp(np.log(c)) <= SPREAD and sizes > 2)


def parabolas(
    n: np.ndarray, c: np.ndarray, y: np.ndarray, weights: np.ndarray
) -> tuple[Optima, list[str]]:
    """Minimize a parabola over log N at each budget (Hoffmann et al. 2022, approach 2).

    Args:
      n, c, y: Size, compute and loss [M] of the runs.
      weights: Weights [M] of their errors.

    Returns:
      Optima, and a line for each budget without a minimum between its extreme sizes.
    """
    minima, notes = [], []
    for indices in budgets(n, c):
        budget = float(np.exp(np.log(c[indices]).mean()))
        minimum = _vertex(n[indices], parabola(n[indices], y[indices], weights[indices]))
        if minimum is None:
            notes.append(f'C = {budget:.3g}: no minimum between its smallest and largest N')
        else:
            minima.append((budget, np.exp(minimum[0]), minimum[1], len(indices)))
    return _fit_optima(minima), notes


def parabola(n: np.ndarray, y: np.ndarray, weights: np.ndarray) -> Polynomial:
    """Fit a parabola of y over log N, by least squares of weighted errors."""
    return Polynomial.fit(np.log(n), y, 2, w=weights)


def evaluate_parabolas(
    n: np.ndarray, c: np.ndarray, y: np.ndarray, weights: np.ndarray
) -> np.ndarray:
    """Evaluate the parabolas at the points [M]; y where there is none."""
    values = y.copy()
    for indices in budgets(n, c):
        values[indices] = parabola(n[indices], y[indices], weights[indices])(np.log(n[indices]))
    return values


def _vertex(n: np.ndarray, curve: Polynomial) -> tuple[float, float] | None:
    """Find log N and y at the minimum; None if it is not between the sizes."""
    if curve.coef[2] <= _FLAT * abs(curve.coef[0]):  # its rise from the middle to an end
        return None
    position = float(curve.deriv().roots()[0])
    return (
        (position, float(curve(position)))
        if np.log(n.min()) <= position <= np.log(n.max())
        else None
    )


def frontier(n: np.ndarray, c: np.ndarray, y: np.ndarray) -> tuple[Optima, list[str]]:
    """Find the best size at each budget (Hoffmann et al. 2022, approach 1).

    With three sizes or more of five points each, the lowest of their curves, log y over log C, is
    taken at 60 budgets; otherwise the lowest of all sizes at the budgets of the runs. A budget
    counts if three sizes or more span it. If the smallest or the largest of them is best, the
    optimum is outside, and the budget is left out.

    Returns:
      Optima, and a line on the budgets left out.
    """
    sizes, level = label_clusters(np.log(n), ALIKE), _budget_means(n, c)
    indices_by_size = [sizes == i for i in np.unique(sizes)]
    curves = [_curve(n, c, y, item) for item in indices_by_size]
    curves = [curve for curve in curves if len(curve[1]) >= _CURVE]
    if len(curves) >= 3:
        grid = np.linspace(np.log(c.min()), np.log(c.max()), _GRID)
    else:
        curves, grid = (
            [_curve(n, level, y, item) for item in indices_by_size],
            np.unique(np.log(level)),
        )
    optima, beyond = [], [0, 0]
    for item in grid:
        losses = _losses(curves, item)
        if len(losses) < 3:
            continue
        best = int(np.argmin([log_y for log_y, _ in losses]))
        if best in (0, len(losses) - 1):
            beyond[int(best > 0)] += 1
        else:
            log_y, size = losses[best]
            optima.append((float(np.exp(item)), size, float(np.exp(log_y)), len(losses)))
    notes = [
        f'frontier: the {name} size is best at {count} of {sum(beyond) + len(optima)} budgets: '
        'their optimum lies beyond, and they are left out'
        for name, count in zip(('smallest', 'largest'), beyond, strict=True)
        if count
    ]
    return _fit_optima(
        optima if count_distinct(np.array([optimum[1] for optimum in optima])) > 1 else []
    ), notes


def count_distinct(n: np.ndarray) -> int:
    """Count the sizes that are more than 2 % apart."""
    return len(np.unique(label_clusters(np.log(n), ALIKE))) if len(n) else 0


def pareto_frontier(x: np.ndarray, y: np.ndarray) -> np.ndarray:
    """Mask the Pareto frontier [N]: points with a lower y than all points of smaller or equal x.

    Membership depends only on points of smaller or equal x.
    """
    order = np.lexsort((y, x))
    best = np.minimum.accumulate(np.concatenate([[np.inf], y[order]]))[:-1]
    mask = np.zeros(len(y), bool)
    mask[order] = y[order] < best
    return mask


def _budget_means(n: np.ndarray, c: np.ndarray) -> np.ndarray:
    """Replace C [M] by the mean of its budget."""
    level = c.copy()
    for indices in budgets(n, c):
        level[indices] = np.exp(np.log(c[indices]).mean())
    return level


def spacing(n: np.ndarray, c: np.ndarray) -> float:
    """Compute the median log ratio between neighboring sizes of a budget, or of all runs."""
    groups = budgets(n, c) or [np.arange(len(n))]
    gaps = np.concatenate([np.diff(np.sort(np.log(n[indices]))) for indices in groups])
    gaps = gaps[gaps > ALIKE]
    return float(np.median(gaps)) if len(gaps) else 0.0


def jitter(optima: Optima, width: float, rng: np.random.Generator) -> Optima:
    """Move each log N of a law by up to half a width, the distance between the sizes tried."""
    moved = optima.n * np.exp(width * rng.uniform(-0.5, 0.5, len(optima.n)))
    slope, scale = np.polyfit(np.log(optima.c), np.log(moved), 1)
    return dataclasses.replace(optima, n=moved, exponent=float(slope), log_scale=float(scale))


def _losses(curves: list[_Curve], log_c: float) -> list[tuple[float, float]]:
    """Evaluate each curve that spans a budget: log y and size, ascending in size."""
    return [(np.interp(log_c, x, log_y), size) for size, x, log_y in curves if _spans(x, log_c)]


def _curve(n: np.ndarray, c: np.ndarray, y: np.ndarray, indices: np.ndarray) -> _Curve:
    """Build the curve of one size: size, log C ascending, and the mean of log y at each C."""
    different, which = np.unique(c[indices], return_inverse=True)
    log_y = np.bincount(which, np.log(y[indices])) / np.bincount(which)
    return float(np.exp(np.log(n[indices]).mean())), np.log(different), log_y


def _spans(x: np.ndarray, position: float) -> bool:
    return bool(x[0] <= position <= x[-1])


def _fit_optima(optima: list[tuple[float, float, float, int]]) -> Optima:
    c, n, loss, points = np.array(optima).T if optima else np.empty((4, 0))
    if len(c) < 2:
        return Optima(c, n, loss, points.astype(int))
    slope, scale = np.polyfit(np.log(c), np.log(n), 1)
    return Optima(c, n, loss, points.astype(int), float(slope), float(scale))
