"""Laws of a loss curve under its learning rate, which predict the end of a run from its start.

`annealing`: L = L0 + A S1^-alpha - C S2 with the sum S1 of the rates so far, and the sum S2 of
their falls, each of which takes effect over about `memory` steps (Tissue et al. 2024,
arXiv:2408.11029). `multipower`: each fall takes effect as a power law of the rates summed since
(Luo et al. 2025, arXiv:2503.12811; here without its exponent gamma of the rate). All runs of a fit
share one law: the same model, data and batch under different schedules.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence

import numpy as np
from scipy import optimize, signal, stats

from vit_jax.errors import UserError

LAWS = ('annealing', 'multipower')
LEVEL = 0.9  # of intervals
EARLIEST = 0.05  # share of a run, from its first step, that no law is fitted to
FEWEST = 12  # points of a fit
FALLEN = 0.1  # fall of a rate, of its peak, below which a fit does not know its effect
DRIFT = 0.02  # standard deviation of log loss for each factor of e in S1 beyond the fit
FALL_ERROR = 0.2  # standard deviation of the effect of further falls, as a share of it
_PARTS = 200  # falls of a schedule are summed in this many parts
Shape = tuple[float, ...]  # logs of the parameters in which a law is not linear


@dataclasses.dataclass(frozen=True)
class LossCurve:
    """One run.

    Attributes:
      rates: Learning rate [T] of each step, up to the end of the schedule.
      steps: Numbers of steps [M] after which the loss was measured, ascending.
      loss: Losses [M], positive.
    """

    rates: np.ndarray
    steps: np.ndarray
    loss: np.ndarray

    def until(self, step: int) -> LossCurve:
        """Cut off the losses after a step."""
        is_before = self.steps <= step
        return dataclasses.replace(self, steps=self.steps[is_before], loss=self.loss[is_before])

    @property
    def settled(self) -> LossCurve:
        """The losses after the warm-up and the first steps."""
        first_settled = max(int(self.rates.argmax()), EARLIEST * len(self.rates))
        late = self.steps > first_settled
        return dataclasses.replace(self, steps=self.steps[late], loss=self.loss[late])

    def fallen(self, step: int) -> float:
        """Return how far the rate has fallen from its peak after a number of steps, as a share."""
        return 1 - float(self.rates[min(step, len(self.rates)) - 1] / self.rates.max())


@dataclasses.dataclass(frozen=True)
class CurveFit:
    """A fitted law.

    Attributes:
      law: One of `LAWS`.
      shape: See `Shape`.
      scales: (L0, A, C), all at least 0.
      unit: Sum of rates that counts as 1.
      curves: Curves that were fitted, without their first points.
      error: Root mean square of the relative errors.
    """

    law: str
    shape: Shape
    scales: np.ndarray
    unit: float
    curves: tuple[LossCurve, ...]
    error: float

    def predict(self, curve: LossCurve, steps: np.ndarray) -> np.ndarray:
        """Predict the losses [M] of a curve's schedule after numbers of steps [M]."""
        return _columns(self.law, self.shape, curve.rates, steps, self.unit) @ self.scales


def fit(curves: Sequence[LossCurve], law: str = LAWS[0]) -> CurveFit:
    """Fit a law to the losses of runs.

    Raises:
      UserError: There are too few losses.
    """
    settled = tuple(curve.settled for curve in curves)
    settled = tuple(curve for curve in settled if len(curve.steps))
    count = sum(len(curve.steps) for curve in settled)
    if count < FEWEST:
        raise UserError(
            f'{count} losses after the warm-up: a law of the curve needs {FEWEST}; log more often'
        )
    unit = max(float(curve.rates.sum()) for curve in settled)
    starts = [tuple(np.log(point)) for point in itertools.product(*_GRIDS[law])]
    ranked = sorted(starts, key=lambda shape: _solve(law, shape, settled, unit)[1])
    candidates = [_refine(law, shape, settled, unit) for shape in ranked[:3]]
    return min(candidates, key=lambda each: each.error)


def _refine(law: str, start: Shape, curves: tuple[LossCurve, ...], unit: float) -> CurveFit:
    grids = _GRIDS[law]
    bounds = [(np.log(min(grid)) - 1, np.log(max(grid)) + 1) for grid in grids]
    best = optimize.minimize(
        lambda shape: _solve(law, shape, curves, unit)[1],
        start,
        method='Nelder-Mead',
        bounds=bounds,
        options={'maxiter': 150, 'xatol': 1e-3, 'fatol': 1e-9},
    )
    scales, error = _solve(law, best.x, curves, unit)
    return CurveFit(law, tuple(best.x.tolist()), scales, unit, curves, error)


_GRIDS: dict[str, tuple[tuple[float, ...], ...]] = {
    # alpha; memory in steps
    'annealing': ((0.1, 0.2, 0.4, 0.8, 1.5), (3, 10, 30, 100, 300, 1000, 3000)),
    # alpha; rate at which a fall takes effect; its exponent
    'multipower': ((0.1, 0.2, 0.4, 0.8, 1.5), (3, 30, 300), (0.2, 0.6, 1.5)),
}


