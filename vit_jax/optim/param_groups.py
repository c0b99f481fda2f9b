"""Parameter groups by path: multipliers, layer-wise decay and freezing.

A pattern is a regular expression that may match anywhere in a path (`re.search`).
"""

from __future__ import annotations

import dataclasses
import difflib
import functools
import math
import re
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from vit_jax.errors import UserError
from vit_jax.tree_paths import block_paths, map_paths, param_paths, path_name

PyTree = Any
Rules = Sequence[tuple[str, float]]
Scale = float | np.ndarray | jax.Array


def first_match(rules: Rules, path: str, default: float) -> float:
    """Return the value of the first rule whose pattern matches `path`."""
    return next((value for pattern, value in rules if re.search(pattern, path)), default)


def scale_by_path(scale: Callable[[str], Scale]) -> optax.GradientTransformation:
    """Multiply each update by `scale(path)`, a number or one number per row (axis 0)."""

    def scaled(path: Any, update: jax.Array) -> jax.Array:
        by = jnp.asarray(scale(path_name(path)), update.dtype)
        return update * by.reshape(by.shape + (1,) * (update.ndim - by.ndim))

    return optax.stateless(lambda updates, _: jax.tree_util.tree_map_with_path(scaled, updates))


def layer_scale(params: PyTree, decay: float, layers: Sequence[str]) -> Callable[[str], Scale]:
    """Decay the learning rate layer by layer for fine-tuning (Bao et al. 2022, BEiT).

    With n named layers and all other parameters as layer n, layer k gets decay^(n - k) times the
    learning rate, as in He et al. 2022, MAE. Scanned blocks, stacked on axis 0 of `blocks`, get a
    rate for each row.

    Args:
      params: Parameters, or their shapes.
      decay: Ratio of the learning rates of a layer and the next one.
      layers: Path pattern of each layer, starting at the input; paths without a match form the last
        layer.

    Raises:
      UserError: if there are no layers.
    """
    if not layers:
        raise UserError(
            'config.optim.layer_decay: this model does not define the order of its layers (it has '
            'no layer_order); use config.optim.lr_mults instead'
        )
    leaves = param_paths(params)

    def path_scale(path: str) -> float:
        layer = next((i for i, p in enumerate(layers) if re.search(p, path)), len(layers))
        return decay ** (len(layers) - layer)

    def scale(path: str) -> Scale:
        blocks = block_paths(path, leaves[path])
        return (
            path_scale(path) if blocks == [path] else jnp.asarray([path_scale(b) for b in blocks])
        )

    return scale


def freeze_matching(
    tx: optax.GradientTransformation, patterns: Sequence[str]
) -> optax.GradientTransformation:
    """Apply `tx` to all parameters except those that match a pattern, which get no update."""

    def label(path: str) -> str:
        return 'frozen' if _is_frozen(path, patterns) else 'trained'

    return optax.partition(
        {'trained': tx, 'frozen': optax.set_to_zero()}, lambda tree: map_paths(label, tree)
    )


def select_trained(params: PyTree, patterns: Sequence[str]) -> PyTree:
    """Select the parameters to differentiate by; those that match a pattern become None."""
    return jax.tree_util.tree_map_with_path(
        lambda keys, leaf: None if _is_frozen(path_name(keys), patterns) else leaf, params
    )


def _is_frozen(path: str, patterns: Sequence[str]) -> bool:
    return any(re.search(pattern, path) for pattern in patterns)


Delay = tuple[str, int, optax.Schedule | None]


def delay_updates(tx: optax.GradientTransformation, delays: Sequence[Delay]) -> Any:
    """Delay the updates of `tx` until the step in the parameter's rule.

    The optimizer state follows the gradients from the first step, as with a learning rate of zero:
    DINOv2 (arXiv:2304.07193) freezes its last layer like this in the first epoch.

    Args:
      tx: Optimizer.
      delays: Rules of a pattern, the first step with an update, and a factor of updates as a
        function of the step, or None. The first matching pattern counts.
    """

    def update(updates: PyTree, count: jax.Array, _: PyTree = None) -> tuple[PyTree, jax.Array]:
        def started(path: Any, update: jax.Array) -> jax.Array:
            rules = (rule for rule in delays if re.search(rule[0], path_name(path)))
            _, start, factor = next(rules, ('', 0, None))
            if factor is not None:
                update *= factor(count).astype(update.dtype)
            return jnp.where(count < start, 0, update)

        updates = jax.tree_util.tree_map_with_path(started, updates)
        return updates, optax.safe_increment(count)

    wait = optax.GradientTransformation(lambda _: jnp.zeros((), jnp.int32), update)
    return optax.chain(tx, wait)


