"""Schedules of the learning rate or another number: warm-up, shape, and cooldown."""

from __future__ import annotations

import dataclasses
import itertools
import math
import types
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax.numpy as jnp
import optax

from vit_jax.errors import UserError, check_choice, nearest
from vit_jax.signatures import Steps, in_steps, keyword_only

COOLDOWNS = ('line', 'product')
CONSTANT: Mapping[str, Any] = types.MappingProxyType({'name': 'constant'})


def from_config(
    spec: Mapping[str, Any],
    peak: float,
    total_steps: int,
    to_steps: Callable[[str], int],
    where: str = 'config.optim.schedule',
) -> optax.Schedule:
    """The schedule that a section of a config describes.

    Args:
      spec: keywords of `make`, with durations as strings.
      peak: the highest value; or the first, where `final` is above it.
      total_steps: length of training.
      to_steps: turns a duration such as `'5%'` into steps.
      where: the section's name, for messages.

    Raises:
      UserError: for an unknown key or a value outside its range.
    """
    valid = keyword_only(make)
    for key in spec:
        if key not in valid:
            raise UserError(f'{where}: ' + nearest('key', key, valid))
    return make(peak, total_steps, **in_steps(make, spec, to_steps))


def from_strength(
    spec: Mapping[str, Any],
    strength: float,
    total_steps: int,
    to_steps: Callable[[str], int],
    where: str,
) -> float | Callable[[Any], Any]:
    """The schedule with peak `strength`, or the number itself if the schedule is constant."""
    if dict(spec) == dict(CONSTANT):
        return strength
    return from_config(spec, strength, total_steps, to_steps, where)


def make(
    peak: float,
    total_steps: int,
    *,
    name: str = 'constant',
    warmup: Steps = 0,
    cooldown: Steps = 0,
    cooldown_form: str = 'line',
    timescale: Steps = 10_000,
    boundaries: Sequence[Steps] = (),
    factor: float = 0.1,
    power: float = 0.9,
    init: float = 0.0,
    final: float = 0.0,
) -> optax.Schedule:
    """The learning rate as a function of the number of steps already taken.

    It rises linearly from `init` at step 0 to `peak` at step `warmup`, follows
    its shape, and in the last `cooldown` steps falls to `final`. Beyond
    `total_steps` it is constant.

    Args:
      peak: the highest learning rate.
      total_steps: length of training.
      name: `constant`; `linear`, `cosine` or `polynomial`, which reach `final` at
        `total_steps`; `stair`, multiplied by `factor` from each of `boundaries`
        on (He et al. 2016, section 3.4); or `rsqrt`, the reciprocal square root
        peak * sqrt(timescale / (timescale + steps since the warm-up)), which
        with a cooldown gives a finished model at any length (Zhai et al. 2022,
        "Scaling Vision Transformers", section 3.4) and with timescale = warmup
        is Vaswani et al. 2017, equation 3.
      warmup: length of the warm-up, in steps.
      cooldown: length of the cooldown, in steps.
      cooldown_form: `line`, straight to `final` from the value at its start; or
        `product`, in which the shape goes on falling and its distance from
        `final` is multiplied by a ramp from 1 to 0, as in the code of Zhai et
        al. (big_vision).
      timescale: timescale of `rsqrt`, in steps.
      boundaries: of `stair`, in steps from the start of training, rising.
      factor: of `stair`, in (0, 1].
      power: of `polynomial`, in which the distance from `final` shrinks as the
        share of the steps that are left, to this power (Chen et al. 2018,
        arXiv:1606.00915, section 4.1).
      init: learning rate at step 0, if there is a warm-up.
      final: learning rate at `total_steps`, if anything decays to it.

    Raises:
      UserError: for an unknown name or a value outside its range.
    """
    if name not in SHAPES:
        raise UserError(nearest('schedule', name, SHAPES))
    check_choice('cooldown_form', cooldown_form, COOLDOWNS)
    _validate(total_steps, warmup, cooldown, timescale)
    if not power > 0:
        raise UserError(f'schedule {name!r}: power={power} must be positive')
    for what, rate in (('lr', peak), ('init', init), ('final', final)):
        if not math.isfinite(rate) or rate < 0:
            raise UserError(f'schedule {name!r}: {what}={rate} must be finite and at least 0')
    if final and not cooldown and name not in ('linear', 'cosine', 'polynomial'):
        raise UserError(f'schedule {name!r} reaches final={final} only with a cooldown; set one')
    if name == 'stair':
        _validate_stair(boundaries, factor, warmup, total_steps)
    shape, cooldown_start = SHAPES[name], total_steps - cooldown
    steps = tuple(boundary - warmup for boundary in boundaries)
    spec = _Spec(peak, final, max(total_steps - warmup, 1), timescale, steps, factor, power)

    def schedule(step: Any) -> Any:
        t = jnp.clip(jnp.asarray(step, jnp.float32), 0, total_steps)
        last = cooldown_start if cooldown_form == 'line' else total_steps
        elapsed = jnp.clip(t, warmup, last) - warmup
        body = shape(elapsed, spec)
        rising = init + (peak - init) * t / max(warmup, 1)
        falling = final + (body - final) * (total_steps - t) / max(cooldown, 1)
        return jnp.where(t < warmup, rising, jnp.where(t > cooldown_start, falling, body))

    return schedule


