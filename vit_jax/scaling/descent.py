"""The search of a curve's parameters: an objective, and its lowest minimum from many starts."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import numpy as np
from scipy import optimize

from vit_jax.errors import UserError
from vit_jax.scaling.forms import Bounds, Form, Theta

DELTA = 1e-3  # Hoffmann et al. 2022, section 3.3
_SETTLE = 5  # descents from the best minimum until it counts as one


@dataclasses.dataclass(frozen=True)
class Objective:
    """The sum that a fit minimizes: Huber losses of errors, quadratic up to `delta`.

    Attributes:
      delta: in units of the errors; inf for least squares.
      log: whether errors are those of log y, or of y over its geometric mean.
    """

    delta: float = DELTA
    log: bool = True


LOG_HUBER = Objective()


def _loss(
    theta: Theta,
    form: Form,
    x: np.ndarray,
    log_y: np.ndarray,
    objective: Objective,
    weights: np.ndarray | float = 1.0,
) -> tuple[float, np.ndarray]:
    """The objective over its delta, if that is finite, and its gradient; weights [N] of errors."""
    fitted, jacobian = form.log_value(theta, x)
    errors = fitted - log_y
    if not objective.log:
        errors, jacobian = np.exp(fitted) - np.exp(log_y), np.exp(fitted)[:, None] * jacobian
    errors, jacobian = weights * errors, np.multiply(jacobian.T, weights).T
    if np.isinf(objective.delta):
        errors = errors / DELTA
        return float(np.sum(errors**2) / 2), errors @ jacobian / DELTA
    errors = errors / objective.delta
    clipped = np.clip(errors, -1, 1)
    return float(np.sum(clipped * (errors - clipped / 2))), clipped @ jacobian / objective.delta


def search(
    form: Form,
    x: np.ndarray,
    y: np.ndarray,
    starts: list[Theta],
    bounds: Bounds,
    objective: Objective = LOG_HUBER,
    settle: bool = True,
    weights: np.ndarray | float = 1.0,
) -> Theta:
    """The best of the local minima from all starts.

    Raises:
      UserError: if it has not converged, unless `settle` is off.
    """
    low, high = np.array(bounds).T
    descend = functools.partial(
        optimize.minimize,
        _loss,
        args=(form, x, np.log(y), objective, weights),
        jac=True,
        method='L-BFGS-B',
        bounds=bounds,
        options={'maxiter': 500},
    )
    found = [descend(np.clip(start, low, high)) for start in starts]
    best = min(found, key=lambda result: result.fun)
    return _settled(descend, best) if settle else best.x


def _settled(descend: Callable[[Theta], Any], best: Any) -> Theta:
    """The minimum, once another descent from it finds nothing lower."""
    for _ in range(_SETTLE):
        again = descend(best.x)
        if not np.isfinite(again.fun):
            break
        if again.fun >= best.fun * (1 - 1e-6) - 1e-9:
            return best.x
        best = again
    raise UserError('the fit did not converge; give more points, or a simpler form')
