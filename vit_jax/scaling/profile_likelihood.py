"""Profile-likelihood bands: the range of all curves that fit nearly as well as the best one."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import numpy as np
from scipy import interpolate, optimize

from vit_jax.scaling.forms import Bounds, Form, Theta
from vit_jax.scaling.noise import neighbor_correlation

KNOTS = 8  # number of x values at which a band is computed, with interpolation between them
_STEPS = 10  # most steps of the search for an end of a band
_CLOSE = 0.02  # relative error at which the search stops
_HOLD = 30.0  # weight of the constraint on the prediction
_CORRELATED = 0.7  # upper limit on the correlation of neighboring errors
_FARTHEST = 3.0  # largest distance in log y, a factor of 20


@dataclasses.dataclass(frozen=True)
class FittedPoints:
    """Fitted points in scaled units.

    Attributes:
      x: X [N, K].
      log_y: Log y [N].
      weights: Weights [N] of the errors.
      bounds: Bounds of the parameters.
    """

    x: np.ndarray
    log_y: np.ndarray
    weights: np.ndarray
    bounds: Bounds


def band_offsets(
    form: Form, theta: Theta, points: FittedPoints, rise: float, X: np.ndarray
) -> np.ndarray:
    """Compute how far the log of the curve can move while squared errors grow by at most `rise`.

    The ends of the profile-likelihood interval of the prediction (Pawitan 2001, section 3.4; for
    Gaussian errors, `rise` is a squared quantile of Student's distribution times their variance),
    as distances from the least-squares curve.

    Args:
      form: Form of the curve.
      theta: Parameters [P] of the fit, where the search starts.
      points: Fitted points.
      rise: Growth of the sum of squared weighted errors, positive.
      X: X [M, K] in scaled units.

    Returns:
      Distances [2, M] down and up, both at least 0.
    """
    if X.shape[1] == 1 and len(X) > KNOTS:
        knots = np.geomspace(X.min(), X.max(), KNOTS)
        offsets = band_offsets(form, theta, points, rise, knots[:, None])
        # Monotone between the knots, without corners at them (Fritsch and Carlson 1980).
        return interpolate.PchipInterpolator(np.log(knots), offsets, axis=1)(np.log(X[:, 0]))
    search = _Search(form, points, rise, theta)
    return np.array([[search.distance(row[None], sign) for row in X] for sign in (-1, 1)])


def inflation(form: Form, theta: Theta, points: FittedPoints) -> float:
    """Compute how correlated errors of neighbors inflate the variance of a mean; at least 1.

    For an AR(1) process it is (1 + r) / (1 - r).
    """
    if points.x.shape[1] > 1:
        return 1.0
    errors = points.weights * (points.log_y - form.log_value(theta, points.x)[0])
    r = float(np.clip(neighbor_correlation(errors, len(form.names)), 0.0, _CORRELATED))
    return (1 + r) / (1 - r)


class _Search:
    """Search of least-squares fits with a constrained prediction."""

    def __init__(self, form: Form, points: FittedPoints, rise: float, theta: Theta) -> None:
        self.form, self.points, self.root = form, points, np.sqrt(rise)
        low, high = np.array(points.bounds, float).T
        self.free = low < high
        self.low, self.high = low[self.free], high[self.free]
        self.theta = np.clip(theta, low, high)
        self.best = self._solve(self.theta[self.free], self._errors, self._slopes)
        self.least = float(np.sum(self._errors(self.best) ** 2))
        slopes = self._slopes(self.best)
        self.covariance = np.linalg.pinv(slopes.T @ slopes, rcond=1e-10, hermitian=True)

    def distance(self, x: np.ndarray, sign: int) -> float:
        """Find the largest move of the log of the curve at one x [1, K], down (-1) or up (1).

        The root of the rise is close to linear in the move, so each step scales the move by the
        ratio of the wanted root to the current one, within the bracket of earlier moves.
        """
        start, slope = self._value(self.best, x), self._slope(self.best, x)
        move = self.root * float(np.sqrt(max(slope @ self.covariance @ slope, 1e-12)))
        inner, outside, inside_z = 0.0, _FARTHEST, self.best
        for _ in range(_STEPS):
            z = self._fit_constrained(inside_z, x, start + sign * move)
            new_move = sign * (self._value(z, x) - start)
            root = np.sqrt(max(float(np.sum(self._errors(z) ** 2)) - self.least, 0.0))
            if root <= self.root:
                inner, inside_z = max(inner, new_move), z
            else:
                outside = min(outside, new_move)
            if abs(root / self.root - 1) < _CLOSE:
                return max(new_move, 0.0)
            if outside - inner < _CLOSE * outside:
                break
            move = new_move * self.root / max(root, 0.25 * self.root)
            if not inner < move < outside:
                move = (inner + outside) / 2
        return max(inner, 0.0)

    def _fit_constrained(self, z: np.ndarray, x: np.ndarray, value: float) -> np.ndarray:
        """Find the best fit whose log curve at x is `value`."""

        def errors(z: np.ndarray) -> np.ndarray:
            return np.append(self._errors(z), _HOLD * (self._value(z, x) - value))

        def slopes(z: np.ndarray) -> np.ndarray:
            return np.vstack([self._slopes(z), _HOLD * self._slope(z, x)])

        return self._solve(z, errors, slopes)

    def _solve(
        self,
        z: np.ndarray,
        errors: Callable[[np.ndarray], np.ndarray],
        slopes: Callable[[np.ndarray], np.ndarray],
    ) -> np.ndarray:
        margin = 1e-9 * (self.high - self.low)
        start = np.clip(z, self.low + margin, self.high - margin)
        limits = (self.low, self.high)
        return optimize.least_squares(
            errors, start, slopes, bounds=limits, x_scale='jac', max_nfev=60
        ).x

    def _full(self, z: np.ndarray) -> Theta:
        theta = self.theta.copy()
        theta[self.free] = z
        return theta

    def _errors(self, z: np.ndarray) -> np.ndarray:
        fitted = self.form.log_value(self._full(z), self.points.x)[0]
        return self.points.weights * (fitted - self.points.log_y)

    def _slopes(self, z: np.ndarray) -> np.ndarray:
        jacobian = self.form.log_value(self._full(z), self.points.x)[1]
        return self.points.weights[:, None] * jacobian[:, self.free]

    def _value(self, z: np.ndarray, x: np.ndarray) -> float:
        return float(self.form.log_value(self._full(z), x)[0][0])

    def _slope(self, z: np.ndarray, x: np.ndarray) -> np.ndarray:
        return self.form.log_value(self._full(z), x)[1][0, self.free]
