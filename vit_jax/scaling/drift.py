"""Drift: how far optima beyond the runs move away from every law that was fitted to the runs.

The standard deviations were chosen on the isoFLOP studies of Chinchilla, Llama 3 and Marin
(tests/bench/optimal_bands.py). There the joint law misses N* by more than its own noise, to the
same side at all budgets; its distance to the parabolas, which assume no form, measures it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from scipy import stats

from vit_jax.scaling import curve_fit
from vit_jax.scaling.points import Cost

MEASURED = 30.0  # budget over the largest fitted one up to which bands were measured
SIZE_DRIFT = 0.20  # standard deviation of ln N* per factor of e in compute beyond the runs
LOSS_DRIFT = 0.012  # the same of ln loss
_ONSET = 2.0  # budget over the largest fitted one from which the distance to parabolas counts fully


def half_band(std: np.ndarray | float) -> np.ndarray:
    """Compute half a 90 % band of a Gaussian error."""
    return stats.norm.ppf(curve_fit.BAND[1]) * np.asarray(std)


def size_std(ratio: np.ndarray | float, gap: np.ndarray | float = 0.0) -> np.ndarray:
    """Compute the standard deviation of ln N* due to the drift.

    Args:
      ratio: Budget over the largest fitted one.
      gap: Distance in ln N* of the joint law to the parabolas; 0 for other methods.
    """
    beyond = np.log(np.maximum(ratio, 1.0))
    return np.hypot(SIZE_DRIFT * beyond, gap * np.minimum(beyond / np.log(_ONSET), 1.0))


def add_drift(
    laws_by_method: Mapping[str, dict[str, Any] | None], cost: Cost, ratio: float
) -> list[str]:
    """Widen the bands at the target by the drift; return a line on a distant target.

    Args:
      laws_by_method: {method: its law}, without values that are not identified.
      cost: Compute of a run.
      ratio: Target over the largest fitted budget.
    """
    for name, method_law in laws_by_method.items():
        if method_law is None:
            continue
        gap = _distance(method_law, laws_by_method.get('isoflop')) if name == 'joint' else 0.0
        size = float(size_std(ratio, gap))
        stds = {
            'N': size,
            'D': size * cost.p / cost.q,
            'loss': LOSS_DRIFT * np.log(max(ratio, 1.0)),
        }
        for prediction in filter(None, (method_law['target'], method_law.get('inference'))):
            if ratio > curve_fit.FARTHEST:
                prediction['bands'].clear()
            for key, band in prediction['bands'].items():
                if prediction[key] is not None:
                    drift = float(half_band(stds[key]))
                    prediction['bands'][key] = _widen_logs(prediction[key], band, drift)
    note = curve_fit.distance_note('the target budget', ratio, MEASURED)
    return [note] if note and any(laws_by_method.values()) else []


def _distance(method_law: Mapping[str, Any], other: Mapping[str, Any] | None) -> float:
    """Compute the distance in ln N* of two predictions; 0 if one is not identified."""
    sizes = [law['target']['N'] for law in (method_law, other) if law is not None]
    return abs(float(np.log(sizes[0] / sizes[1]))) if len(sizes) == 2 and all(sizes) else 0.0


def _widen_logs(value: float, band: list[float], drift: float) -> list[float]:
    """Add an independent error of half-width `drift`, in logs, to a band [low, high]."""
    low, high = band
    down = np.log(value / low) if low > 0 else np.inf
    return [
        float(value * np.exp(-np.hypot(down, drift))),
        float(value * np.exp(np.hypot(np.log(high / value), drift))),
    ]
