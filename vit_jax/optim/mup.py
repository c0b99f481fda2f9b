"""Maximal update parametrization: hyperparameters tuned on a narrow model hold for a wide one.

Yang et al., 2022, arXiv:2203.03466, table 3, for Adam and optimizers like it. A parameter is
compared with that of a narrow base model, for which nothing changes. With r, the ratio of fan-ins
(of widths, for vectors), the factors are

    kind        initial values   learning rate   gradient
    vector      1                1               r
    hidden      1                1/r             r
    output      r^-1/2           1/r             1
    embedding   1                r^-1/2          r^1/2

Vectors are biases, norms, positions and kernels that read what does not grow, such as patches;
hidden kernels have two sides that grow, output kernels read what grows. Models here draw kernels
with a variance of about 1/fan-in, which the column of initial values takes for granted. An
embedding is a table that its model multiplies by sqrt(width).

A factor of the gradient does not change the updates of Adam. It divides Adam's epsilon, which
would otherwise outgrow the gradients of wide models (Everett et al., 2024, arXiv:2407.05872). Decay
keeps the product of rate and strength. Scores of attention are divided by the width of a head
instead of its root: factors of the queries' projections do that, so that the model stays the same.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from vit_jax import signatures
from vit_jax.errors import UserError, nearest
from vit_jax.optim.muon import TO_HEADS, is_stacked, kernel_axes
from vit_jax.tree_paths import param_paths, path_name

PyTree = Any
Shape = tuple[int, ...]
Kinds = Sequence[tuple[str, str]]  # a pattern of paths, and the kind

KINDS = ('vector', 'hidden', 'output', 'embedding', 'tied')
KEY = 'config.optim.parametrization'
# Optimizers whose updates do not depend on the scale of the gradients.
OPTIMIZERS = (
    *('adabelief', 'adam', 'adamax', 'adamaxw', 'adamw', 'adan', 'amsgrad', 'lion', 'nadam'),
    *('nadamw', 'radam'),
)


@dataclasses.dataclass(frozen=True)
class Factors:
    """The factors of one parameter.

    Attributes:
      initial: of its initial values.
      rate: of its learning rate.
      gradient: of its gradient.
      query_factor: of the values and updates of queries, 1 for keys and values, in an array that
        broadcasts against the parameter; None if the parameter projects no queries, or heads are
        as wide as in the base model.
    """

    initial: float = 1.0
    rate: float = 1.0
    gradient: float = 1.0
    query_factor: np.ndarray | None = None

    def update_factor(self) -> float | np.ndarray:
        """The factor of the update."""
        return self.rate if self.query_factor is None else self.rate * self.query_factor

    def value_factor(self) -> float | np.ndarray:
        """The factor of the initial values."""
        return self.initial if self.query_factor is None else self.initial * self.query_factor


def factors(params: PyTree, base: PyTree, kinds: Kinds = ()) -> dict[str, Factors]:
    """The factors of each parameter, by its path.

    Args:
      params: the parameters, or their shapes.
      base: the same for the base model, which differs in widths alone.
      kinds: of parameters whose shapes do not determine the kind; the first match counts.

    Raises:
      UserError: if the base model has other parameters, or one matrix both embeds tokens and scores
        them, for which no factors are right.
    """
    ours, theirs = param_paths(params), param_paths(base)
    if differ := sorted(ours.keys() ^ theirs.keys()):
        raise UserError(
            f'config.optim.parametrization: {differ[0]} is in one of the model and its base model '
            'alone: give a base model that differs in widths, not in depth'
        )
    return {path: _factors(path, leaf, theirs[path], kinds) for path, leaf in ours.items()}


def scaled(params: PyTree, found: Mapping[str, Factors]) -> PyTree:
    """Initial values times their factors."""

    def value(keys: Any, x: jax.Array) -> jax.Array:
        return x * np.asarray(found[path_name(keys)].value_factor(), x.dtype)

    return jax.tree_util.tree_map_with_path(value, params)


def decay_rules(
    found: Mapping[str, Factors], mults: Sequence[tuple[str, float]]
) -> list[tuple[str, float]]:
    """Multipliers of weight decay that cancel the multipliers of the learning rate.

    Args:
      found: the factors.
      mults: pairs of a pattern and a multiplier that the user wants; the first that matches counts.
    """
    groups: dict[float, list[str]] = {}
    for path, factor in found.items():
        wanted = next((mult for pattern, mult in mults if re.search(pattern, path)), 1.0)
        groups.setdefault(wanted / factor.rate, []).append(path)
    groups.pop(1.0, None)
    return [(f'^({"|".join(map(re.escape, paths))})$', mult) for mult, paths in groups.items()]


def _factors(path: str, leaf: Any, base: Any, kinds: Kinds) -> Factors:
    stacked = is_stacked(path, leaf)
    shape, narrow = tuple(leaf.shape)[stacked:], tuple(base.shape)[stacked:]
    if len(leaf.shape) != len(base.shape) or (stacked and leaf.shape[0] != base.shape[0]):
        raise UserError(
            f'config.optim.parametrization: {path} has shape {tuple(leaf.shape)}, and '
            f'{tuple(base.shape)} in the base model, which may differ in widths alone'
        )
    kind, ratio = _kind(path, shape, narrow, kinds)
    if kind == 'tied':
        raise UserError(
            f'config.optim.parametrization: {path} both embeds tokens and scores them, which muP '
            'scales differently: set config.model.tied=False'
        )
    queries = _query_factors(path, shape, narrow)
    if queries is not None and stacked:
        queries = queries[None]
    return {
        'vector': Factors(gradient=ratio),
        'hidden': Factors(rate=1 / ratio, gradient=ratio, query_factor=queries),
        'output': Factors(initial=ratio**-0.5, rate=1 / ratio),
        'embedding': Factors(rate=ratio**-0.5, gradient=ratio**0.5),
    }[kind]


def _kind(path: str, shape: Shape, narrow: Shape, kinds: Kinds) -> tuple[str, float]:
    """The kind of a parameter, and the ratio that its factors depend on."""
    given = next((kind for pattern, kind in kinds if re.search(pattern, path)), None)
    whole = math.prod(shape) / math.prod(narrow)
    if given is not None or not path.endswith('kernel'):
        return given or 'vector', whole
    inputs, _ = kernel_axes(path, len(shape))
    fan_in = math.prod(shape[i] / narrow[i] for i in inputs)
    if fan_in == 1:
        return 'vector', whole
    return ('hidden' if whole != fan_in else 'output'), fan_in


def _query_factors(path: str, shape: Shape, narrow: Shape) -> np.ndarray | None:
    """(K_0 / K)^1/2 for the part of the queries, 1 for keys and values."""
    match = TO_HEADS.search(path)
    if match is None or 'q' not in match[1] or shape[-1] == narrow[-1]:
        return None
    parts = np.ones((len(shape) - 3) * (1,) + (len(match[1]), 1, 1), np.float32)
    parts[..., match[1].index('q'), 0, 0] = (narrow[-1] / shape[-1]) ** 0.5
    return parts


def base_fields(text: str, known: Iterable[str]) -> dict[str, Any]:
    """The fields of the base model that `mup(...)` gives.

    Args:
      text: of the config.
      known: the fields that models of this kind have.

    Raises:
      UserError: for a text that is no `mup(...)`, or an unknown field.
    """
    call = signatures.parse_call(text, KEY)
    args, widths = signatures.arguments(call)
    if signatures.function_name(call) != 'mup' or args or not widths:
        raise UserError(
            f"{KEY}={text!r}: write 'standard', or 'mup(width=64, ...)' with the widths of the "
            'model that the hyperparameters were tuned on'
        )
    for key in widths:
        if key not in known:
            raise UserError(f'{KEY}: ' + nearest('field of config.model', key, known))
    return widths
