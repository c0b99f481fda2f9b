"""Doubts about a fit: too few points, no bend, parameters that the points do not determine."""

from __future__ import annotations

import numpy as np

from vit_jax.scaling.forms import Bounds, Form, Theta

_WIDE = 0.5  # a parameter with a relative 90 % half-interval above this is not identified


def lines(
    form: Form,
    theta: Theta,
    bounds: Bounds,
    residuals: np.ndarray,
    jacobian: np.ndarray,
    replicates: np.ndarray,
    scales: tuple[np.ndarray, float],
) -> tuple[str, ...]:
    """A line for each doubt about the fit."""
    warnings = []
    if len(residuals) < 2 * len(form.names):
        warnings.append(
            f'too few points: {len(residuals)} for {len(form.names)} parameters; '
            'the curve fits them under any law'
        )
    free = [i for i, (low, high) in enumerate(bounds) if low < high]
    edge = [i for i in free if np.min(np.abs(theta[i] - np.array(bounds[i]))) < 1e-9]
    values = form.params(theta, *scales)
    errors = _standard_errors(theta, residuals, jacobian, [i for i in free if i not in edge])
    for name, i in form.interpreted.items():
        if i in edge:
            warnings.append(_at_edge(name, values[name], bool(theta[i] <= bounds[i][0] + 1e-9)))
        elif (error := _half_interval(theta, i, errors, replicates)) > _WIDE * abs(theta[i]):
            warnings.append(
                f'{name} = {values[name]:.3g} is not identified: the points allow '
                f'+- {100 * error / max(abs(theta[i]), 1e-12):.0f} %'
            )
    return tuple(warnings)


def _at_edge(name: str, value: float, lower: bool) -> str:
    if lower and name in ('c', 'E'):
        return f'no bend: {name} = 0, the points show no irreducible error'
    if lower:
        return (
            f'{name} = {value:.3g}: y does not fall as x grows, so that there is no law to follow'
        )
    return f'{name} = {value:.3g} is the limit of the search: the points do not determine it'


def _standard_errors(
    theta: Theta, residuals: np.ndarray, jacobian: np.ndarray, free: list[int]
) -> np.ndarray:
    """Standard errors [P] by linearization; zero for parameters that are not fitted."""
    errors = np.zeros(len(theta))
    noise = np.sum(residuals**2) / max(len(residuals) - len(free), 1)
    covariance = np.linalg.pinv(jacobian[:, free].T @ jacobian[:, free], hermitian=True)
    errors[free] = np.sqrt(np.maximum(np.diag(covariance), 0) * noise)
    return errors


def _half_interval(theta: Theta, i: int, errors: np.ndarray, replicates: np.ndarray) -> float:
    """Half the width of the 90 % interval: the wider of linearization and bootstrap."""
    linear = 1.645 * errors[i]
    if not len(replicates):
        return float(linear)
    low, high = np.quantile(replicates[:, i], (0.05, 0.95))
    return float(max(linear, (high - low) / 2))
