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

    def slow(count: jax.Array) -> jax.Array:
        first, last, t = math.log(b1), math.log(b3), share(count)
        return jnp.exp(first * last / ((1 - t) * last + t * first))

    moving = bool(mix_steps and b1 and b3)
    return optax.chain(
        contrib.scale_by_ademamix(
            *(b1, b2),
            slow if moving else b3,
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

    def inner(rate: Any) -> optax.GradientTransformation:
        return contrib.prodigy(rate, (b1, b2), b3, eps, d0, d_coef, 0.0, safeguard_warmup)

    def init(params: PyTree) -> tuple[optax.ScaleByScheduleState, contrib.ProdigyState]:
        return optax.ScaleByScheduleState(jnp.zeros([], jnp.int32)), inner(1.0).init(params)

    def update(updates: PyTree, state: Any, params: PyTree = None) -> tuple[PyTree, Any]:
        (count,), before = state  # the count of the schedule is the run's step
        rate = learning_rate(count) if callable(learning_rate) else learning_rate
        strength = weight_decay(count) if callable(weight_decay) else weight_decay
        taken = before.count + 1
        correction = (1 - b2**taken) ** 0.5 / (1 - b1**taken)
        decay = strength * rate * correction * before.estim_lr
        updates, after = inner(rate).update(updates, before, params)
        decays = jax.tree.map(lambda _: True, params) if mask is None else mask(params)
        updates = jax.tree.map(
            lambda u, p, m: u - (decay * p).astype(u.dtype) if m else u, updates, params, decays
        )
        return updates, (optax.ScaleByScheduleState(count + 1), after)

    return optax.GradientTransformation(init, update)
