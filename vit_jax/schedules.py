"""Learning rate schedules: a linear warm-up, a shape, and a linear cooldown."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import optax

from vit_jax.errors import UserError, nearest

# (steps since the warm-up, steps from there to the end) -> share of peak - final
Shape = Callable[[Any, int], Any]


def make(
    name: str,
    *,
    peak: float,
    total_steps: int,
    warmup: int = 0,
    cooldown: int = 0,
    timescale: int | None = None,
    init: float = 0.0,
    final: float = 0.0,
) -> optax.Schedule:
    """The learning rate as a function of the number of updates already made.

    It rises linearly from `init` at step 0 to `peak` at step `warmup`, follows
    the shape, and over the last `cooldown` steps falls linearly to `final` from
    wherever the shape had brought it. Afterwards it stays where it is.

    Args:
      name: `constant`, `linear`, `cosine` or `rsqrt`. Linear and cosine reach
        `final` at `total_steps`. Reverse square root is
        peak * sqrt(timescale / (timescale + t - warmup)) (Zhai et al. 2022,
        "Scaling Vision Transformers", section 3.4), which a cooldown turns into
        a finished model from any step; with timescale = warmup it is the
        schedule of Vaswani et al. 2017, equation 3.
      peak: highest learning rate.
      total_steps: length of training, in steps.
      warmup: length of the warm-up, in steps.
      cooldown: length of the cooldown, in steps.
      timescale: of `rsqrt` only, in steps; 10,000 if not given.
      init: learning rate at step 0, if there is a warm-up.
      final: learning rate at `total_steps`, if anything decays to it.

    Raises:
      UserError: if a value is out of its range or means nothing for this shape.
    """
    if name not in SHAPES:
        raise UserError(nearest('schedule', name, SHAPES))
    _validate(name, peak, total_steps, warmup, cooldown, timescale, init, final)
    shape = SHAPES[name]
    if name == 'rsqrt':
        shape, floor = _rsqrt(timescale or 10_000), 0.0
    else:
        floor = final
    cooldown_start = total_steps - cooldown

    def schedule(step: Any) -> Any:
        t = jnp.clip(jnp.asarray(step, jnp.float32), 0, total_steps)
        elapsed = jnp.clip(t, warmup, cooldown_start) - warmup
        body = floor + (peak - floor) * shape(elapsed, max(total_steps - warmup, 1))
        rising = init + (peak - init) * t / max(warmup, 1)
        falling = final + (body - final) * (total_steps - t) / max(cooldown, 1)
        return jnp.where(t < warmup, rising, jnp.where(t > cooldown_start, falling, body))

    return schedule
