"""Attention weights of a model's layers, in one form for every model."""

from collections.abc import Mapping
from typing import Any, NamedTuple, Protocol

import flax.linen as nn
import numpy as np
from jax import Array

from vit_jax.array_types import Float


class LaidOutLater(Protocol):
    """Weights that are laid out when numpy asks for them, being too many to hold at once."""

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray: ...


class AttentionMap(NamedTuple):
    """The weights of one attention layer.

    Tokens of an image are the cells of a grid, row by row; those of a text are a grid of one axis.
    If there are more queries or keys than their grid has cells, the first ones are outside of it,
    such as class tokens.

    Attributes:
      name: path of the layer, such as `encoder/block_3`, or `decoder/block_0/cross` for attention
        to the output of another stack.
      weights: of every query over the keys; they sum to one.
      query_grid: (rows, columns) of patches, or (tokens,).
      key_grid: likewise.
    """

    name: str
    weights: Float[Array, 'B H Q K'] | LaidOutLater
    query_grid: tuple[int, ...]
    key_grid: tuple[int, ...]

    @property
    def to_itself(self) -> bool:
        """Whether it is self-attention, by its name."""
        return not self.name.endswith('/cross')


def keep(module: nn.Module, weights: Float[Array, '*B H Q K']) -> None:
    """Keep the weights of a module if `intermediates` is mutable; free otherwise."""
    if module.is_mutable_collection('intermediates'):
        module.sow('intermediates', 'attention', weights)


def collect(
    intermediates: Mapping[str, Any],
    stack: str,
    query_grid: tuple[int, ...],
    key_grid: tuple[int, ...],
    module: str = 'attention',
) -> list[AttentionMap]:
    """The maps that the blocks of a stack have kept, from the first block to the last.

    Args:
      intermediates: the collection that `model.apply(..., mutable='intermediates')` returns.
      stack: path of the stack's module, '/'-joined. Its blocks are `block_0`, `block_1`, ..., or
        scanned `blocks`.
      query_grid: see `AttentionMap`.
      key_grid: see `AttentionMap`.
      module: name of the attention layer in a block. Any but `attention` becomes part of the
        maps' names.

    Raises:
      ValueError: if the blocks have kept nothing.
    """
    kept = intermediates
    for name in stack.split('/'):
        kept = kept.get(name, {})
    if 'blocks' in kept:
        layers = list(kept['blocks'][module]['attention'][0])
    else:
        blocks = sum(name.startswith('block_') for name in kept)
        layers = [kept[f'block_{i}'][module]['attention'][0] for i in range(blocks)]
    if not layers:
        raise ValueError(f'no attention in {stack!r}: apply the model with mutable intermediates')
    suffix = '' if module == 'attention' else f'/{module}'
    return [
        AttentionMap(f'{stack}/block_{i}{suffix}', weights, query_grid, key_grid)
        for i, weights in enumerate(layers)
    ]
