"""A small ViT of transformers to compare with, and the outputs of both sides."""

from __future__ import annotations

import functools
from typing import Any

import jax
import numpy as np

from helpers.transformers_models import perturbed
from vit_jax.interop.trained import TrainedModel

SHAPE = {
    'hidden_size': 16,
    'num_hidden_layers': 2,
    'num_attention_heads': 4,
    'intermediate_size': 24,
    'patch_size': 4,
    'image_size': 12,
    'num_labels': 5,
}


def reference(cls: str = 'ViTForImageClassification', **fields: Any) -> Any:
    """The model of transformers, with parameters none of which is zero, one or like another."""
    import transformers

    return perturbed(getattr(transformers, cls)(transformers.ViTConfig(**{**SHAPE, **fields})))


def apply(model: Any, params: Any, images: Any) -> Any:
    """Our model's outputs, with exact matmuls."""
    with jax.default_matmul_precision('highest'):
        return _compiled(model)({'params': params}, images)


def apply_with_states(model: Any, params: Any, images: Any, **options: Any) -> Any:
    """Our model's outputs and hidden states, with exact matmuls."""
    with jax.default_matmul_precision('highest'):
        outputs, states = _compiled_states(model, tuple(options.items()))(
            {'params': params}, images
        )
    return outputs, states


@functools.cache
def _compiled(model: Any) -> Any:
    return jax.jit(model.apply)


@functools.cache
def _compiled_states(model: Any, options: tuple[tuple[str, Any], ...]) -> Any:
    def run(variables: Any, images: Any) -> Any:
        outputs, states = model.hidden_states(variables, images, **dict(options))
        return outputs, [state.tokens for state in states]

    return jax.jit(run)


def ours(imported: TrainedModel, images: Any) -> Any:
    """The outputs of the model that was read, for images in [-1, 1]."""
    return apply(imported.model, imported.params, normalized(imported, images))


def normalized(imported: TrainedModel, images: Any) -> Any:
    """The input of a model for images in [-1, 1]."""
    if imported.task.normalization is None:
        return images
    mean, std = map(np.asarray, imported.task.normalization)
    return ((np.asarray(images) + 1) / 2 - mean).astype(np.float32) / std.astype(np.float32)
