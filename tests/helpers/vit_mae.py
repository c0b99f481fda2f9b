"""A small masked autoencoder of transformers to compare with, and the outputs of both sides."""

from __future__ import annotations

import re
from typing import Any

import jax
import numpy as np

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

    model = getattr(transformers, cls)(transformers.ViTMAEConfig(**{**SHAPE, **fields})).eval()
    generator = torch.Generator().manual_seed(0)
    side = model.config.image_size // model.config.patch_size
    with torch.no_grad():
        for name, p in model.named_parameters():
            if name.endswith(('position_embeddings', 'pos_embed')):
                p.copy_(torch.from_numpy(fixed_positions((side, side), p.shape[-1])))
            else:
                mean = float(bool(re.search(r'norm\w*\.weight$', name)))
                p.copy_(mean + 0.2 * torch.randn(p.shape, generator=generator))
    return model


def theirs(model: Any, images: Any, noise: Any) -> Any:
    """What a model of transformers returns for images [B, H, W, C] and noise [B, N]."""
    import torch

    pixels = torch.from_numpy(np.array(images).transpose(0, 3, 1, 2))
    with torch.no_grad():
        return model(pixels, noise=torch.from_numpy(np.array(noise)))


def ours(imported: Any, images: Any, noise: Any) -> Any:
    """What our model returns with the parameters that were read, with exact products."""
    model = Model(**{k: v for k, v in imported.model.items() if k != 'name'})
    with jax.default_matmul_precision('highest'):
        return jax.jit(model.apply)({'params': imported.params}, images, noise)
