"""Runs that differ in the seed alone: one point of a curve, with the noise that they measure."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np

from vit_jax.errors import UserError
from vit_jax.scaling.rows import Numbered, cell

SETTING = 'setting'  # column of `collect`: runs of one value differ in the seed alone


@dataclasses.dataclass(frozen=True)
class Seeds:
    """The runs behind the points of a curve.

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
    def deviations(self) -> np.ndarray:
        """Standard deviation [N] of log y of the runs of each point; 0 for one run."""
        return np.sqrt(self.squares / np.maximum(self.counts - 1, 1))

    @property
    def weights(self) -> np.ndarray:
        """Factors [N] of the errors of the means: square roots of the relative counts."""
        return np.sqrt(self.counts / self.counts.mean())

    def take(self, chosen: np.ndarray) -> Seeds:
        """Those of the chosen points, a mask or indices."""
        return Seeds(self.counts[chosen], self.squares[chosen])

    @property
    def words(self) -> str:
        """The repetitions and their noise as text; empty without any."""
        if not self.several:
            return ''
        points = int((self.counts > 1).sum())
        return (
            f'{int(self.counts.sum())} runs at {len(self.counts)} points, {points} with several '
            f'seeds, which differ by {100 * self.noise:.2g} % in y'
        )


def single(points: int) -> Seeds:
    """One run for each point."""
    return Seeds(np.ones(points), np.zeros(points))


def merge(log_y: np.ndarray, which: np.ndarray) -> tuple[np.ndarray, Seeds]:
    """Means of log y [N] and the runs behind them, for the place in [0, N) of each run [M]."""
    counts = np.bincount(which)
    mean = np.bincount(which, log_y) / counts
    return mean, Seeds(counts, np.bincount(which, (log_y - mean[which]) ** 2))


def centers(x: np.ndarray, which: np.ndarray) -> np.ndarray:
    """Geometric means [N, K] of x [M, K] over the runs of each point; exact where they agree."""
    first = x[np.unique(which, return_index=True)[1]]
    log_ratio = np.log(x / first[which])
    return first * np.exp([merge(column, which)[0] for column in log_ratio.T]).T


def points(group: Sequence[Numbered], x: np.ndarray, seed: str | None) -> np.ndarray:
    """The point of each row: rows of one setting, or those of one x if a column has the seeds.

    Args:
      group: the rows of a curve.
      x: [M, K], their x.
      seed: the column of seeds; None for `SETTING`, if the table has it.

    Returns:
      [M], places in the order in which the points first appear.

    Raises:
      UserError: for an unknown column, or rows of one x and one seed.
    """
    if seed is None:
        settings = [row.get(SETTING) or f'line {line}' for line, row in group]
        return places(settings)
    which = places([tuple(values) for values in x])
    seen: dict[tuple[int, str], int] = {}
    for (line, row), place in zip(group, which, strict=True):
        other = seen.setdefault((int(place), cell(row, seed, '--seed')), line)
        if other != line:
            raise UserError(
                f'lines {other} and {line} have the same x and the same {seed}: name what differs '
                'by --by, or leave one out'
            )
    return which


def places(keys: Sequence[object]) -> np.ndarray:
    """The number [M] of each key, in the order in which they first appear."""
    known: dict[object, int] = {}
    return np.array([known.setdefault(key, len(known)) for key in keys], int)
