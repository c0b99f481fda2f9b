"""Noise of the points of a curve, from seeds and from residuals of a fit, and draws of it."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

import numpy as np
from scipy import optimize, special, stats

from vit_jax.errors import UserError
from vit_jax.scaling.rows import Numbered, cell

SETTING = 'setting'  # column of `collect`: runs of one value differ in the seed alone
_CHANCE = 0.95  # quantile of the F distribution above which a form does not fit


@dataclasses.dataclass(frozen=True)
class Seeds:
    """Repeated runs of the points of a curve.

    Attributes:
      counts: [N], the number of runs of each point.
      squares: [N], the sum of squared deviations of log y from its mean over these runs.
    """

    counts: np.ndarray
    squares: np.ndarray

    @property
    def several(self) -> bool:
        """Whether any point has more than one run."""
        return bool((self.counts > 1).any())

    @property
    def dof(self) -> int:
        """Degrees of freedom of `noise`."""
        return int((self.counts - 1).sum())

    @property
    def noise(self) -> float:
        """Standard deviation of log y between seeds, pooled over all points; 0 without any."""
        return float(np.sqrt(self.squares.sum() / max(self.dof, 1)))

    @property
    def stds(self) -> np.ndarray:
        """Standard deviation [N] of log y of the runs of each point; 0 for one run."""
        return np.sqrt(self.squares / np.maximum(self.counts - 1, 1))

    @property
    def weights(self) -> np.ndarray:
        """Factors [N] of the errors of the means: square roots of the relative counts."""
        return np.sqrt(self.counts / self.counts.mean())

    def take(self, chosen: np.ndarray) -> Seeds:
        """The seeds of the chosen points, by a mask or indices."""
        return Seeds(self.counts[chosen], self.squares[chosen])

    @property
    def words(self) -> str:
        """A sentence on repeated runs and their noise; empty without any."""
        if not self.several:
            return ''
        points = int((self.counts > 1).sum())
        return (
            f'{int(self.counts.sum())} runs at {len(self.counts)} points, {points} with several '
            f'seeds, which differ by {100 * self.noise:.2g} % in y'
        )


@dataclasses.dataclass(frozen=True)
class Noise:
    """Noise of a fit.

    Attributes:
      std: standard deviation of log y of a point with the mean number of runs.
      dof: degrees of freedom from seeds, in addition to those of the residuals.
      measured: whether seeds determined it.
      problem: a sentence if the residuals are larger than the noise between seeds.
      shared: degrees of freedom from other curves.
    """

    std: float = 0.0
    dof: int = 0
    measured: bool = False
    problem: str = ''
    shared: float = 0.0


def one_run_each(points: int) -> Seeds:
    """One run for each point."""
    return Seeds(np.ones(points), np.zeros(points))


def point_indices(group: Sequence[Numbered], x: np.ndarray, seed: str | None) -> np.ndarray:
    """The point of each row: one for each setting, or for each x if a column has the seeds.

    Args:
      group: the rows of a curve.
      x: [M, K], their x.
      seed: the column of seeds; None for `SETTING`, if the table has it.

    Returns:
      [M], indices of the points, in the order in which they first appear.

    Raises:
      UserError: for an unknown column, or rows of one x and one seed.
    """
    if seed is None:
        settings = [row.get(SETTING) or f'line {line}' for line, row in group]
        return group_indices(settings)
    which = group_indices([tuple(values) for values in x])
    seen: dict[tuple[int, str], int] = {}
    for (line, row), index in zip(group, which, strict=True):
        other = seen.setdefault((int(index), cell(row, seed, '--seed')), line)
        if other != line:
            raise UserError(
                f'lines {other} and {line} have the same x and the same {seed}: name what differs '
                'by --by, or leave one out'
            )
    return which


def group_indices(keys: Sequence[object]) -> np.ndarray:
    """Number the distinct keys [M] in the order in which they first appear."""
    known: dict[object, int] = {}
    return np.array([known.setdefault(key, len(known)) for key in keys], int)


def merge(log_y: np.ndarray, which: np.ndarray) -> tuple[np.ndarray, Seeds]:
    """Means of log y [N] over runs, and their seeds; `which` [M] is the point of each run."""
    counts = np.bincount(which)
    mean = np.bincount(which, log_y) / counts
    return mean, Seeds(counts, np.bincount(which, (log_y - mean[which]) ** 2))


def centers(x: np.ndarray, which: np.ndarray) -> np.ndarray:
    """Geometric means [N, K] of x [M, K] over the runs of each point; exact where they agree."""
    first = x[np.unique(which, return_index=True)[1]]
    log_ratio = np.log(x / first[which])
    return first * np.exp([merge(column, which)[0] for column in log_ratio.T]).T


def pooled(residuals: np.ndarray, free: int, seeds: Seeds) -> Noise:
    """The noise from residuals and from seeds, pooled unless an F test distinguishes them.

    Args:
      residuals: [N], weighted errors of the fit.
      free: number of points less that of parameters.
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
    """The common variance of several curves, and its prior degrees of freedom.

    Empirical Bayes (Smyth 2004, section 6): the true variances are inverse gamma, with parameters
    from the moments of the logs of the measured ones. The more these differ, the fewer degrees of
    freedom.

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


def neighbor_correlation(errors: np.ndarray, used: float) -> float:
    """The correlation of neighboring errors [N] of log y, ascending in x.

    Errors of a fit with P parameters to N points are less correlated than the noise, by about
    P / N, which is added; 0 without errors.

    Args:
      errors: of the fit.
      used: P.
    """
    if errors.std() < 1e-12:
        return 0.0
    r = np.corrcoef(errors[1:], errors[:-1])[0, 1] + used / len(errors)
    return float(np.nan_to_num(r))


def draws(
    errors: np.ndarray, used: int, noise: Noise, rng: np.random.Generator
) -> Callable[[], np.ndarray]:
    """A function that draws errors [N]: Gaussian if seeds determined the noise, else residuals.

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
        return lambda: noise.std * rng.standard_normal(n)
    pool = errors * np.sqrt(n / max(n - used, 1))
    block = max(1, round(n ** (1 / 3)))

    def draw() -> np.ndarray:
        begins = rng.integers(0, n - block + 1, -(-n // block))
        chosen = (begins[:, None] + np.arange(block)).ravel()[:n]
        return pool[chosen] - pool.mean()

    return draw


def wild_draws(
    errors: np.ndarray, jacobian: np.ndarray, rng: np.random.Generator
) -> Callable[[], np.ndarray]:
    """A function that draws errors [N]: those of the fit with random signs (Wu 1986).

    Each stays at its point, so that small runs may be noisier than large ones, or less noisy. As a
    fit is drawn to points of leverage h, errors grow by 1 / (1 - h); as absolute errors let a curve
    with p parameters go through p of n points, by sqrt(n / (n - p)) too.

    Args:
      errors: [N], weighted errors of the fit.
      jacobian: [N, p], of the fitted values, likewise weighted.
      rng: source of the draws.
    """
    n, p = jacobian.shape
    leverage = np.sum(np.linalg.qr(jacobian)[0] ** 2, axis=1)
    grown = errors / np.maximum(1 - leverage, 0.1) * np.sqrt(n / max(n - p, 1))
    return lambda: grown * rng.choice((-1.0, 1.0), n)
