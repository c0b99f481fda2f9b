"""Optimal model sizes without a joint law: parabolas at equal compute, and frontiers."""

from __future__ import annotations

import dataclasses

import numpy as np
from numpy.polynomial import Polynomial

GAPS = tuple(np.log([1.1, 1.05, 1.02, 1.005]))  # between neighbors of one budget
SPREAD = np.log(1.3)  # of all runs of one budget
ALIKE = np.log(1.02)  # ratio of values that count as equal
_GRID = 60  # budgets at which curves are compared
_CURVE = 5  # least number of points of a curve
_FLAT = 1e-9  # relative rise of a parabola that may be rounding
_Curve = tuple[float, np.ndarray, np.ndarray]  # size, log C ascending, log y


@dataclasses.dataclass(frozen=True)
class Optima:
    """Best model sizes at several budgets, and the power law through them.

    Attributes:
      c, n, loss: [K], of each budget.
      points: [K], number of runs or curves at each budget.
      exponent, log_scale: log n = log_scale + exponent log c; None for fewer than two budgets.
    """

    c: np.ndarray
    n: np.ndarray
    loss: np.ndarray
    points: np.ndarray
    exponent: float | None = None
    log_scale: float = 0.0

    def size(self, c: float) -> float:
        """N* at a budget."""
        assert self.exponent is not None
        return float(np.exp(self.log_scale + self.exponent * np.log(c)))


def clusters(log_values: np.ndarray, gap: float) -> np.ndarray:
    """The number [M] of the group of each value; neighbors at most `gap` apart share one."""
    order = np.argsort(log_values, kind='stable')
    starts = np.diff(log_values[order], prepend=log_values[order][0]) > gap
    found = np.empty(len(order), int)
    found[order] = np.cumsum(starts)
    return found


def leveled(c: np.ndarray) -> np.ndarray:
    """C [M], with values less than 2 % apart replaced by their mean."""
    found, groups = c.copy(), clusters(np.log(c), ALIKE)
    for at in (groups == group for group in np.unique(groups)):
        if np.ptp(np.log(c[at])) <= ALIKE:
            found[at] = np.exp(np.log(c[at]).mean())
    return found


def budgets(n: np.ndarray, c: np.ndarray) -> list[np.ndarray]:
    """Indices of the runs of each budget with three sizes or more, ascending in C.

    Where budgets are too close to one another, smaller gaps separate them.
    """
    found: list[np.ndarray] = []
    left = np.arange(len(n))
    for gap in GAPS:
        groups = clusters(np.log(c[left]), gap)
        parts = [left[groups == group] for group in np.unique(groups)]
        found += [at for at in parts if _is_budget(n[at], c[at])]
        left = np.setdiff1d(left, np.concatenate([*found, np.empty(0, int)]))
        if not len(left):
            break
    return sorted(found, key=lambda at: float(c[at].mean()))


def _is_budget(n: np.ndarray, c: np.ndarray) -> bool:
    sizes = len(np.unique(clusters(np.log(n), ALIKE)))
    return bool(np.ptp(np.log(c)) <= SPREAD and sizes > 2)


def parabolas(
    n: np.ndarray, c: np.ndarray, y: np.ndarray, weights: np.ndarray
) -> tuple[Optima, list[str]]:
    """Hoffmann et al. 2022, approach 2: the minimum over log N of a parabola through each budget.

    Args:
      n, c, y: [M], of the runs.
      weights: [M], of their errors.

    Returns:
      The optima, and a line for each budget without a minimum between its extreme sizes.
    """
    found, notes = [], []
    for at in budgets(n, c):
        budget = float(np.exp(np.log(c[at]).mean()))
        minimum = _vertex(n[at], parabola(n[at], y[at], weights[at]))
        if minimum is None:
            notes.append(f'C = {budget:.3g}: no minimum between its smallest and largest N')
        else:
            found.append((budget, np.exp(minimum[0]), minimum[1], len(at)))
    return _through(found), notes


def parabola(n: np.ndarray, y: np.ndarray, weights: np.ndarray) -> Polynomial:
    """The parabola of y over log N, by least squares of weighted errors."""
    return Polynomial.fit(np.log(n), y, 2, w=weights)


def fitted(n: np.ndarray, c: np.ndarray, y: np.ndarray, weights: np.ndarray) -> np.ndarray:
    """The values of the parabolas at the points [M]; y where there is none."""
    values = y.copy()
    for at in budgets(n, c):
        values[at] = parabola(n[at], y[at], weights[at])(np.log(n[at]))
    return values


def _vertex(n: np.ndarray, curve: Polynomial) -> tuple[float, float] | None:
    """Log N and y at the minimum; None without one between the sizes."""
    if curve.coef[2] <= _FLAT * abs(curve.coef[0]):  # its rise from the middle to an end
        return None
    at = float(curve.deriv().roots()[0])
    return (at, float(curve(at))) if np.log(n.min()) <= at <= np.log(n.max()) else None