@dataclasses.dataclass(frozen=True)
class _Spec:
    """Parameters of a shape; `length` and `boundaries` count from the end of the warm-up."""

    peak: float
    final: float
    length: int
    timescale: int
    boundaries: tuple[int, ...]
    factor: float
    power: float


def _constant(elapsed: Any, spec: _Spec) -> Any:
    """Stay at the peak."""
    return jnp.full_like(elapsed, spec.peak)


def _linear(elapsed: Any, spec: _Spec) -> Any:
    """Fall linearly from the peak to `final` at the end of training."""
    return spec.peak + (spec.final - spec.peak) * elapsed / spec.length


def _cosine(elapsed: Any, spec: _Spec) -> Any:
    """Fall from the peak to `final` along half a cosine."""
    falling = (1 + jnp.cos(jnp.pi * elapsed / spec.length)) / 2
    return spec.final + (spec.peak - spec.final) * falling


def _polynomial(elapsed: Any, spec: _Spec) -> Any:
    """Fall from the peak to `final` as a power of the share of steps that are left."""
    left = jnp.clip(1 - elapsed / spec.length, 0, 1)
    return spec.final + (spec.peak - spec.final) * left**spec.power


def _rsqrt(elapsed: Any, spec: _Spec) -> Any:
    """Fall as the reciprocal square root of the steps since the warm-up, without an end."""
    return spec.peak * jnp.sqrt(spec.timescale / (spec.timescale + elapsed))


def _stair(elapsed: Any, spec: _Spec) -> Any:
    """Multiply the peak by `factor` at each of `boundaries`."""
    passed = sum((elapsed >= boundary).astype(jnp.float32) for boundary in spec.boundaries)
    return spec.peak * jnp.power(spec.factor, passed)


SHAPES = {
    'constant': _constant,
    'linear': _linear,
    'cosine': _cosine,
    'polynomial': _polynomial,
    'rsqrt': _rsqrt,
    'stair': _stair,
}


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


def _validate_stair(
    boundaries: Sequence[int], factor: float, warmup: int, total_steps: int
) -> None:
    marks = (warmup, *boundaries, total_steps)
    if not boundaries or any(a >= b for a, b in itertools.pairwise(marks)):
        raise UserError(
            f"schedule 'stair': boundaries={tuple(boundaries)} must be one or more steps, rising, "
            f'between the warm-up of {warmup} and the end at {total_steps}'
        )
    if not 0 < factor <= 1:
        raise UserError(f"schedule 'stair': factor={factor} must be in (0, 1]")