def _solve(
    law: str, shape: Sequence[float], curves: Sequence[LossCurve], unit: float
) -> tuple[np.ndarray, float]:
    """Return the scales (L0, A, C) for a shape, by least squares of relative errors, and their
    root mean square.
    """
    design = np.concatenate([_columns(law, shape, c.rates, c.steps, unit) for c in curves])
    loss = np.concatenate([curve.loss for curve in curves])
    scales, norm = optimize.nnls(design / loss[:, None], np.ones(len(loss)))
    return scales, float(norm / np.sqrt(len(loss)))


def _columns(
    law: str, shape: Sequence[float], rates: np.ndarray, steps: np.ndarray, unit: float
) -> np.ndarray:
    """Return the terms of a law after numbers of steps, [M 3]."""
    indices = np.asarray(steps, int) - 1
    total = np.cumsum(rates) / unit
    falls = np.maximum(-np.diff(rates, prepend=rates[0]), 0) / rates.max()
    alpha = np.exp(shape[0])
    if law == 'annealing':
        keep = np.exp(-1 / np.exp(shape[1]))
        effect = np.cumsum(signal.lfilter([1 - keep], [1, -keep], falls))[indices]
    else:
        segments = np.array_split(np.arange(len(rates)), min(_PARTS, len(rates)))
        ends = np.array([part[-1] for part in segments])
        fall = np.array([falls[part].sum() for part in segments])
        since = np.maximum(total[indices][:, None] - total[ends], 0) * np.exp(shape[1])
        effect = (1 - (1 + since) ** -np.exp(shape[2])) @ fall
    return np.column_stack([np.ones(len(indices)), total[indices] ** -alpha, -effect])


@dataclasses.dataclass(frozen=True)
class Prediction:
    """Loss at the end of a run.

    Attributes:
      value: Predicted loss.
      band: Ends of its interval.
      share: Share of the sum of its rates that the fit has seen.
      fit: Fit of the law.
    """

    value: float
    band: tuple[float, float]
    share: float
    fit: CurveFit


def predict_end(
    curve: LossCurve,
    others: Sequence[LossCurve] = (),
    law: str = LAWS[0],
    end: int | None = None,
    bootstrap: int = 40,
    seed: int = 0,
) -> Prediction:
    """Predict the loss at a step, or the end of a schedule, from the losses of this and other runs.

    The interval adds in quadrature a block bootstrap of the relative errors, their size, a drift
    beyond what was seen, and a share of the effect of falls that are still to come.

    Raises:
      UserError: There are too few losses, or the rate falls later but has not in any of them.
    """
    fitted = fit([curve, *others], law)
    end, last = end or len(curve.rates), int(curve.steps[-1])
    annealed = max(past_curve.fallen(int(past_curve.steps[-1])) for past_curve in fitted.curves)
    if curve.fallen(end) - curve.fallen(last) > FALLEN and annealed < FALLEN:
        raise UserError(
            f'the learning rate falls by {curve.fallen(end):.0%} of its peak after step {last}, '
            'and no loss shows its effect: add a run whose rate has fallen'
        )
    ends = np.array([last, end])
    terms = _columns(law, fitted.shape, curve.rates, ends, fitted.unit) * fitted.scales
    value = float(terms[1].sum())
    ratio = float(curve.rates[:end].sum() / curve.rates[:last].sum())
    spread = np.array(
        [
            np.std(_replicates(fitted, curve, end, bootstrap, seed)) / value if bootstrap else 0.0,
            fitted.error,
            DRIFT * np.log(ratio),
            FALL_ERROR * abs(terms[1, 2] - terms[0, 2]) / value,
        ]
    )
    points = sum(len(past_curve.steps) for past_curve in fitted.curves)
    half = stats.t.ppf((1 + LEVEL) / 2, points - 5) * np.linalg.norm(spread)
    band = (value * float(np.exp(-half)), value * float(np.exp(half)))
    return Prediction(value, band, 1 / ratio, fitted)


def _replicates(
    fit_result: CurveFit, curve: LossCurve, end: int, count: int, seed: int
) -> list[float]:
    """Predict a loss by fits to losses whose errors are drawn again, in blocks of neighbors."""
    rng, values = np.random.default_rng(seed), []
    fitted = [fit_result.predict(past_curve, past_curve.steps) for past_curve in fit_result.curves]
    errors = [
        past_curve.loss / y - 1 for past_curve, y in zip(fit_result.curves, fitted, strict=True)
    ]
    end_step = np.array([end])
    for _ in range(count):
        redrawn = tuple(
            dataclasses.replace(past_curve, loss=y * (1 + _draw_blocks(error, rng)))
            for past_curve, y, error in zip(fit_result.curves, fitted, errors, strict=True)
        )
        again = _refine(fit_result.law, fit_result.shape, redrawn, fit_result.unit)
        values.append(float(again.predict(curve, end_step)[0]))
    return values


def _draw_blocks(errors: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """Draw as many errors, in blocks of neighbors that wrap around."""
    length = max(1, round(len(errors) ** 0.5))
    starts = rng.integers(len(errors), size=-(-len(errors) // length))
    indices = (starts[:, None] + np.arange(length)).ravel()[: len(errors)]
    return errors[indices % len(errors)]
