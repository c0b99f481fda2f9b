"""Expected errors of N* in planned isoFLOP studies, by parabolas and by the joint law.

Plans assume a typical law whose optimum is at the middle of the planned sizes.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

import numpy as np
from scipy import stats

from vit_jax.scaling import curve_fit, forms, isoflop
from vit_jax.scaling.joint import optimum
from vit_jax.scaling.points import Cost

ALPHA, BETA = 0.34, 0.28  # Hoffmann et al. 2022, approach 3
IRREDUCIBLE = 0.5  # share of the smallest loss
SPAN = 4.0  # largest factor between a planned size and its budget's optimum
_STEP = 1e-5  # step of log y in derivatives
_DRAWS = 200  # simulated studies
COST = Cost()


@dataclasses.dataclass(frozen=True)
class StudyDesign:
    """Planned runs at equal compute.

    Attributes:
      name: Name in tables.
      n, c: Sizes and budgets [M] of different runs.
      counts: Number [M] of seeds of each run.
    """

    name: str
    n: np.ndarray
    c: np.ndarray
    counts: np.ndarray

    @property
    def runs(self) -> int:
        """Number of runs."""
        return int(self.counts.sum())

    @property
    def cost(self) -> float:
        """FLOPs of all runs, each trained from its first step."""
        return float(self.counts @ self.c)

    @property
    def x(self) -> np.ndarray:
        """N and D as columns [M, 2]."""
        return np.stack([self.n, COST.data(self.n, self.c)], axis=1)


@dataclasses.dataclass(frozen=True)
class ExpectedErrors:
    """Expected errors of ln N* at a target; None for a method without a law.

    Attributes:
      isoflop, joint: Standard errors by parabolas and by the joint law.
      bias: Bias of the parabolas without noise.
    """

    isoflop: float | None
    joint: float | None
    bias: float | None


def from_runs(name: str, sizes: Sequence[float], budgets: Sequence[float]) -> StudyDesign:
    """Make a design in which runs of equal size and budget are seeds."""
    runs = np.stack([sizes, budgets], axis=1).astype(float)
    different, counts = np.unique(runs, axis=0, return_counts=True)
    return StudyDesign(name, different[:, 0], different[:, 1], counts.astype(float))


def middle(design: StudyDesign) -> tuple[float, float]:
    """Find the geometric middle of the sizes at the middle budget, and this budget."""
    budgets = np.unique(design.c)
    c = float(budgets[len(budgets) // 2])
    n = np.log(design.n[design.c == c])
    return float(np.exp((n.min() + n.max()) / 2)), c


def alternatives(design: StudyDesign, seeds: int, best: tuple[float, float]) -> list[StudyDesign]:
    """List the design, one with more seeds, and one with its sizes around each budget's optimum."""
    designs = [design]
    if seeds > 1:
        designs.append(
            dataclasses.replace(design, name=f'{seeds} seeds', counts=seeds * design.counts)
        )
    law, centered = typical_law(design, best), design.n.copy()
    for c in np.unique(design.c):
        indices = np.flatnonzero(design.c == c)
        center = float(optimum(law, COST, np.array([c]))[0][0])
        centered[indices] = center * np.geomspace(1 / SPAN, SPAN, len(indices))
    name = f'sizes within {SPAN:g}x of each optimum'
    return [*designs, dataclasses.replace(design, name=name, n=centered)]


def typical_law(design: StudyDesign, best: tuple[float, float]) -> dict[str, float]:
    """Make a joint law with its optimum at `best` (N*, C), and loss 1 at the largest budget."""
    n, c = best
    largest = float(design.c.max())
    a = BETA / (ALPHA + BETA)
    size = n * (largest / c) ** a
    data = float(COST.data(np.array([size]), np.array([largest]))[0])
    reducible = 1 - IRREDUCIBLE
    return {
        'E': IRREDUCIBLE,
        'A': reducible * a * size**ALPHA,
        'alpha': ALPHA,
        'B': reducible * (1 - a) * data**BETA,
        'beta': BETA,
    }


