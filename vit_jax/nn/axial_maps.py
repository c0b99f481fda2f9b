"""Attention maps of axial attention: weights of rows and columns as maps over the image."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from jax import Array

from vit_jax.array_types import Float
from vit_jax.nn.attention_maps import AttentionMap


class AxialMap:
    """Weights [B H Q K] of all places of a grid, laid out only when numpy asks for them.

    They are zero except on a line, and too many for a large grid to hold those of all layers.
    """

    def __init__(self, weights: Float[Array, 'B L H N N'], axis: str) -> None:
        self._weights, self._axis = weights, axis

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        weights = np.asarray(self._weights, dtype)
        batch, lines, heads, tokens, _ = weights.shape
        grid = (lines, tokens) if self._axis == 'row' else (tokens, lines)
        laid = np.zeros((batch, heads, *grid, *grid), weights.dtype)
        for line in range(lines):
            place = (line, slice(None)) if self._axis == 'row' else (slice(None), line)
            laid[(slice(None), slice(None), *place, *place)] = weights[:, line]
        return laid.reshape(batch, heads, lines * tokens, lines * tokens)


def axial_maps(
    intermediates: Mapping[str, Any], stacks: Sequence[str], grid: tuple[int, int], every: int = 1
) -> list[AttentionMap]:
    """The maps kept by the layers of stacks, named `encoder/row_0`, `encoder/column_0`, ...

    Args:
      intermediates: the collection that `model.apply(..., mutable='intermediates')` returns.
      stacks: names of modules with the layers `rows_0`, `columns_0`, `rows_1`, ...
      grid: rows and columns of places.
      every: number of grids of an example, of which the first is taken.

    Raises:
      ValueError: if nothing was kept.
    """
    found = []
    for stack in stacks:
        for name, layer in sorted(intermediates.get(stack, {}).items(), key=_order):
            axis, number = _axis_and_number(name)
            weights = AxialMap(layer['attention']['attention'][0][::every], axis)
            found.append(AttentionMap(f'{stack}/{axis}_{number}', weights, grid, grid))
    if not found:
        raise ValueError(f'no attention in {stacks}: apply the model with mutable intermediates')
    return found


def _order(item: tuple[str, Any]) -> tuple[int, bool]:
    """Sorting key: by number, rows before columns."""
    axis, number = _axis_and_number(item[0])
    return number, axis == 'column'


def _axis_and_number(name: str) -> tuple[str, int]:
    """Parse `rows_1` to ('row', 1)."""
    axis, _, number = name.rpartition('_')
    return axis.removesuffix('s'), int(number)
