"""Averages of trained models: soups, and the line between two (WiSE-FT).

Wortsman et al., 2022, arXiv:2203.05482 (model soups) and arXiv:2109.01903 (WiSE-FT).
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from flax import traverse_util

from vit_jax.errors import UserError
from vit_jax.interop.trained import TrainedModel

TOLERANCE = 1e-6  # of the sum of the weights


def mix(models: Sequence[TrainedModel], weights: Sequence[float] | None = None) -> TrainedModel:
    """Average the parameters and other collections of models of one architecture.

    Sums are taken in float64. Integers, such as counts, are the first model's.

    Args:
      models: Models; the first determines config, preparation of images and classes.
      weights: Weight of each model, summing to 1; equal by default. They may be negative.

    Returns:
      The model, with a note for each field or preparation that differs.

    Raises:
      UserError: for wrong weights, or models with different names, classes, or paths and shapes of
        parameters.
    """
    weights = check_weights(weights, len(models))
    base = models[0]
    for other in models[1:]:
        _require_alike(base, other)
    trees = [traverse_util.flatten_dict(model.variables, sep='/') for model in models]
    mixed = {path: _mean([tree[path] for tree in trees], weights) for path in trees[0]}
    variables = traverse_util.unflatten_dict(mixed, sep='/')
    shares = ' + '.join(f'{w:g} x {m.source}' for w, m in zip(weights, models, strict=True))
    return dataclasses.replace(
        base,
        params=variables['params'],
        collections={name: tree for name, tree in variables.items() if name != 'params'},
        source=shares,
        notes=(*base.notes, *_differences(models)),
    )


def check_weights(weights: Sequence[float] | None, count: int) -> tuple[float, ...]:
    """Return the weights of `count` models, equal ones by default.

    Raises:
      UserError: for a wrong number of weights, or weights that are not finite or do not sum to 1.
    """
    if weights is None:
        return (1 / count,) * count
    if len(weights) != count:
        raise UserError(f'--weights: {len(weights)} for {count} models; give one for each')
    if not all(map(math.isfinite, weights)) or abs(sum(weights) - 1) > TOLERANCE:
        raise UserError(f'--weights: the sum is {sum(weights):g}, but must be 1')
    return tuple(weights)


def _mean(values: Sequence[Any], weights: Sequence[float]) -> Any:
    start = np.asarray(values[0])
    if not np.issubdtype(start.dtype, np.floating):
        return values[0]
    total = np.zeros(start.shape, np.float64)
    for weight, value in zip(weights, values, strict=True):
        total += weight * np.asarray(value, np.float64)
    return total.astype(start.dtype)


def _require_alike(first: TrainedModel, other: TrainedModel) -> None:
    """Raise UserError unless parameters of two models can be averaged."""
    between = f'{first.path} and {other.path}'
    names = [model.settings.model.name for model in (first, other)]
    if names[0] != names[1]:
        raise UserError(f'{between}: models {names[0]!r} and {names[1]!r} cannot be averaged')
    shapes: list[dict[str, tuple[int, ...]]] = [
        {k: np.shape(x) for k, x in traverse_util.flatten_dict(m.variables, sep='/').items()}
        for m in (first, other)
    ]
    for path in sorted(shapes[0].keys() | shapes[1].keys()):
        pair = [tree.get(path) for tree in shapes]
        if pair[0] != pair[1]:
            sides = ['nothing' if shape is None else list(shape) for shape in pair]
            raise UserError(
                f'{between}: {path} is {sides[0]} and {sides[1]}: different architectures'
            )
    if first.class_names and other.class_names and first.class_names != other.class_names:
        raise UserError(f'{between} have different classes, or a different order of them')


def _differences(models: Sequence[TrainedModel]) -> list[str]:
    """Describe each field of model or preparation in which others differ from the first."""
    base = models[0]
    fields = {
        key
        for other in models[1:]
        for key in base.model_config.keys() | other.model_config.keys()
        if base.model_config.get(key) != other.model_config.get(key)
    }
    notes = [f"config.model.{key} differs: the first model's is kept" for key in sorted(fields)]
    if len({model.transforms for model in models}) > 1:
        notes.append("the preparation of images differs: the first model's is kept")
    return notes
