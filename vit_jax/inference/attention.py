"""Attention maps of a trained model's layers for given inputs, and pictures of its parameters."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import numpy as np

from vit_jax import step
from vit_jax.errors import UserError, nearest
from vit_jax.interop.trained import TrainedModel
from vit_jax.nn.attention_maps import AttentionMap
from vit_jax.nn.parameter_pictures import ParameterPictures
from vit_jax.viz.attention_pictures import begins


def look(
    run: TrainedModel, batch: Mapping[str, np.ndarray]
) -> tuple[dict[str, Any], list[AttentionMap]]:
    """The model's outputs for a batch, and the attention maps of all its layers.

    Raises:
      UserError: if the model has none.
    """
    if not run.model.attends:
        raise UserError(f'model {run.config.model.name!r} has no attention to draw')

    compiled = jax.jit(step.make_look_step(run.model, run.task))
    outputs, intermediates, inputs = compiled(run.variables, dict(batch))
    return outputs, run.model.attention_maps(intermediates, *inputs)


def parameter_pictures(run: TrainedModel, pattern: str) -> list[ParameterPictures]:
    """Pictures of a model's parameters.

    Args:
      run: the model.
      pattern: a regular expression for the beginning of the names.

    Raises:
      UserError: if the model has no pictures, or none with such a name.
    """
    found = run.model.parameter_pictures(run.params, run.image_size)
    if not found:
        raise UserError(f'model {run.config.model.name!r} has no parameters to draw')
    chosen = [p for p in found if begins(pattern, p.name)]
    if not chosen:
        raise UserError(nearest('parameter', pattern, {p.name for p in found}))
    return chosen
