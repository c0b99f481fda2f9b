"""Training beyond the compute optimum for a model that is used much.

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

_FORWARD = 1 / 3  # of the FLOPs of a forward and a backward pass
_SMALLEST = 1e-6  # relative distance from the size whose loss no data reach
_BEYOND = 1.2  # times the largest D / N of the runs, above which it is named


def cheapest(
    params: Mapping[str, float], cost: Cost, c: float, served: float
) -> dict[str, float] | None:
    """The cheapest model with the loss of the optimum at a training budget.

    Args:
      params: of the joint law.
      cost: FLOPs of training.
      c: the training budget.
      served: data of inference over the model's life, in the unit of D.

    Returns:
      N, D, loss, training (its FLOPs), total (with inference) and saved (the share of the total of
      the compute optimum); None where the law has no optimum.
    """
    n, d, loss = (float(v[0]) for v in optimum(params, cost, np.array([c])))
    room = loss - params['E']
    if not (np.isfinite([n, d, loss]).all() and n > 0 and d > 0 and room > 0):
        return None
    least = (room / params['A']) ** (-1 / params['alpha'])

    def data(size: float) -> float:
        left = room - params['A'] * size ** -params['alpha']
        return float((left / params['B']) ** (-1 / params['beta']))

    def flops(size: float, data: float) -> float:
        return float(cost.k * size**cost.p * data**cost.q)

    def total(log_size: float) -> float:
        size = float(np.exp(log_size))
        return float(np.log(flops(size, data(size)) + _FORWARD * flops(size, served)))

    bounds = (np.log(least * (1 + _SMALLEST)), np.log(n))
    found = optimize.minimize_scalar(
        total, bounds=bounds, method='bounded', options={'xatol': 1e-7}
    )
    size = float(np.exp(found.x))
    before = flops(n, d) + _FORWARD * flops(n, served)
    after = float(np.exp(found.fun))
    training = flops(size, data(size))
    both = {'training': training, 'total': after, 'saved': 1 - after / before}
    return {'N': size, 'D': data(size), 'loss': loss, **both}


def inference_summary(
    joint: curve_fit.Fit | None, seen: Points, c: float, served: float
) -> tuple[dict[str, Any] | None, list[str]]:
    """The cheapest model with its bands, None without a joint law; and lines on its limits."""
    best = None if joint is None else cheapest(joint.params, seen.cost, c, served)
    if joint is None or best is None:
        return None, ['no optimum with inference: it needs the joint law']
    drawn = [
        cheapest(joint.form.params(theta, *joint.scales), seen.cost, c, served)
        for theta in joint.replicates
    ]
    bands = {}
    if drawn and None not in drawn:
        for name in ('N', 'D'):
            values = np.array([one[name] for one in drawn if one is not None])
            bands[name] = curve_fit.widened(best[name], values, joint.dof)
    ratio, most = best['D'] / best['N'], float((seen.d / seen.n).max())
    notes = []
    if ratio > _BEYOND * most:
        notes.append(
            f'with inference, D / N is {ratio:.3g}; runs have up to {most:.3g}: train some there'
        )
    return {'C': c, 'served': served, **best, 'bands': bands}, notes
