"""Errors expected of a law's prediction, before any run: what seeds tell, and larger runs."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np

from vit_jax.scaling import forms

EXPONENT = 0.35  # of both laws
# Laws by their formula: the form, its parameters for x in units of the largest, where y is 1, and
# how many of these are fitted.
LAWS = {
    'a x^-b': ('power', (0.0, EXPONENT, 0.0, 0.0), 2),
    'a x^-b + c': ('irreducible', (np.log(0.5), EXPONENT, 0.5, 0.0), 3),
}
LEAST = 4  # different x that a design needs


@dataclasses.dataclass(frozen=True)
class Design:
    """Runs of which a law is to be fitted.

    Attributes:
      name: for tables.
      x: [N], different and ascending.
      counts: [N], runs with each x, which differ in the seed.
      cost: in units of x.
      errors: {law: standard deviation of the log of its prediction}, in units of that of log y of a
        run.
    """

    name: str
    x: np.ndarray
    counts: np.ndarray
    cost: float
    errors: dict[str, float]

    @property
    def runs(self) -> int:
        """Number of runs."""
        return int(self.counts.sum())


def error(law: str, x: np.ndarray, counts: np.ndarray, target: float, largest: float) -> float:
    """Standard deviation of the log of the prediction at a target, by linearization.

    Args:
      law: one of `LAWS`.
      x: [N], of the points.
      counts: [N], runs of each.
      target: where the law predicts.
      largest: the x at which the law is 1.
    """
    form, theta, used = LAWS[law]
    slopes = [
        forms.find(form).log_value(np.array(theta), at[:, None] / largest)[1][:, :used]
        for at in (x, np.array([target]))
    ]
    information = slopes[0].T @ (counts[:, None] * slopes[0])
    return float(np.sqrt(slopes[1][0] @ np.linalg.solve(information, slopes[1][0])))


def designs(flops: Sequence[float], seeds: int, target: float) -> list[Design]:
    """The planned runs, and others to compare with.

    Choshen et al. 2024 (arXiv:2410.11840) find that seeds vary so much that several small models
    can predict better than one large model.

    Args:
      flops: of each planned run.
      seeds: of each run, where runs are repeated.
      target: FLOPs at which the law predicts.

    Returns:
      As planned; more seeds of every run; of the smaller half of the sizes alone; and instead of
      the largest runs, as many seeds of the others as cost no more. Nothing for too few sizes.
    """
    x, counts = np.unique(np.asarray(flops, float), return_counts=True)
    if len(x) < LEAST:
        return []
    small = np.arange(len(x)) < len(x) // 2
    found = [('as planned', counts)]
    if seeds > 1:
        found += [
            (f'{seeds} seeds of each', seeds * counts),
            (f'{seeds} seeds of the smaller half', np.where(small, seeds * counts, counts)),
        ]
    spare = counts[-1] * x[-1]
    rest = np.append(counts[:-1], 0)
    times = 1 + int(spare // (rest @ x))
    if len(x) > LEAST and times > 1:
        found.append((f'without the largest, {times} seeds of the others', times * rest))
    return [_design(name, x, number, target) for name, number in found]


def _design(name: str, x: np.ndarray, counts: np.ndarray, target: float) -> Design:
    used = counts > 0
    expected = {law: error(law, x[used], counts[used], target, float(x[-1])) for law in LAWS}
    return Design(name, x[used], counts[used], float(counts @ x), expected)
