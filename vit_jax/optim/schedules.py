"""Schedules of the learning rate or other numbers: warm-up, shape and cooldown."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax.numpy as jnp
import optax

from vit_jax.config.run import Durations, Schedule, Step, parse_duration
from vit_jax.errors import UserError, nearest

SHORTENED = 10  # a warm-up that does not fit takes one part in this many of the run


def make_schedule(
    schedule: Schedule, peak: float, times: Durations, total_steps: int | None = None
) -> optax.Schedule:
    """Make a number a function of the steps already taken; constant after the last step.

    Args:
      schedule: Shape of the schedule.
      peak: Highest value; or the first value, if `final` is larger.
      times: Durations of the run.
      total_steps: Number of steps, by default the run's.

    Raises:
      UserError: for an unknown name, or durations that do not fit into the run.
    """
    total = times.total_steps if total_steps is None else total_steps
    name, init, final = schedule.name, schedule.init, schedule.final
    if name not in SHAPES:
        raise UserError(nearest('schedule', name, SHAPES))
    warmup, cooldown = fit_warmup(schedule, times, total), times.steps(schedule.cooldown)
    timescale = times.steps(schedule.timescale)
    boundaries = tuple(times.steps(text) for text in schedule.boundaries)
    _validate(total, warmup, cooldown, timescale)
    if not 0 <= peak < math.inf:
        raise UserError(f'schedule {name!r}: peak={peak} must be finite and at least 0')
    if final and not cooldown and name not in ('linear', 'cosine', 'polynomial'):
        raise UserError(f'schedule {name!r} reaches final={final} only with a cooldown; set one')
    if name == 'stair':
        _validate_stair(boundaries, warmup, total)
    shape, cooldown_start = SHAPES[name], total - cooldown
    after = tuple(boundary - warmup for boundary in boundaries)
    length = max(total - warmup, 1)
    spec = _Spec(peak, final, length, timescale, after, schedule.factor, schedule.power)

    def value(step: Any) -> Any:
        t = jnp.clip(jnp.asarray(step, jnp.float32), 0, total)
        last = cooldown_start if schedule.cooldown_form == 'line' else total
        elapsed = jnp.clip(t, warmup, last) - warmup
        body = shape(elapsed, spec)
        rising = init + (peak - init) * t / max(warmup, 1)
        falling = final + (body - final) * (total - t) / max(cooldown, 1)
        return jnp.where(t < warmup, rising, jnp.where(t > cooldown_start, falling, body))

    return value


def fit_warmup(schedule: Schedule, times: Durations, total: int) -> int:
    """Return the steps of the warm-up, shortened if it does not fit before the cooldown.

    Then it takes a tenth of the steps that the cooldown leaves.
    """
    warmup = times.steps(schedule.warmup)
    room = total - times.steps(schedule.cooldown)
    return warmup if warmup <= room else max(room, 0) // SHORTENED


def strength(
    schedule: Schedule, peak: float, times: Durations | None
) -> float | Callable[[Any], Any]:
    """Make a schedule with this peak; return the number if the schedule is constant.

    Args:
      schedule: Schedule of a strength or a decay.
      peak: Highest value.
      times: Durations of the run; may be None if the schedule is constant.
    """
    if schedule == Schedule():
        return peak
    assert times is not None, 'a schedule needs the length of the run'
    return make_schedule(schedule, peak, times)


def average_decays(step: Step, times: Durations | None) -> list[float | Callable[[Any], Any]]:
    """Return the decay of each average, a number or a function of the steps already taken."""
    decays = [strength(step.ema_schedule, decay, times) for decay in step.ema_decays]
    start = times.steps(step.ema_start, 'config.step.ema_start') if times else 0
    if not (step.ema_warmup or start):
        return decays
    return [_begin(decay, start, step.ema_warmup or False) for decay in decays]


def _begin(decay: float | Callable[[Any], Any], start: int, warmup: bool) -> Callable[[Any], Any]:
    """Return a decay that is 0 before the step `start`.

    With `warmup` it is at most (1 + t) / (10 + t) after t further steps.
    """

    def value(step: Any) -> Any:
        t = jnp.asarray(step, jnp.float32) - start
        rate = decay(step) if callable(decay) else decay
        rate = jnp.minimum(rate, (1 + t) / (10 + t)) if warmup else rate
        return jnp.where(t < 0, 0.0, rate) if start else rate

    return value


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
    """Fall from the peak to `final` as a power of the share of remaining steps."""
    remaining = jnp.clip(1 - elapsed / spec.length, 0, 1)
    return spec.final + (spec.peak - spec.final) * remaining**spec.power


def _rsqrt(elapsed: Any, spec: _Spec) -> Any:
    """Fall as the reciprocal square root of the steps since the warm-up, indefinitely."""
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


def depends_on_total(schedule: Schedule) -> bool:
    """Whether a run of another length has other values at the same steps."""
    ends = schedule.name in ('linear', 'cosine', 'polynomial')
    durations = map(str, (schedule.warmup, schedule.timescale, *schedule.boundaries))
    has_shares = any(text.endswith('%') for text in durations)
    return ends or has_shares or parse_duration(schedule.cooldown, 'cooldown')[0] > 0


def _validate(total_steps: int, warmup: int, cooldown: int, timescale: int) -> None:
    if total_steps < 1:
        raise UserError(f'total_steps={total_steps}: training needs at least one step')
    if warmup < 0 or cooldown < 0:
        raise UserError(f'schedule: warmup={warmup}, cooldown={cooldown} must be at least 0')
    if cooldown > total_steps:
        raise UserError(
            f'schedule: a cooldown of {cooldown} steps does not fit into {total_steps} steps of '
            'training'
        )
    if timescale < 1:
        raise UserError(f'schedule: timescale={timescale} must be at least 1 step')


def _validate_stair(boundaries: Sequence[int], warmup: int, total_steps: int) -> None:
    marks = (warmup, *boundaries, total_steps)
    if not boundaries or any(a >= b for a, b in itertools.pairwise(marks)):
        raise UserError(
            f"schedule 'stair': boundaries={tuple(boundaries)} must be increasing steps, "
            f'between the warm-up of {warmup} and the end at {total_steps}'
        )
