"""A small ViT of transformers to compare with, and the outputs of both sides."""

from __future__ import annotations

import functools
from typing import Any

import jax

from helpers.transformers_models import perturbed
from vit_jax.interop.trained import TrainedModel
from vit_jax.models.vit import Model

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


@functools.cache
def _compiled(model: Any) -> Any:
    return jax.jit(model.apply)


def ours(imported: TrainedModel, images: Any) -> Any:
    """Our model's outputs with the parameters that were read."""
    model = Model(**{k: v for k, v in imported.model_config.items() if k != 'name'})
    return apply(model, imported.params, images)
