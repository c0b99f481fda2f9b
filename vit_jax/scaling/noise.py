"""Noise of the points of a curve, estimated from seeds and residuals, and draws of it."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

import numpy as np
from scipy import optimize, special, stats

from vit_jax.errors import UserError
from vit_jax.scaling.rows import Numbered, read_cell

SETTING = 'setting'  # column of `collect`: runs with the same value differ only in the seed
_CHANCE = 0.95  # quantile of the F distribution above which a form does not fit


@dataclasses.dataclass(frozen=True)
class Seeds:
    """Repeated runs of the points of a curve.

    Attributes:
      counts: Number [N] of runs of each point.
      squares: Sum [N] of squared deviations of log y from its mean over these runs.
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
        """Standard deviation of log y between seeds, pooled over all points; 0 without seeds."""
        return float(np.sqrt(self.squares.sum() / max(self.dof, 1)))

    @property
    def stds(self) -> np.ndarray:
        """Standard deviation [N] of log y of the runs of each point; 0 for one run."""
        return np.sqrt(self.squares / np.maximum(self.counts - 1, 1))

    @property
    def weights(self) -> np.ndarray:
        """Factors [N] of the errors of the means: square roots of the relative counts."""
        return np.sqrt(self.counts / self.counts.mean())

    def take(self, indices: np.ndarray) -> Seeds:
        """Select the seeds of points, by a mask or indices."""
        return Seeds(self.counts[indices], self.squares[indices])

    @property
    def text(self) -> str:
        """Sentence on repeated runs and their noise; empty without repeated runs."""
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
      std: Standard deviation of log y of a point with the mean number of runs.
      dof: Degrees of freedom from seeds, in addition to the residuals' degrees.
      measured: Whether seeds determined it.
      problem: Sentence if the residuals are larger than the noise between seeds.
      shared: Degrees of freedom from other curves.
    """

    std: float = 0.0
    dof: int = 0
    measured: bool = False
    problem: str = ''
    shared: float = 0.0


def single_runs(points: int) -> Seeds:
    """Count one run for each point."""
    return Seeds(np.ones(points), np.zeros(points))


def point_indices(group: Sequence[Numbered], x: np.ndarray, seed: str | None) -> np.ndarray:
    """Assign each row to a point: one for each setting, or for each x if there is a seed column.

    Args:
      group: Rows of a curve.
      x: Their x [M, K].
      seed: Column of seeds; None for `SETTING`, if the table has it.

    Returns:
      Indices [M] of the points, in the order in which they first appear.

    Raises:
      UserError: A column is unknown, or rows share both x and seed.
    """
    if seed is None:
        settings = [row.get(SETTING) or f'line {line}' for line, row in group]
        return group_indices(settings)
    which = group_indices([tuple(values) for values in x])
    first_lines: dict[tuple[int, str], int] = {}
    for (line, row), index in zip(group, which, strict=True):
        other = first_lines.setdefault((int(index), read_cell(row, seed, '--seed')), line)
        if other != line:
            raise UserError(
                f'lines {other} and {line} have the same x and the same {seed}: give the column in '
                'which they differ as --by, or leave one out'
            )
    return which


def group_indices(keys: Sequence[object]) -> np.ndarray:
    """Number the distinct keys [M] in the order in which they first appear."""
    numbers: dict[object, int] = {}
    return np.array([numbers.setdefault(key, len(numbers)) for key in keys], int)


def merge_seeds(log_y: np.ndarray, which: np.ndarray) -> tuple[np.ndarray, Seeds]:
    """Average log y [N] over runs, with their seeds; `which` [M] is the point of each run."""
    counts = np.bincount(which)
    mean = np.bincount(which, log_y) / counts
    return mean, Seeds(counts, np.bincount(which, (log_y - mean[which]) ** 2))


def centers(x: np.ndarray, which: np.ndarray) -> np.ndarray:
    """Average x [M, K] geometrically over the runs of each point [N, K]; exact where equal."""
    first_rows = x[np.unique(which, return_index=True)[1]]
    log_ratio = np.log(x / first_rows[which])
    return first_rows * np.exp([merge_seeds(column, which)[0] for column in log_ratio.T]).T


def pool_noise(residuals: np.ndarray, free: int, seeds: Seeds) -> Noise:
    """Pool the noise of residuals and of seeds, unless an F test distinguishes them.

    Args:
      residuals: Weighted errors [N] of the fit.
      free: Number of points minus number of parameters.
      seeds: Seeds of the points.
    """
    squares = float(np.sum(residuals**2))
    residual_std = np.sqrt(squares / max(free, 1))
    if not seeds.dof or not seeds.noise:
        return Noise(residual_std)
    seed_std = seeds.noise / np.sqrt(seeds.counts.mean())
    if free > 0 and (residual_std / seed_std) ** 2 > stats.f.ppf(_CHANCE, free, seeds.dof):
        return Noise(
            residual_std,
            problem=f'the form misses the points by {residual_std / seed_std:.1f} times the noise '
            'between seeds: bands come from its errors',
        )
    total = squares + seeds.dof * seed_std**2
    return Noise(float(np.sqrt(total / (max(free, 0) + seeds.dof))), seeds.dof, True)


def common_variance(variances: np.ndarray, dof: np.ndarray) -> tuple[float, float]:
    """Estimate the common variance of several curves, and its prior degrees of freedom.

    Empirical Bayes (Smyth 2004, section 6): the true variances are inverse gamma, with parameters
    from the moments of the logs of the measured variances. The more these differ, the fewer
    degrees of freedom.

    Args:
      variances: Variances [K] of the noise of log y, positive.
      dof: Their degrees of freedom [K], positive.
    """
    logs = np.log(variances) - special.digamma(dof / 2) + np.log(dof / 2)
    spread = float(np.var(logs, ddof=1) - np.mean(special.polygamma(1, dof / 2)))
    half = float(np.sum(dof)) / 2
    if spread > special.polygamma(1, half):
        half = optimize.brentq(lambda h: special.polygamma(1, h) - spread, 1e-3, half)
    return float(np.exp(logs.mean() + special.digamma(half)) / half), 2 * half


def neighbor_correlation(errors: np.ndarray, used: float) -> float:
    """Estimate the correlation of neighboring errors [N] of log y, ascending in x.

    Errors of a fit with P parameters to N points are less correlated than the noise, by about
    P / N, which is added; 0 without errors.

    Args:
      errors: Errors of the fit.
      used: Number P of parameters.
    """
    if errors.std() < 1e-12:
        return 0.0
    r = np.corrcoef(errors[1:], errors[:-1])[0, 1] + used / len(errors)
    return float(np.nan_to_num(r))


def make_draws(
    errors: np.ndarray, used: int, noise: Noise, rng: np.random.Generator
) -> Callable[[], np.ndarray]:
    """Make a function that draws errors [N]: Gaussian if seeds measured the noise, else residuals.

    Neighbors are correlated, so residuals are drawn in moving blocks (Künsch 1989). A curve with p
    parameters fits n points more closely than the truth does, so they grow by sqrt(n / (n - p)).

    Args:
      errors: Weighted errors [N] of the fit.
      used: Number p of parameters.
      noise: Noise of the fit.
      rng: Source of the draws.
    """
    n = len(errors)
    if noise.measured:
        return lambda: noise.std * rng.standard_normal(n)
    pool = errors * np.sqrt(n / max(n - used, 1))
    block = max(1, round(n ** (1 / 3)))

    def draw() -> np.ndarray:
        begins = rng.integers(0, n - block + 1, -(-n // block))
        indices = (begins[:, None] + np.arange(block)).ravel()[:n]
        return pool[indices] - pool.mean()

    return draw


def make_wild_draws(
    errors: np.ndarray, jacobian: np.ndarray, rng: np.random.Generator
) -> Callable[[], np.ndarray]:
    """Make a function that draws errors [N]: the fit's errors with random signs (Wu 1986).

    Each error stays at its point, so the noise may depend on the size of the run. Points of
    leverage h attract the fit, so errors grow by 1 / (1 - h). Absolute errors let a curve with p
    parameters go through p of n points, so they also grow by sqrt(n / (n - p)).

    Args:
      errors: Weighted errors [N] of the fit.
      jacobian: Weighted Jacobian [N, p] of the fitted values.
      rng: Source of the draws.
    """
    n, p = jacobian.shape
    leverage = np.sum(np.linalg.qr(jacobian)[0] ** 2, axis=1)
    scaled = errors / np.maximum(1 - leverage, 0.1) * np.sqrt(n / max(n - p, 1))
    return lambda: scaled * rng.choice((-1.0, 1.0), n)