def frontier(n: np.ndarray, c: np.ndarray, y: np.ndarray) -> tuple[Optima, list[str]]:
    """Hoffmann et al. 2022, approach 1: the size that is best at each budget.

    With three sizes or more of five points each, the lowest of their curves, log y over log C, at
    60 budgets; otherwise the lowest of all sizes at the budgets of the runs. A budget counts if
    three sizes or more span it. Where the smallest or the largest of these is best, the optimum
    lies beyond, and the budget is left out.

    Returns:
      The optima, and a line on the budgets that were left out.
    """
    sizes, level = clusters(np.log(n), ALIKE), _budget_means(n, c)
    chosen = [sizes == i for i in np.unique(sizes)]
    curves = [_curve(n, c, y, at) for at in chosen]
    curves = [curve for curve in curves if len(curve[1]) >= _CURVE]
    if len(curves) >= 3:
        grid = np.linspace(np.log(c.min()), np.log(c.max()), _GRID)
    else:
        curves, grid = [_curve(n, level, y, at) for at in chosen], np.unique(np.log(level))
    found, beyond = [], [0, 0]
    for at in grid:
        there = _losses(curves, at)
        if len(there) < 3:
            continue
        best = int(np.argmin([log_y for log_y, _ in there]))
        if best in (0, len(there) - 1):
            beyond[int(best > 0)] += 1
        else:
            log_y, size = there[best]
            found.append((float(np.exp(at)), size, float(np.exp(log_y)), len(there)))
    notes = [
        f'frontier: the {name} size is best at {count} of {sum(beyond) + len(found)} budgets: '
        'their optimum lies beyond, and they are left out'
        for name, count in zip(('smallest', 'largest'), beyond, strict=True)
        if count
    ]
    return _through(found if distinct(np.array([one[1] for one in found])) > 1 else []), notes


def distinct(n: np.ndarray) -> int:
    """The number of different sizes, which are more than 2 % apart."""
    return len(np.unique(clusters(np.log(n), ALIKE))) if len(n) else 0


def pareto_frontier(x: np.ndarray, y: np.ndarray) -> np.ndarray:
    """Mask [N] of the Pareto frontier: points with a lower y than all points of smaller or equal x.

    Membership depends only on points of smaller or equal x.
    """
    order = np.lexsort((y, x))
    best = np.minimum.accumulate(np.concatenate([[np.inf], y[order]]))[:-1]
    kept = np.zeros(len(y), bool)
    kept[order] = y[order] < best
    return kept


def _budget_means(n: np.ndarray, c: np.ndarray) -> np.ndarray:
    """C [M], replaced by the mean of its budget."""
    level = c.copy()
    for at in budgets(n, c):
        level[at] = np.exp(np.log(c[at]).mean())
    return level


def spacing(n: np.ndarray, c: np.ndarray) -> float:
    """The median ratio, as a logarithm, between neighboring sizes of a budget, or of all runs."""
    groups = budgets(n, c) or [np.arange(len(n))]
    gaps = np.concatenate([np.diff(np.sort(np.log(n[at]))) for at in groups])
    gaps = gaps[gaps > ALIKE]
    return float(np.median(gaps)) if len(gaps) else 0.0


def jittered(found: Optima, width: float, rng: np.random.Generator) -> Optima:
    """The law with each log N moved by up to half a width, the distance of the sizes tried."""
    moved = found.n * np.exp(width * rng.uniform(-0.5, 0.5, len(found.n)))
    slope, scale = np.polyfit(np.log(found.c), np.log(moved), 1)
    return dataclasses.replace(found, n=moved, exponent=float(slope), log_scale=float(scale))


def _losses(curves: list[_Curve], log_c: float) -> list[tuple[float, float]]:
    """Log y and size of each curve that spans a budget, ascending in size."""
    return [(np.interp(log_c, x, log_y), size) for size, x, log_y in curves if _spans(x, log_c)]


def _curve(n: np.ndarray, c: np.ndarray, y: np.ndarray, chosen: np.ndarray) -> _Curve:
    """Size, log C ascending, and the mean of log y at each C, of the points of one size."""
    different, which = np.unique(c[chosen], return_inverse=True)
    log_y = np.bincount(which, np.log(y[chosen])) / np.bincount(which)
    return float(np.exp(np.log(n[chosen]).mean())), np.log(different), log_y


def _spans(x: np.ndarray, at: float) -> bool:
    return bool(x[0] <= at <= x[-1])


def _through(found: list[tuple[float, float, float, int]]) -> Optima:
    c, n, loss, points = np.array(found).T if found else np.empty((4, 0))
    if len(c) < 2:
        return Optima(c, n, loss, points.astype(int))
    slope, scale = np.polyfit(np.log(c), np.log(n), 1)
    return Optima(c, n, loss, points.astype(int), float(slope), float(scale))
