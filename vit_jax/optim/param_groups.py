"""What differs between parameters by their paths: multipliers, layer-wise decay, freezing.

A pattern is a regular expression that may match anywhere in a path (`re.search`).
"""

from __future__ import annotations

import difflib
import math
import re
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import optax

from vit_jax.errors import UserError
from vit_jax.tree_paths import map_paths, param_paths, path_name

PyTree = Any
Rules = Sequence[tuple[str, float]]
Scale = float | jax.Array


def first_match(rules: Rules, path: str, default: float) -> float:
    """The value of the first rule whose pattern matches `path`."""
    return next((value for pattern, value in rules if re.search(pattern, path)), default)


def scale_by_path(scale: Callable[[str], Scale]) -> optax.GradientTransformation:
    """Multiplies each update by `scale(path)`, a number or one number a row (axis 0)."""

    def scaled(path: Any, update: jax.Array) -> jax.Array:
        by = jnp.asarray(scale(path_name(path)), update.dtype)
        return update * by.reshape(by.shape + (1,) * (update.ndim - by.ndim))

    return optax.stateless(lambda updates, _: jax.tree_util.tree_map_with_path(scaled, updates))


def layer_scale(params: PyTree, decay: float) -> Callable[[str], Scale]:
    """Layer-wise decay of the learning rate for fine-tuning (Bao et al. 2022, BEiT).

    With n blocks, the patch, class and position embeddings are layer 0, block i is
    layer i + 1, and all that follows is layer n + 1; layer k learns at
    decay^(n + 1 - k) times the learning rate, as in He et al. 2022, MAE. Blocks
    are named `block_0`, `block_1`, ... or stacked on axis 0 of `blocks`.

    Raises:
      UserError: if `decay` is not in (0, 1], or `params` hold no single stack of blocks.
    """
    check_number('layer_decay', decay, lambda x: 0 < x <= 1, 'in (0, 1]')
    depth = _depth(params)

    def scale(path: str) -> Scale:
        if re.search(r'(^|/)(patch_embed|cls_token|pos_embed)(/|$)', path):
            return decay ** (depth + 1)
        if block := _BLOCK.match(path):
            return decay ** (depth - int(block['index']))
        if _STACK.match(path):
            return decay ** jnp.arange(depth, 0, -1, dtype=jnp.float32)
        return 1.0

    return scale


_BLOCK = re.compile(r'(?P<stack>(.*/)?)block_(?P<index>\d+)/')
_STACK = re.compile(r'(?P<stack>(.*/)?)blocks/')


def _depth(params: PyTree) -> int:
    """Number of blocks in the one stack that `params` hold."""
    depths: dict[str, int] = {}
    for path, leaf in param_paths(params).items():
        if block := _BLOCK.match(path):
            stack, depth = block['stack'], int(block['index']) + 1
        elif block := _STACK.match(path):
            stack, depth = block['stack'], leaf.shape[0]
        else:
            continue
        depths[stack] = max(depth, depths.get(stack, 0))
    if len(depths) != 1:
        found = ', '.join(map(repr, depths)) or 'none'
        raise UserError(
            f'config.optim.layer_decay: the model must have one stack of blocks (block_0, ...), '
            f'found {found}; use lr_mults instead'
        )
    return next(iter(depths.values()))


def frozen(
    tx: optax.GradientTransformation, patterns: Sequence[str]
) -> optax.GradientTransformation:
    """`tx` for all parameters but those that match a pattern, which get no update."""
    if not patterns:
        return tx

    def label(path: str) -> str:
        return 'frozen' if any(re.search(p, path) for p in patterns) else 'trained'

    return optax.partition(
        {'trained': tx, 'frozen': optax.set_to_zero()}, lambda tree: map_paths(label, tree)
    )


def check_number(key: str, value: Any, holds: Callable[[float], bool], must: str) -> None:
    """Raises UserError unless `value` is a finite number that `holds`."""
    if not isinstance(value, int | float) or not math.isfinite(value) or not holds(value):
        raise UserError(f'config.optim.{key}={value!r}: must be a number {must}')


def check_rules(key: str, rules: Rules, paths: Iterable[str]) -> None:
    """Raises UserError unless these are patterns that match and multipliers of at least 0."""
    if not all(isinstance(rule, tuple | list) and len(rule) == 2 for rule in rules):
        raise UserError(f'config.optim.{key}={rules!r}: write ((pattern, multiplier), ...)')
    for pattern, mult in rules:
        check_number(f'{key} {pattern!r}', mult, lambda x: x >= 0, 'at least 0')
    check_patterns(key, [pattern for pattern, _ in rules], paths)


def check_patterns(key: str, patterns: Sequence[str], paths: Iterable[str]) -> None:
    """Raises UserError for a pattern that matches no path."""
    if isinstance(patterns, str):
        raise UserError(f'config.optim.{key}={patterns!r}: write a tuple, ({patterns!r},)')
    for pattern in patterns:
        try:
            found = any(re.search(pattern, path) for path in paths)
        except re.error as e:
            raise UserError(f'config.optim.{key}: {pattern!r} is no regular expression: {e}') from e
        if not found:
            near = difflib.get_close_matches(pattern, list(paths), n=1, cutoff=0.0)
            hint = f'; the nearest path is {near[0]!r}' if near else ''
            raise UserError(f'config.optim.{key}: {pattern!r} matches no parameter{hint}')
