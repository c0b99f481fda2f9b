"""Where a trained model looks: the attention maps of its layers for given inputs."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np

from vit_jax import step
from vit_jax.errors import UserError, nearest
from vit_jax.inference.load import Run
from vit_jax.nn.attention_maps import AttentionMap
from vit_jax.nn.parameter_pictures import ParameterPictures
from vit_jax.ops.decoding import BOS


def look(run: Run, batch: Mapping[str, np.ndarray]) -> tuple[dict[str, Any], list[AttentionMap]]:
    """The model's outputs for a batch, and the attention maps of all its layers.

    Raises:
      UserError: if the model offers none.
    """
    attention_maps = getattr(run.model, 'attention_maps', None)
    if attention_maps is None:
        raise UserError(f'model {run.config.model.name!r} has no attention to draw')

    compiled = jax.jit(step.make_look_step(run.model, run.task))
    outputs, intermediates, inputs = compiled(run.variables, dict(batch))
    return outputs, attention_maps(intermediates, *inputs)


def parameter_pictures(run: Run, pattern: str) -> list[ParameterPictures]:
    """What a model offers of its parameters to look at.

    Args:
      run: the model.
      pattern: a regular expression that the names begin with.

    Raises:
      UserError: if the model offers nothing, or no name begins so.
    """
    offer = getattr(run.model, 'parameter_pictures', None)
    if offer is None:
        raise UserError(f'model {run.config.model.name!r} has no parameters to draw')
    found = offer(run.variables['params'], run.input_size)
    chosen = [p for p in found if _begins(pattern, p.name)]
    if not chosen:
        raise UserError(nearest('parameter', pattern, {p.name for p in found}))
    return chosen


def choose_stack(maps: Sequence[AttentionMap], pattern: str = '') -> list[AttentionMap]:
    """The maps of one stack of layers: those that differ in the numbers of their names alone.

    Args:
      maps: of a model, in the order of its layers.
      pattern: a regular expression that the names begin with, `decoder/.*cross`. Of several
        stacks the last is taken, which in a decoder looks at the input.

    Raises:
      UserError: if no name begins so.
    """
    chosen = [m for m in maps if _begins(pattern, m.name)]
    if not chosen:
        raise UserError(nearest('attention map', pattern, {stack_name(m) for m in maps}))
    last = chosen[-1]
    alike = (stack_name(last), *last[2:])
    return [m for m in chosen if (stack_name(m), *m[2:]) == alike]


def _begins(pattern: str, name: str) -> bool:
    """Whether a name begins with a regular expression; raises UserError if it is none."""
    try:
        return re.match(pattern, name) is not None
    except re.error as e:
        raise UserError(f'{pattern!r} is no regular expression: {e}') from e


def stack_name(attention_map: AttentionMap) -> str:
    """`decoder/block_3/cross` -> `decoder/block/cross`."""
    return re.sub(r'_\d+(?=/|$)', '', attention_map.name)


def stacked(maps: Sequence[AttentionMap], example: int = 0) -> np.ndarray:
    """The weights [L H Q K] of a stack for one example of the batch."""
    return np.stack([np.asarray(m.weights)[example] for m in maps])


def sentence_axes(
    attention_map: AttentionMap, source: np.ndarray, target: np.ndarray
) -> tuple[tuple[str, np.ndarray], tuple[str, np.ndarray]]:
    """(name, ids) of the tokens that look, and of those that are looked at, in a translation.

    Args:
      attention_map: of an encoder-decoder, whose names tell the sides.
      source: ids [n].
      target: ids [m]. The row of a token is that of the decoder before it reads the token.
    """
    if attention_map.name.startswith('encoder'):
        return ('source', source), ('source', source)
    if attention_map.name.endswith('cross'):
        return ('target', target), ('source', source)
    return ('target', target), ('target before', np.append(np.int32(BOS), target[:-1]))