def bound_parameters(
    tx: optax.GradientTransformation, largest: Rules
) -> optax.GradientTransformation:
    """Limit parameters after updates of `tx` to the value of the first matching rule.

    The state is the same as for `tx`.
    """

    def update(updates: PyTree, state: PyTree, params: PyTree = None) -> tuple[PyTree, PyTree]:
        def limited(path: Any, update: jax.Array, param: jax.Array) -> jax.Array:
            most = first_match(largest, path_name(path), math.inf)
            return jnp.minimum(update, most - param) if math.isfinite(most) else update

        updates, state = tx.update(updates, state, params)
        return jax.tree_util.tree_map_with_path(limited, updates, params), state

    return optax.GradientTransformation(tx.init, update)


@functools.cache  # not at import: an array starts JAX, and then no job can be joined
def _schedules() -> tuple[Any, ...]:
    """Return the state types that count the steps of a schedule."""
    decay = optax.add_decayed_weights(lambda _: 0.0)
    return optax.ScaleByScheduleState, type(jax.eval_shape(decay.init, ()))


def at_step(state: PyTree, step: jax.Array) -> PyTree:
    """Set the schedules and delays in an optimizer state of `make` to `step`.

    They count the optimizer's updates, which are fewer than the steps if some were skipped; Optax
    gives schedules no other count, and stored states hold these. Moments keep separate counts.

    Args:
      state: Optimizer state.
      step: Number of previous steps, int32.
    """
    schedules = _schedules()

    def set_count(path: tuple[Any, ...], node: Any) -> Any:
        if isinstance(node, schedules):
            return node._replace(count=step)
        if getattr(path[-1], 'name', '') == 'step_count':  # of `contrib.schedule_free`, from 1 on
            return step + 1
        # A number that is a state by itself, in a chain, is the count of `delay_updates`.
        return step if isinstance(path[-1], jax.tree_util.SequenceKey) else node

    return jax.tree_util.tree_map_with_path(
        set_count, state, is_leaf=lambda node: isinstance(node, schedules)
    )


def with_skips(train_step: Callable[..., Any]) -> Callable[..., Any]:
    """Keep the state, with its `step` advanced, where a metric is not finite.

    Schedules follow `step`, which counts such steps too.
    """

    @functools.wraps(train_step)
    def skipping_step(state: Any, batch: Any) -> tuple[Any, dict[str, jax.Array]]:
        opt_state = at_step(state.opt_state, state.step)
        after, metrics = train_step(dataclasses.replace(state, opt_state=opt_state), batch)
        finite = jnp.all(jnp.isfinite(jnp.stack(list(metrics.values()))))
        before = dataclasses.replace(state, step=after.step)
        kept = jax.tree.map(lambda new, old: jnp.where(finite, new, old), after, before)
        return kept, metrics

    return skipping_step


def check_number(key: str, value: Any, holds: Callable[[float], bool], must: str) -> None:
    """Raise UserError unless `value` is a finite number that `holds`."""
    if not isinstance(value, int | float) or not math.isfinite(value) or not holds(value):
        raise UserError(f'config.optim.{key}={value!r}: must be a number {must}')


def check_patterns(key: str, patterns: Sequence[str], paths: Iterable[str]) -> None:
    """Raise UserError for a pattern that matches no path."""
    for pattern in patterns:
        try:
            has_match = any(re.search(pattern, path) for path in paths)
        except re.error as e:
            raise UserError(f'config.optim.{key}: {pattern!r} is not a regex: {e}') from e
        if not has_match:
            closest = difflib.get_close_matches(pattern, list(paths), n=1, cutoff=0.0)
            hint = f'; the nearest path is {closest[0]!r}' if closest else ''
            raise UserError(f'config.optim.{key}: {pattern!r} matches no parameter{hint}')
