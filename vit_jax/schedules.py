"""Learning rate schedules: a linear warm-up, a shape, and a linear cooldown."""

from __future__ import annotations

import math
from typing import Any

import jax.numpy as jnp
import optax

from vit_jax.errors import UserError, nearest


def make(
    name: str,
    *,
    peak: float,
    total_steps: int,
    warmup: int = 0,
    cooldown: int = 0,
    timescale: int = 10_000,
    init: float = 0.0,
    final: float = 0.0,
) -> optax.Schedule:
    """The learning rate as a function of the number of updates already made.

    It rises linearly from `init` at step 0 to `peak` at step `warmup`, follows
    its shape, and in the last `cooldown` steps falls linearly to `final` from
    wherever the shape had brought it. Beyond `total_steps` it stays put.

    Args:
      name: `constant`; `linear` or `cosine`, which reach `final` at
        `total_steps`; or `rsqrt`, the reciprocal square root
        peak * sqrt(timescale / (timescale + steps since the warm-up)), which
        with a cooldown gives a finished model at any length (Zhai et al. 2022,
        "Scaling Vision Transformers", section 3.4) and with timescale = warmup
        is Vaswani et al. 2017, equation 3.
      peak: the highest learning rate.
      total_steps: length of training.
      warmup: length of the warm-up, in steps.
      cooldown: length of the cooldown, in steps.
      timescale: of `rsqrt`, in steps.
      init: learning rate at step 0, if there is a warm-up.
      final: learning rate at `total_steps`, if anything decays to it.

    Raises:
      UserError: for an unknown name or a value outside its range.
    """
    if name not in _SHAPES:
        raise UserError(nearest('schedule', name, _SHAPES))
    _validate(total_steps, warmup, cooldown, timescale)
    for what, rate in (('lr', peak), ('init', init), ('final', final)):
        if not math.isfinite(rate) or rate < 0:
            raise UserError(f'schedule {name!r}: {what}={rate} must be finite and at least 0')
    if final and not cooldown and name in ('constant', 'rsqrt'):
        raise UserError(f'schedule {name!r} reaches final={final} only with a cooldown; set one')
    shape, length = _SHAPES[name], max(total_steps - warmup, 1)
    cooldown_start = total_steps - cooldown

    def schedule(step: Any) -> Any:
        t = jnp.clip(jnp.asarray(step, jnp.float32), 0, total_steps)
        elapsed = jnp.clip(t, warmup, cooldown_start) - warmup
        body = shape(elapsed, length, timescale, peak, final)
        rising = init + (peak - init) * t / max(warmup, 1)
        falling = final + (body - final) * (total_steps - t) / max(cooldown, 1)
        return jnp.where(t < warmup, rising, jnp.where(t > cooldown_start, falling, body))

    return schedule


def _constant(elapsed: Any, length: int, timescale: int, peak: float, final: float) -> Any:
    del length, timescale, final
    return jnp.full_like(elapsed, peak)


def _linear(elapsed: Any, length: int, timescale: int, peak: float, final: float) -> Any:
    del timescale
    return peak + (final - peak) * elapsed / length


def _cosine(elapsed: Any, length: int, timescale: int, peak: float, final: float) -> Any:
    del timescale
    return final + (peak - final) * (1 + jnp.cos(jnp.pi * elapsed / length)) / 2


def _rsqrt(elapsed: Any, length: int, timescale: int, peak: float, final: float) -> Any:
    del length, final
    return peak * jnp.sqrt(timescale / (timescale + elapsed))


_SHAPES = {'constant': _constant, 'linear': _linear, 'cosine': _cosine, 'rsqrt': _rsqrt}


def _validate(total_steps: int, warmup: int, cooldown: int, timescale: int) -> None:
    if total_steps < 1:
        raise UserError(f'total_steps={total_steps}: training needs at least one step')
    if warmup < 0 or cooldown < 0:
        raise UserError(f'schedule: warmup={warmup}, cooldown={cooldown} must be at least 0')
    if warmup + cooldown > total_steps:
        raise UserError(
            f'schedule: warmup of {warmup} and cooldown of {cooldown} steps do not fit into '
            f'{total_steps} steps of training'
        )
    if timescale < 1:
        raise UserError(f'schedule: timescale={timescale} must be at least 1 step')
