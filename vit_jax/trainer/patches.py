"""The step of evaluations that measure features of patches."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax import Array

from vit_jax import step
from vit_jax.config import objects, schema
from vit_jax.config.run import Model
from vit_jax.errors import UserError
from vit_jax.evaluators.base import Patches
from vit_jax.nn.maps import HIDDEN_STATES, HiddenState, choose_layers, keep_hidden_states
from vit_jax.tasks.base import Batch, Task

PyTree = Any


def make_step(
    model: Any, task: Task, wanted: Patches, *, seed: int = 0, axis_name: str | None = None
) -> Callable[[dict[str, PyTree], Batch], tuple[dict[str, jax.Array], Batch]]:
    """Make a function like `step.make_predict_step`, but of patch features.

    They come from the encoder, as in `vit_jax.embed`.

    Args:
      model, task: Model and task of the config.
      wanted: Features to compute, see `evaluators.base.Evaluator.patches` for the result.
      seed, axis_name: See `step.make_predict_step`.
    """

    def patches_step(variables: dict[str, PyTree], batch: Batch):
        encoder, variables = select_encoder(model, variables)
        norm = encoder.final_norm_of(variables['params'])

        def features(batch: Batch) -> dict[str, jax.Array]:
            inputs = task.inputs(batch)
            if encoder is not model:
                inputs = inputs[:1]  # the images
            apply = step.bind(encoder, task, variables, batch, seed=seed, axis_name=axis_name)
            with nn.intercept_methods(keep_hidden_states):
                _, collections = apply(*inputs, mutable=[HIDDEN_STATES])
            states = encoder.collect_hidden_states(collections.get(HIDDEN_STATES, {}), *inputs)
            return features_of_patches(states, wanted, norm)

        rows = features(batch)
        if wanted.mirrored:
            mirrored = {**batch, 'image': jnp.flip(batch['image'], axis=2)}
            rows['mirrored'] = features(mirrored)['patches']
        frame = jnp.array(batch['image'].shape[1:3], jnp.int32)
        rows['frame'] = jnp.broadcast_to(frame, (len(batch['image']), 2))
        arrays = rows, {name: x for name, x in batch.items() if jnp.ndim(x) <= 2}
        return arrays if axis_name is None else jax.lax.all_gather(arrays, axis_name, tiled=True)

    return patches_step


def select_encoder(model: Any, variables: dict[str, PyTree]) -> tuple[Any, dict[str, PyTree]]:
    """Return the part of a model that other tasks start from, with its variables; all by default.

    Adapters are merged.
    """
    from vit_jax.optim import lora  # here, as few runs have any

    if isinstance(model, lora.Adapted):
        model, variables = model.model, model.merged(variables)
    if (transferable := model.transferable()) is None:
        return model, variables
    keywords, names = transferable
    encoder = objects.make_model(schema.make_section(Model, keywords, 'config.model'))
    return encoder, {'params': {name: variables['params'][name] for name in names}}


def features_of_patches(
    states: Sequence[HiddenState], wanted: Patches, norm: Callable[[Array], Array] | None
) -> dict[str, jax.Array]:
    """Concatenate features of patches of some layers.

    Args:
      states: Tokens after every layer.
      wanted: Layers to choose.
      norm: The model's final norm, of tokens as wide as the last layer's.

    Returns:
      patches: [B n D] in float32.
      grid: int32 [B 2], rows and columns of patches.

    Raises:
      UserError: if the model has no patches on a grid, or the layers have different ones.
    """
    if not states or len(states[-1].grid) != 2:
        raise UserError('the model has no patches on a grid whose features could be measured')
    selected = [states[i] for i in choose_layers(len(states), wanted.layers)]
    grid, width = selected[0].grid, states[-1].tokens.shape[-1]
    if any(state.grid != grid for state in selected):
        raise UserError(f'layers={wanted.layers}: these layers have patches of different sizes')
    features = []
    for state in selected:
        if norm and state.tokens.shape[-1] == width:
            state = dataclasses.replace(state, tokens=norm(state.tokens))
        features.append(state.patches)
        if wanted.class_token:
            token = state.class_token[:, None]
            features.append(jnp.broadcast_to(token, state.patches.shape))
    patches = jnp.concatenate(features, axis=-1).astype(jnp.float32)
    return {
        'patches': patches,
        'grid': jnp.broadcast_to(jnp.array(grid, jnp.int32), (len(patches), 2)),
    }
