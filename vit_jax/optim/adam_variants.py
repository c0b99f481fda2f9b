"""Variants of Adam from `optax.contrib`, with decoupled decay by path and schedules of a run."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from optax import contrib

PyTree = Any
Mask = Callable[[Any], Any]


def adopt(
    learning_rate: optax.ScalarOrSchedule,
    weight_decay: optax.ScalarOrSchedule = 0.0,
    mask: Mask | None = None,
    *,
    b1: float = 0.9,
    b2: float = 0.9999,
    eps: float = 1e-6,
    clips: bool = True,
    mu_dtype: Any = None,
) -> optax.GradientTransformation:
    """ADOPT, which converges for any b2 (Taniguchi et al., 2024, arXiv:2411.02853).

    Gradients are divided by the second moment of the steps before, then averaged. The first step
    only initializes the second moment.

    Args:
      learning_rate: Number, or function of the number of previous updates.
      weight_decay: Strength of the decoupled decay.
      mask: Function from parameters to whether they decay; by default all do.
      b1, b2: Decay rates of the moments.
      eps: Smallest root of the second moment.
      clips: Whether to limit normalized gradients to t^0.25 at update t.
      mu_dtype: Dtype of the first moment; the parameters' dtype if None.
    """
    return optax.chain(
        contrib.scale_by_adopt(b1, b2, eps, mu_dtype, use_clipping=clips),
        optax.add_decayed_weights(weight_decay, mask),
        optax.scale_by_learning_rate(learning_rate),
    )


def ademamix(
    learning_rate: optax.ScalarOrSchedule,
    weight_decay: optax.ScalarOrSchedule = 0.0,
    mask: Mask | None = None,
    *,
    b1: float = 0.9,
    b2: float = 0.999,
    b3: float = 0.9999,
    alpha: float = 5.0,
    mix_steps: int = 0,
    eps: float = 1e-8,
    mu_dtype: Any = None,
) -> optax.GradientTransformation:
    """AdEMAMix: Adam with a second, slow average (Pagliardini et al., 2024, arXiv:2409.03137).

    Args:
      learning_rate: Number, or function of the number of previous updates.
      weight_decay: Strength of the decoupled decay.
      mask: Function from parameters to whether they decay; by default all do.
      b1, b2: Decay rates of Adam's moments.
      b3: Decay rate of the slow average.
      alpha: Weight of the slow average.
      mix_steps: Updates over which b3 grows from b1, linearly in the half-life, and alpha from 0;
        the authors take the whole run.
      eps: Number added to the denominator.
      mu_dtype: Dtype of the moments; the parameters' dtype if None.
    """

    def share(count: jax.Array) -> jax.Array:
        return jnp.minimum(count / max(mix_steps, 1), 1.0)

    def slow_decay(count: jax.Array) -> jax.Array:
        log_b1, log_b3, t = math.log(b1), math.log(b3), share(count)
        return jnp.exp(log_b1 * log_b3 / ((1 - t) * log_b3 + t * log_b1))

    moving = bool(mix_steps and b1 and b3)
    return optax.chain(
        contrib.scale_by_ademamix(
            *(b1, b2),
            slow_decay if moving else b3,
            (lambda count: alpha * share(count)) if moving else alpha,
            eps=eps,
            mu_dtype=mu_dtype,
        ),
        optax.add_decayed_weights(weight_decay, mask),
        optax.scale_by_learning_rate(learning_rate),
    )


def prodigy(
    learning_rate: optax.ScalarOrSchedule,
    weight_decay: optax.ScalarOrSchedule = 0.0,
    mask: Mask | None = None,
    *,
    b1: float = 0.9,
    b2: float = 0.999,
    b3: float | None = None,
    eps: float = 1e-8,
    d0: float = 1e-6,
    d_coef: float = 1.0,
    safeguard_warmup: bool = False,
) -> optax.GradientTransformation:
    """Prodigy: AdamW that estimates its rate (Mishchenko & Defazio, 2023, arXiv:2306.06101).

    `lr` multiplies the estimate, so use 1.0. The estimate is common to all parameters; with
    `decay_mults`, to those of one multiplier.

    Args:
      learning_rate: Number, or function of the number of previous updates.
      weight_decay: Strength of the decoupled decay.
      mask: Function from parameters to whether they decay; by default all do.
      b1, b2: Decay rates of the moments.
      b3: Decay rate of the estimate's sums; the root of b2 if None.
      eps: Number added to the denominator, in units of the estimate.
      d0: First estimate of the rate.
      d_coef: Factor of later estimates.
      safeguard_warmup: Whether to leave the schedule out of the estimate's denominator.
    """

    b3 = b2**0.5 if b3 is None else b3
    start = contrib.prodigy(1.0, (b1, b2), estim_lr0=d0).init

    def init(params: PyTree) -> tuple[optax.ScaleByScheduleState, contrib.ProdigyState]:
        return optax.ScaleByScheduleState(jnp.zeros([], jnp.int32)), start(params)

    def update(updates: PyTree, state: Any, params: PyTree = None) -> tuple[PyTree, Any]:
        (count,), before = state  # the count of the schedule is the run's step
        rate = learning_rate(count) if callable(learning_rate) else learning_rate
        strength = weight_decay(count) if callable(weight_decay) else weight_decay
        d, taken = before.estim_lr, before.count + 1
        step = d * rate * (1 - b2**taken) ** 0.5 / (1 - b1**taken)
        weight = d * (d if safeguard_warmup else step) / d0
        each = jax.tree.map
        m = each(lambda m, g: b1 * m + (1 - b1) * d * g, before.exp_avg, updates)
        v = each(lambda v, g: b2 * v + (1 - b2) * (d * g) ** 2, before.exp_avg_sq, updates)
        sums = each(lambda s, g: b3 * s + weight * g, before.grad_sum, updates)
        moved = optax.tree.vdot(updates, optax.tree.sub(before.params0, params))
        numerator = b3 * before.numerator_weighted + d / d0 * step * moved
        total = optax.tree.sum(each(jnp.abs, sums))
        # 0 / 0 where a warm-up begins at a rate of 0, or all gradients are 0.
        d = jnp.maximum(d, d_coef * numerator / jnp.where(total > 0, total, jnp.inf))
        decays = each(lambda _: True, params) if mask is None else mask(params)
        updates = each(
            lambda m, v, p, decayed: (
                -step * (m / (jnp.sqrt(v) + d * eps) + (strength * p if decayed else 0.0))
            ).astype(p.dtype),
            *(m, v, params, decays),
        )
        after = contrib.ProdigyState(m, v, sums, before.params0, d, numerator, taken)
        return updates, (optax.ScaleByScheduleState(count + 1), after)

    return optax.GradientTransformation(init, update)
