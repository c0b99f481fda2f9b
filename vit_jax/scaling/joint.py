"""The joint law of model and data size, found by variable projection."""

from __future__ import annotations

import itertools

import numpy as np
from scipy import optimize

Theta = np.ndarray  # [5]: log A, alpha, log B, beta, E in scaled units
EXPONENTS = np.geomspace(0.03, 3.0, 12)  # of the grid from which the search starts
MIN_TERM = 1e-12


def value(theta: Theta, x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Log of E + A N^-alpha + B D^-beta [M] at x [M, 2], and its gradient [M, 5]."""
    log_a, alpha, log_b, beta, e = theta
    log_n, log_d = np.log(x).T
    model, data = np.exp(log_a - alpha * log_n), np.exp(log_b - beta * log_d)
    y = e + model + data
    gradient = np.stack([model, -model * log_n, data, -data * log_d, np.ones_like(y)], axis=1)
    return np.log(y), gradient / y[:, None]


def starts(x: np.ndarray, y: np.ndarray, count: int = 4) -> list[Theta]:
    """Minima of the relative squared error by variable projection (Golub and Pereyra 1973).

    For given exponents, E, A and B follow from non-negative least squares, so that only alpha and
    beta are searched: a problem of two variables instead of five, and a well-conditioned one. First
    come the refined minima in the order of their error, then the points of the grid they began at.
    """
    grid = sorted(itertools.product(EXPONENTS, EXPONENTS), key=lambda at: _error(at, x, y))
    apart: list[tuple[float, float]] = []
    for point in grid:
        if all(np.abs(np.log(np.divide(point, other))).max() > 1 for other in apart):
            apart.append(point)
    begins = [np.array(point) for point in apart[:count]]
    refined = sorted((_refine(at, x, y) for at in begins), key=lambda at: _error(at, x, y))
    minima: list[np.ndarray] = []
    for at in refined:
        if not any(np.allclose(at, other, rtol=1e-4) for other in minima):
            minima.append(at)
    return [_theta(at, x, y) for at in (*minima, *begins)]


def _refine(at: np.ndarray, x: np.ndarray, y: np.ndarray) -> np.ndarray:
    tight = {'xtol': 1e-14, 'ftol': 1e-14, 'gtol': 1e-14}
    bounds = ([1e-3, 1e-3], [5.0, 5.0])
    return optimize.least_squares(
        lambda exponents: _project(exponents, x, y)[1], at, bounds=bounds, max_nfev=60, **tight
    ).x


def _project(at: np.ndarray, x: np.ndarray, y: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The best (E, A, B) >= 0 for these exponents, and the relative errors [M]."""
    terms = np.stack([np.ones_like(y), x[:, 0] ** -at[0], x[:, 1] ** -at[1]], axis=1) / y[:, None]
    linear = optimize.nnls(terms, np.ones_like(y))[0]
    return linear, terms @ linear - 1


def _error(at: tuple[float, float] | np.ndarray, x: np.ndarray, y: np.ndarray) -> float:
    return float(np.sum(_project(np.asarray(at), x, y)[1] ** 2))


def _theta(at: np.ndarray, x: np.ndarray, y: np.ndarray) -> Theta:
    e, a, b = _project(at, x, y)[0]
    return np.array([np.log(max(a, MIN_TERM)), at[0], np.log(max(b, MIN_TERM)), at[1], e])


def bounds(x: np.ndarray, y: np.ndarray, largest: float) -> list[tuple[float, float]]:
    """Closed intervals for theta; `largest` is that of an exponent."""
    term, exponent = (-50.0, 50.0), (0.0, largest)
    return [term, exponent, term, exponent, (0.0, float(y.max()))]


def params(theta: Theta, x_scale: np.ndarray, y_scale: float) -> dict[str, float]:
    """The parameters in the units of the table."""
    log_a, alpha, log_b, beta, e = theta
    a, b = np.exp([log_a + alpha * np.log(x_scale[0]), log_b + beta * np.log(x_scale[1])]) * y_scale
    named = {'E': e * y_scale, 'A': a, 'alpha': alpha, 'B': b, 'beta': beta}
    return {name: float(number) for name, number in named.items()}