def expected_errors(
    design: StudyDesign, target: float, noise: float, best: tuple[float, float]
) -> ExpectedErrors:
    """Simulate parabolas on the typical law, and linearize the joint law around it.

    Args:
      design: Planned runs.
      target: FLOPs at which N* is predicted.
      noise: Standard deviation of log y between runs.
      best: N* and its budget.
    """
    law = typical_law(design, best)
    y = predict(law, design.x)
    truth = float(np.log(optimum(law, COST, np.array([target]))[0][0]))
    clean = _parabola_size(design, target, np.log(y))
    if clean is None:
        return ExpectedErrors(None, _joint_error(design, law, target, noise), None)
    by_parabolas = _simulate_parabolas(design, target, noise, np.log(y))
    return ExpectedErrors(by_parabolas, _joint_error(design, law, target, noise), clean - truth)


def predict(law: dict[str, float], x: np.ndarray) -> np.ndarray:
    """Predict the losses [M] of a joint law at N and D [M, 2]."""
    n, d = x.T
    return law['E'] + law['A'] * n ** -law['alpha'] + law['B'] * d ** -law['beta']


def _parabola_size(design: StudyDesign, target: float, log_y: np.ndarray) -> float | None:
    weights = np.sqrt(design.counts / design.counts.mean())
    optima, _ = isoflop.parabolas(design.n, design.c, np.exp(log_y), weights)
    return None if optima.exponent is None else float(np.log(optima.size(target)))


def _simulate_parabolas(
    design: StudyDesign, target: float, noise: float, log_y: np.ndarray
) -> float | None:
    """Compute the spread of ln N* by parabolas over noisy studies; None if most have no law.

    A linear expansion is a third too small where noise moves minima far.
    """
    rng, spread = np.random.default_rng(0), noise / np.sqrt(design.counts)
    draws = rng.standard_normal((_DRAWS, len(log_y)))
    sizes = [_parabola_size(design, target, log_y + spread * errors) for errors in draws]
    identified = [size for size in sizes if size is not None]
    return float(np.std(identified)) if len(identified) > _DRAWS / 2 else None


def _gradient(value: Callable[[np.ndarray], float | None], center: np.ndarray) -> np.ndarray | None:
    """Compute central differences [M] of a function of log y; None where it is not defined."""
    moved = [
        [value(center + sign * step) for sign in (1, -1)] for step in _STEP * np.eye(len(center))
    ]
    if any(result is None for pair in moved for result in pair):
        return None
    up, down = np.array(moved, float).T
    return (up - down) / (2 * _STEP)


def _joint_error(
    design: StudyDesign, law: dict[str, float], target: float, noise: float
) -> float | None:
    """Compute the standard error of ln N* by the joint law; None if runs do not determine it."""
    form = forms.find_form('joint')
    theta = np.array([np.log(law['A']), ALPHA, np.log(law['B']), BETA, law['E']])
    slopes = form.log_value(theta, design.x)[1]
    information = slopes.T @ (design.counts[:, None] * slopes)
    scale = np.sqrt(np.diag(information))
    scaled = information / np.outer(scale, scale)
    if len(design.n) < len(theta) + 1 or np.linalg.cond(scaled) > 1e12:
        return None

    def size(values: np.ndarray) -> float:
        named = {'A': np.exp(values[0]), 'B': np.exp(values[2]), 'alpha': values[1]}
        optima = optimum({**law, **named, 'beta': values[3]}, COST, np.array([target]))
        return float(np.log(optima[0][0]))

    direction = _gradient(size, theta)
    assert direction is not None
    direction = direction / scale
    variance = float(direction @ np.linalg.solve(scaled, direction))
    return noise * float(np.sqrt(variance * _huber_variance(noise)))


def _huber_variance(noise: float) -> float:
    """Compute the variance of Huber's estimator for Gaussian noise, relative to least squares.

    Huber 1964: E[psi^2] / E[psi']^2; pi / 2 where the noise is much larger than delta.
    """
    k = curve_fit.DELTA / noise
    share_inside = 2 * stats.norm.cdf(k) - 1
    squares = share_inside - 2 * k * stats.norm.pdf(k) + k**2 * (1 - share_inside)
    return float(squares / share_inside**2)


def seeds_for(error: float, precision: float) -> int:
    """Compute the least number of seeds of each run that brings a standard error to a precision."""
    return max(1, int(np.ceil((error / precision) ** 2)))
