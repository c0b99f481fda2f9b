"""Training beyond the compute optimum for models with much inference.

Sardana et al. 2023 (arXiv:2401.00448), equation 2: the size and data of a given loss at which
training and inference together cost least.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from scipy import optimize

from vit_jax.scaling import curve_fit
from vit_jax.scaling.joint import optimum
from vit_jax.scaling.points import Cost, Points

_FORWARD = 1 / 3  # share of the forward pass in the FLOPs of a training step
_SMALLEST = 1e-6  # least relative distance to the size that would need infinite data
_BEYOND = 1.2  # D / N over the largest one of the runs, above which a note is due


def cheapest(
    params: Mapping[str, float], cost: Cost, c: float, served: float
) -> dict[str, float] | None:
    """Find the cheapest model with the loss of the compute optimum at a training budget.

    Args:
      params: Parameters of the joint law.
      cost: FLOPs of training.
      c: Training budget.
      served: Data of inference over the model's life, in the unit of D.

    Returns:
      N, D, loss, training (its FLOPs), total (with inference) and saved (share of the compute
      optimum's total); None where the law does not have an optimum.
    """
    n, d, loss = (float(v[0]) for v in optimum(params, cost, np.array([c])))
    reducible = loss - params['E']
    if not (np.isfinite([n, d, loss]).all() and n > 0 and d > 0 and reducible > 0):
        return None
    least = (reducible / params['A']) ** (-1 / params['alpha'])

    def data(size: float) -> float:
        remaining_loss = reducible - params['A'] * size ** -params['alpha']
        return float((remaining_loss / params['B']) ** (-1 / params['beta']))

    def flops(size: float, data: float) -> float:
        return float(cost.k * size**cost.p * data**cost.q)

    def total(log_size: float) -> float:
        size = float(np.exp(log_size))
        return float(np.log(flops(size, data(size)) + _FORWARD * flops(size, served)))

    bounds = (np.log(least * (1 + _SMALLEST)), np.log(n))
    minimum = optimize.minimize_scalar(
        total, bounds=bounds, method='bounded', options={'xatol': 1e-7}
    )
    size = float(np.exp(minimum.x))
    before = flops(n, d) + _FORWARD * flops(n, served)
    after = float(np.exp(minimum.fun))
    training = flops(size, data(size))
    compute = {'training': training, 'total': after, 'saved': 1 - after / before}
    return {'N': size, 'D': data(size), 'loss': loss, **compute}


def summarize_inference(
    joint: curve_fit.Fit | None, runs: Points, c: float, served: float
) -> tuple[dict[str, Any] | None, list[str]]:
    """Find the cheapest model and its bands (None without a joint law), and lines on its limits."""
    best = None if joint is None else cheapest(joint.params, runs.cost, c, served)
    if joint is None or best is None:
        return None, ['no optimum with inference: it needs the joint law']
    replicates = [
        cheapest(joint.form.params(theta, *joint.scales), runs.cost, c, served)
        for theta in joint.replicates
    ]
    bands = {}
    if replicates and None not in replicates:
        for name in ('N', 'D'):
            values = np.array([model[name] for model in replicates if model is not None])
            bands[name] = curve_fit.widen_band(best[name], values, joint.dof)
    ratio, most = best['D'] / best['N'], float((runs.d / runs.n).max())
    notes = []
    if ratio > _BEYOND * most:
        notes.append(
            f'with inference, D / N is {ratio:.3g}; runs have up to {most:.3g}: train some there'
        )
    return {'C': c, 'served': served, **best, 'bands': bands}, notes
