"""Optimizer of a config: from Optax or this package, with decay, rates and freezing by path.

Path patterns and the transformations that use them are in `param_groups`.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import re
import types
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import optax

from vit_jax.config.run import Durations, Optim
from vit_jax.errors import UserError, nearest, resolve
from vit_jax.optim import schedules
from vit_jax.optim.param_groups import (
    Delay,
    Rules,
    bound_parameters,
    check_number,
    check_patterns,
    delay_updates,
    first_match,
    freeze_matching,
    layer_scale,
    scale_by_path,
)
from vit_jax.signatures import Parameters, parameters
from vit_jax.tree_paths import map_paths, param_paths

if TYPE_CHECKING:
    from vit_jax.optim.mup import Factors

PyTree = Any
Strength = float | Callable[[Any], Any]  # strength of weight decay, or its schedule
# Optimizers of this package, and their modules, of which a run imports at most one.
OWN = types.MappingProxyType(
    {
        'adafactor_zhai': 'adafactor',
        'adamuon': 'muon',
        'ademamix': 'adam_variants',
        'adopt': 'adam_variants',
        'muon': 'muon',
        'nadamuon': 'muon',
        'prodigy': 'adam_variants',
        'schedule_free_adamw': 'schedule_free',
        'schedule_free_sgd': 'schedule_free',
    }
)
SCHEDULE_FREE = ('schedule_free_adamw', 'schedule_free_sgd')
# Optimizers that need the loss, a random key or a constant learning rate.
_UNSUPPORTED = {'fromage', 'lbfgs', 'noisy_sgd', 'optimistic_adam', 'rprop', 'sm3'}
# Parameters that count as vectors, for any number of axes; position bias tables do not.
_VECTOR = re.compile(r'(?<!position_)(?<!relative_)(bias|scale)$')
_FRACTIONS = ('b1', 'b2', 'b3', 'beta2_cap', 'momentum', 'decay', 'rho')  # keywords in [0, 1)


def make_optimizer(
    params: PyTree,
    optim: Optim,
    times: Durations,
    layers: Sequence[str] = (),
    factors: Mapping[str, Factors] | None = None,
    largest: Rules = (),
) -> tuple[optax.GradientTransformation, optax.Schedule]:
    """Make the gradient transformation of a config, and its learning rate.

    Args:
      params: Parameters, or their shapes.
      optim: `config.optim`.
      times: Durations of the run.
      layers: Patterns from the model's `layer_order()`, required by `layer_decay`.
      factors: Factors of the parametrization, see `mup`; None for the standard one.
      largest: Pairs of a pattern and the largest parameter value after an update.

    Raises:
      UserError: for an unknown name or keyword, or a pattern that matches no parameter.
    """
    paths = param_paths(params)
    for key in ('decay_mults', 'lr_mults', 'lr_delays'):
        check_patterns(key, [rule[0] for rule in getattr(optim, key)], paths)
    check_patterns('freeze', optim.freeze, paths)
    check_patterns('decay_mask', [optim.decay_mask] if optim.weight_decay else [], paths)
    if 'matrices' in (takes := options(optim.name)):
        matrices = optim.options.get('matrices', takes['matrices'].default)
        check_patterns('matrices', [matrices], paths)
    before, after = [], []
    decay_mults = optim.decay_mults
    if factors is not None:
        from vit_jax.optim import mup  # here, as few runs have factors

        if optim.name not in mup.OPTIMIZERS:
            raise UserError(
                f'config.optim.parametrization: muP is for Adam and its like '
                f'({", ".join(mup.OPTIMIZERS)}), not for {optim.name!r}'
            )
        decay_mults = mup.decay_rules(factors, decay_mults)
        before = [scale_by_path(lambda path: factors[path].gradient)]
        after = [scale_by_path(lambda path: factors[path].update_factor())]
    rate = schedules.make_schedule(optim.schedule, optim.lr, times)
    decay = schedules.strength(optim.decay_schedule, optim.weight_decay, times)
    clip = optim.clip_norm
    tx = optax.chain(
        optax.identity() if clip is None else optax.clip_by_global_norm(clip),
        *before,
        _optimizer(optim, rate, decay, decay_mults),
        *after,
        optax.identity()
        if not optim.lr_mults
        else scale_by_path(lambda path: first_match(optim.lr_mults, path, 1.0)),
        optax.identity()
        if optim.layer_decay is None
        else scale_by_path(layer_scale(params, optim.layer_decay, layers)),
    )
    if optim.lr_delays:
        tx = delay_updates(tx, _delays(optim, times, rate))
    if optim.name in SCHEDULE_FREE:
        tx = _schedule_free(tx, rate, optim, largest)
    elif largest:
        tx = bound_parameters(tx, largest)
    return freeze_matching(tx, optim.freeze) if optim.freeze else tx, rate


def _schedule_free(
    tx: optax.GradientTransformation, rate: optax.Schedule, optim: Optim, largest: Rules
) -> optax.GradientTransformation:
    """Average the iterates of `tx`."""
    from vit_jax.optim import schedule_free  # here, as few runs average like this

    if largest:
        raise UserError(
            f'config.optim.name={optim.name!r}: the model bounds {largest[0][0]!r}, which a '
            "schedule-free average does not keep: choose another such as 'adamw'"
        )
    if not optim.options.get('b1', 1):
        raise UserError('config.optim.b1=0: a schedule-free average needs a weight above 0')
    return schedule_free.averaging(tx, rate, factory(optim.name), optim.options)


def _delays(optim: Optim, times: Durations, rate: optax.Schedule) -> list[Delay]:
    """Convert `lr_delays` to rules for `delayed`."""
    delays: list[Delay] = []
    for pattern, *durations in optim.lr_delays:
        delay, *warmup = (times.steps(text) for text in durations)
        delayed_factor = None
        if warmup:
            schedule = dataclasses.replace(optim.schedule, warmup=warmup[0])
            remaining_steps = max(times.total_steps - delay, 1)
            delayed_factor = _ratio(
                schedules.make_schedule(schedule, optim.lr, times, remaining_steps), delay, rate
            )
        delays.append((pattern, delay, delayed_factor))
    return delays


def _ratio(late: optax.Schedule, first: int, rate: optax.Schedule) -> optax.Schedule:
    """Return the factor that turns learning rate `rate` into `late` from step `first` on."""

    def ratio(step: Any) -> Any:
        usual = rate(step)
        return jnp.where(usual > 0, late(step - first) / usual, 0)

    return ratio


def _optimizer(
    optim: Optim, lr: optax.Schedule, weight_decay: Strength, decay_mults: Rules
) -> optax.GradientTransformation:
    """Make the optimizer, or one per strength of weight decay."""
    build = _builder(optim.name, optim.options)

    def mask(tree: PyTree) -> PyTree:
        return map_paths(lambda path: re.search(optim.decay_mask, path) is not None, tree)

    if not decay_mults:
        return build(lr, weight_decay, mask)
    mults = [*(mult for _, mult in decay_mults), 1.0]
    ranks = [(pattern, i) for i, (pattern, _) in enumerate(decay_mults)]
    return optax.partition(
        {
            str(i): build(lr, _scaled_strength(weight_decay, mult), mask)
            for i, mult in enumerate(mults)
        },
        lambda tree: map_paths(lambda path: str(first_match(ranks, path, len(ranks))), tree),
    )


def _builder(name: str, kwargs: Mapping[str, Any]) -> Callable[..., optax.GradientTransformation]:
    """Return (lr, weight_decay, mask) -> optimizer, with the optimizer's form of weight decay."""
    build_one, takes = factory(name), set(parameters(factory(name)))
    options = _options(name, kwargs)
    if 'trust_ratio_mask' in takes:
        options['trust_ratio_mask'] = lambda tree: map_paths(lambda p: not _VECTOR.search(p), tree)
    mask_name = 'mask' if 'mask' in takes else 'weight_decay_mask'

    def build(lr: optax.Schedule, weight_decay: Strength, mask: Callable) -> Any:
        if mask_name not in takes:
            penalty = optax.add_decayed_weights(weight_decay, mask)
            return optax.chain(penalty, build_one(lr, **options))
        if 'weight_decay_rate' not in takes:
            return build_one(lr, weight_decay=weight_decay, **{mask_name: mask}, **options)

        def rate(count: jax.Array) -> jax.Array:
            strength = weight_decay(count) if callable(weight_decay) else weight_decay
            return strength * lr(count)  # Adafactor does not scale its decay rate by lr

        return build_one(lr, weight_decay_rate=rate, **{mask_name: mask}, **options)

    return build


