"""A small masked autoencoder of transformers to compare with, and the outputs of both sides."""

from __future__ import annotations

import functools
from typing import Any

import jax

from helpers.transformers_models import perturbed
from vit_jax.models.mae import Model, fixed_positions

SHAPE = {
    'hidden_size': 16,
    'num_hidden_layers': 2,
    'num_attention_heads': 4,
    'intermediate_size': 24,
    'patch_size': 4,
    'image_size': 12,
    'decoder_hidden_size': 8,
    'decoder_num_hidden_layers': 2,
    'decoder_num_attention_heads': 2,
    'decoder_intermediate_size': 12,
}


def reference(cls: str = 'ViTMAEForPreTraining', **fields: Any) -> Any:
    """The model of transformers: fixed positions, and no parameter is zero, one or like another."""
    import torch
    import transformers

    model = getattr(transformers, cls)(transformers.ViTMAEConfig(**{**SHAPE, **fields}))
    side = model.config.image_size // model.config.patch_size

    def positions(name: str, p: Any) -> Any:
        if name.endswith(('position_embeddings', 'pos_embed')):
            return torch.from_numpy(fixed_positions((side, side), p.shape[-1]))
        return None

    return perturbed(model, positions)


def ours(imported: Any, images: Any, noise: Any) -> Any:
    """Our model's outputs with the parameters that were read, with exact products."""
    model = Model(**{k: v for k, v in imported.model_config.items() if k != 'name'})
    with jax.default_matmul_precision('highest'):
        return _compiled(model)({'params': imported.params}, images, noise)


@functools.cache
def _compiled(model: Model) -> Any:
    return jax.jit(model.apply)
