"""Maximal update parametrization: hyperparameters tuned on a narrow model hold for a wide one.

Yang et al., 2022, arXiv:2203.03466, table 3, for Adam and similar optimizers. Each parameter is
compared with its counterpart in a narrow base model, for which nothing changes. With r, the ratio
of fan-ins (or of widths, for vectors), the factors are

    kind        initial values   learning rate   gradient
    vector      1                1               r
    hidden      1                1/r             r
    output      r^-1/2           1/r             1
    embedding   1                r^-1/2          r^1/2

Vectors are biases, norms, positions and kernels with inputs of fixed size, such as patches. Both
inputs and outputs of hidden kernels grow; only the inputs of output kernels grow. The column of
initial values assumes kernels with a variance of about 1/fan-in, as in the models of this package.
An embedding is a table that its model multiplies by sqrt(width).

A gradient factor does not change Adam's updates, but divides Adam's epsilon, which would otherwise
exceed the gradients of wide models (Everett et al., 2024, arXiv:2407.05872). The product of
learning rate and weight decay is kept. Attention scores are divided by the head width instead of
its root: factors of the query projections do this, so the model is unchanged.
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
Kinds = Sequence[tuple[str, str]]  # path pattern and kind

KINDS = ('vector', 'hidden', 'output', 'embedding', 'tied')
KEY = 'config.optim.parametrization'
# Optimizers whose updates do not depend on the scale of the gradients.
OPTIMIZERS = (
    *('adabelief', 'adam', 'adamax', 'adamaxw', 'adamw', 'adan', 'amsgrad', 'lion', 'nadam'),
    *('nadamw', 'radam', 'ademamix', 'adopt'),
)


@dataclasses.dataclass(frozen=True)
class Factors:
    """Factors of one parameter.

    Attributes:
      initial: Factor of the initial values.
      rate: Factor of the learning rate.
      gradient: Factor of the gradient.
      query_factor: Factor of values and updates of queries, 1 for keys and values, in an array that
        broadcasts against the parameter; None if the parameter projects no queries, or heads are
        as wide as in the base model.
    """

    initial: float = 1.0
    rate: float = 1.0
    gradient: float = 1.0
    query_factor: np.ndarray | None = None

    def update_factor(self) -> float | np.ndarray:
        """Return the factor of the update."""
        return self.rate if self.query_factor is None else self.rate * self.query_factor

    def value_factor(self) -> float | np.ndarray:
        """Return the factor of the initial values."""
        return self.initial if self.query_factor is None else self.initial * self.query_factor


def factors(params: PyTree, base: PyTree, kinds: Kinds = ()) -> dict[str, Factors]:
    """Compute the factors of each parameter, by path.

    Args:
      params: Parameters, or their shapes.
      base: Parameters of the base model, which differs only in widths, or their shapes.
      kinds: Kinds of parameters whose shapes do not determine them; the first match counts.

    Raises:
      UserError: if the base model has different parameters, or one matrix both embeds tokens and
        scores them, for which no factors are right.
    """
    leaves, base_leaves = param_paths(params), param_paths(base)
    if differ := sorted(leaves.keys() ^ base_leaves.keys()):
        raise UserError(
            f'config.optim.parametrization: {differ[0]} is in only one of the model and its base '
            'model: give a base model that differs in widths, not in depth'
        )
    return {path: _factors(path, leaf, base_leaves[path], kinds) for path, leaf in leaves.items()}


def scale_initial(params: PyTree, by_path: Mapping[str, Factors]) -> PyTree:
    """Multiply initial values by their factors."""

    def value(keys: Any, x: jax.Array) -> jax.Array:
        return x * np.asarray(by_path[path_name(keys)].value_factor(), x.dtype)

    return jax.tree_util.tree_map_with_path(value, params)


def decay_rules(
    by_path: Mapping[str, Factors], mults: Sequence[tuple[str, float]]
) -> list[tuple[str, float]]:
    """Compute weight decay multipliers that cancel the learning rate multipliers.

    Args:
      by_path: Factors of each parameter.
      mults: The user's pairs of a pattern and a multiplier; the first match counts.
    """
    groups: dict[float, list[str]] = {}
    for path, factor in by_path.items():
        requested = next((mult for pattern, mult in mults if re.search(pattern, path)), 1.0)
        groups.setdefault(requested / factor.rate, []).append(path)
    groups.pop(1.0, None)
    return [(f'^({"|".join(map(re.escape, paths))})$', mult) for mult, paths in groups.items()]


def _factors(path: str, leaf: Any, base: Any, kinds: Kinds) -> Factors:
    stacked = is_stacked(path, leaf)
    shape, narrow = tuple(leaf.shape)[stacked:], tuple(base.shape)[stacked:]
    if len(leaf.shape) != len(base.shape) or (stacked and leaf.shape[0] != base.shape[0]):
        raise UserError(
            f'config.optim.parametrization: {path} has shape {tuple(leaf.shape)}, and '
            f'{tuple(base.shape)} in the base model, which may differ in widths only'
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
    """Return the kind of a parameter, and the ratio for its factors."""
    declared = next((kind for pattern, kind in kinds if re.search(pattern, path)), None)
    size_ratio = math.prod(shape) / math.prod(narrow)
    if declared is not None or not path.endswith('kernel'):
        return declared or 'vector', size_ratio
    inputs, _ = kernel_axes(path, len(shape))
    fan_in = math.prod(shape[i] / narrow[i] for i in inputs)
    if fan_in == 1:
        return 'vector', size_ratio
    return ('hidden' if size_ratio != fan_in else 'output'), fan_in


def _query_factors(path: str, shape: Shape, narrow: Shape) -> np.ndarray | None:
    """Return (K_0 / K)^1/2 for queries, 1 for keys and values."""
    match = TO_HEADS.search(path)
    if match is None or 'q' not in match[1] or shape[-1] == narrow[-1]:
        return None
    parts = np.ones((len(shape) - 3) * (1,) + (len(match[1]), 1, 1), np.float32)
    parts[..., match[1].index('q'), 0, 0] = (narrow[-1] / shape[-1]) ** 0.5
    return parts


def base_fields(text: str, fields: Iterable[str]) -> dict[str, Any]:
    """Parse the base model's fields from `mup(...)`.

    Args:
      text: Text of the config.
      fields: Fields of models of this kind.

    Raises:
      UserError: if the text is not `mup(...)`, or a field is unknown.
    """
    call = signatures.parse_call(text, KEY)
    args, widths = signatures.arguments(call)
    if signatures.function_name(call) != 'mup' or args or not widths:
        raise UserError(
            f"{KEY}={text!r}: write 'standard', or 'mup(width=64, ...)' with the widths of the "
            'model that the hyperparameters were tuned on'
        )
    for key in widths:
        if key not in fields:
            raise UserError(f'{KEY}: ' + nearest('field of config.model', key, fields))
    return widths
