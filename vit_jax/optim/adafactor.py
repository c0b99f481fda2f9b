"""Adafactor as used to train large ViTs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax


def adafactor_zhai(
    learning_rate: optax.ScalarOrSchedule,
    weight_decay: float = 0.0,
    mask: Callable[[Any], Any] | None = None,
    *,
    decay_rate: float = 0.8,
    beta2_cap: float = 0.999,
    momentum: float | None = 0.9,
    dtype_momentum: Any = 'bfloat16',
    clipping_threshold: float | None = None,
    min_dim_size_to_factor: int = 32,
    eps: float = 1e-30,
) -> optax.GradientTransformation:
    """Adafactor as modified by Zhai et al., 2022, arXiv:2106.04560, section 3.5.

    At step t = 1, 2, ... with the gradient g and beta_t = min(beta2_cap, 1 - t^-decay_rate)

        v_t = beta_t v_(t-1) + (1 - beta_t) (g^2 + eps)
        m_t = momentum m_(t-1) + (1 - momentum) g / sqrt(v_t)
        x_t = x_(t-1) - lr(t - 1) (m_t + weight_decay x_(t-1))

    If the two longest axes of v have at least `min_dim_size_to_factor` entries, only its means r
    and c over these axes are stored, and v is r c' / mean(r), as in Shazeer & Stern, 2018,
    arXiv:1804.04235, algorithm 4. Neither moment is bias-corrected.

    `optax.adafactor` differs: it clips the update, lets beta_t approach 1, keeps a float32 momentum
    of updates that include the learning rate, and scales by the parameters' size.

    Args:
      learning_rate: Number, or function of the number of previous updates.
      weight_decay: Strength of the decoupled decay.
      mask: Function from parameters to whether they decay; by default all do.
      decay_rate: Exponent by which the memory of the second moment grows.
      beta2_cap: Largest beta_t; 0.999 averages over about 1,000 steps.
      momentum: Decay of the first moment, or None.
      dtype_momentum: Dtype of the first moment.
      clipping_threshold: Root mean square to which g / sqrt(v_t) is limited, parameter by
        parameter, before the momentum; None for no clipping.
      min_dim_size_to_factor: Smallest length of both axes of a factored second moment.
      eps: Number added to the squared gradient.
    """

    def beta(step: jax.Array, exponent: float) -> jax.Array:
        t = jnp.asarray(step, jnp.float32) + 1.0
        return jnp.minimum(beta2_cap, 1.0 - t**-exponent)

    return optax.chain(
        optax.scale_by_factored_rms(
            decay_rate=decay_rate,
            min_dim_size_to_factor=min_dim_size_to_factor,
            epsilon=eps,
            decay_rate_fn=beta,
        ),
        optax.identity()
        if clipping_threshold is None
        else optax.clip_by_block_rms(clipping_threshold),
        optax.identity()
        if momentum is None
        else optax.ema(momentum, debias=False, accumulator_dtype=jnp.dtype(dtype_momentum)),
        optax.add_decayed_weights(weight_decay, mask),
        optax.scale_by_learning_rate(learning_rate),
    )