def _scaled_strength(strength: Strength, mult: float) -> Strength:
    """Multiply a strength or its schedule."""
    return (lambda count: mult * strength(count)) if callable(strength) else strength * mult


def factory(name: str) -> Callable[..., optax.GradientTransformation]:
    """Find the constructor of an optimizer; UserError if it does not exist."""
    if not isinstance(name, str):  # from a file that something else has written
        raise UserError(f'config.optim.name={name!r}: expected str')
    if name not in OWN and not _is_optimizer(name):
        raise UserError('config.optim.name: ' + nearest('optimizer', name, optimizers()))
    return resolve(__package__, OWN[name], name) if name in OWN else getattr(optax, name)


def options(name: str) -> Parameters:
    """Return the keywords that `make_optimizer` passes to an optimizer.

    Raises:
      UserError: if the optimizer does not exist, or needs more than gradients.
    """
    reserved = ('learning_rate', 'weight_decay', 'weight_decay_rate')
    items = parameters(factory(name)).items()
    return {key: p for key, p in items if key not in reserved and not key.endswith('mask')}


def optimizers() -> list[str]:
    """List the optimizers that need only a schedule and gradients."""
    return sorted([*OWN, *(name for name in dir(optax) if _is_optimizer(name))])


@functools.cache
def _is_optimizer(name: str) -> bool:
    if name in _UNSUPPORTED or name.startswith(('_', 'scale_by_')):
        return False
    f = getattr(optax, name, None)
    if not inspect.isfunction(f) and not isinstance(f, functools.partial):  # nadam, nadamw
        return False
    required = [k for k, p in inspect.signature(f).parameters.items() if p.default is p.empty]
    return 'learning_rate' in inspect.signature(f).parameters and len(required) <= 1


def _options(name: str, kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Check an optimizer's keywords, and convert dtype names to dtypes."""
    valid = options(name)
    for key in kwargs:
        if key not in valid:
            declared_names = (declared.name for declared in dataclasses.fields(Optim))
            raise UserError(
                f'config.optim ({name}): ' + nearest('key', key, {*valid, *declared_names})
            )
    for key in kwargs.keys() & set(_FRACTIONS):
        if kwargs[key] is not None:
            check_number(key, kwargs[key], lambda x: 0 <= x < 1, 'in [0, 1)')
    return {k: _dtype(k, v) if 'dtype' in k else v for k, v in kwargs.items()}


def _dtype(key: str, name: Any) -> Any:
    try:
        return None if name is None else jnp.dtype(name)
    except TypeError as e:
        raise UserError(f"config.optim.{key}={name!r}: not a dtype; try 'bfloat16'") from e
