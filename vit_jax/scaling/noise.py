"""Noise of the points of a curve, from the residuals of a fit and from seeds, and draws of it."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import numpy as np
from scipy import optimize, special, stats

from vit_jax.scaling.seeds import Seeds

_CHANCE = 0.95  # quantile of the F distribution above which a form misses the points


@dataclasses.dataclass(frozen=True)
class Noise:
    """Noise of a fit.

    Attributes:
      deviation: of log y of a point with the mean number of runs.
      dof: degrees of freedom from seeds, besides those of the residuals.
      measured: whether seeds determined it.
      problem: a sentence if the form misses the points by more than seeds differ.
      shared: degrees of freedom from other curves.
    """

    deviation: float = 0.0
    dof: int = 0
    measured: bool = False
    problem: str = ''
    shared: float = 0.0


def pooled(residuals: np.ndarray, free: int, seeds: Seeds) -> Noise:
    """The noise from residuals of a fit and from seeds, pooled unless an F test tells them apart.

    Args:
      residuals: [N], weighted errors of the fit.
      free: points less parameters.
      seeds: of the points.
    """
    squares = float(np.sum(residuals**2))
    alone = np.sqrt(squares / max(free, 1))
    if not seeds.dof or not seeds.noise:
        return Noise(alone)
    between = seeds.noise / np.sqrt(seeds.counts.mean())
    if free > 0 and (alone / between) ** 2 > stats.f.ppf(_CHANCE, free, seeds.dof):
        return Noise(
            alone,
            problem=f'the form misses the points by {alone / between:.1f} times the noise between '
            'seeds: bands are those of its errors',
        )
    total = squares + seeds.dof * between**2
    return Noise(float(np.sqrt(total / (max(free, 0) + seeds.dof))), seeds.dof, True)


def common(variances: np.ndarray, dof: np.ndarray) -> tuple[float, float]:
    """The variance that curves have in common, and the degrees of freedom that it is worth.

    Empirical Bayes (Smyth 2004, section 6): the true variances are inverse gamma, with parameters
    from the moments of the logs of those measured. The more these differ, the less it is worth.

    Args:
      variances: [K], of the noise of log y, positive.
      dof: [K], of each, positive.
    """
    logs = np.log(variances) - special.digamma(dof / 2) + np.log(dof / 2)
    spread = float(np.var(logs, ddof=1) - np.mean(special.polygamma(1, dof / 2)))
    half = float(np.sum(dof)) / 2
    if spread > special.polygamma(1, half):
        half = optimize.brentq(lambda h: special.polygamma(1, h) - spread, 1e-3, half)
    return float(np.exp(logs.mean() + special.digamma(half)) / half), 2 * half


def draws(
    errors: np.ndarray, used: int, noise: Noise, rng: np.random.Generator
) -> Callable[[], np.ndarray]:
    """Draws of new errors [N]: Gaussian if seeds determined their size, else of the residuals.

    Residuals are drawn in moving blocks, as neighbors are correlated (Künsch 1989). A curve with p
    parameters fits n points more closely than the truth does, so they grow by sqrt(n / (n - p)).

    Args:
      errors: [N], weighted errors of the fit.
      used: p.
      noise: of the fit.
      rng: source of the draws.
    """
    n = len(errors)
    if noise.measured:
        return lambda: noise.deviation * rng.standard_normal(n)
    pool = errors * np.sqrt(n / max(n - used, 1))
    block = max(1, round(n ** (1 / 3)))

    def draw() -> np.ndarray:
        begins = rng.integers(0, n - block + 1, -(-n // block))
        chosen = (begins[:, None] + np.arange(block)).ravel()[:n]
        return pool[chosen] - pool.mean()

    return draw
