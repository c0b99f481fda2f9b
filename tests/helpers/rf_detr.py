"""A small RF-DETR of transformers, and a batch with objects for it."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np

from helpers.transformers_models import perturbed

GROUPS, SIDE = 3, 32


def reference() -> Any:
    """A detector in training mode, so that it has all groups; nothing is dropped."""
    import torch
    import transformers

    torch.manual_seed(0)
    backbone = transformers.RfDetrDinov2Config(
        **{'hidden_size': 16, 'num_hidden_layers': 3, 'num_attention_heads': 2, 'mlp_ratio': 2},
        **{'patch_size': 4, 'image_size': SIDE, 'num_windows': 2},
        out_features=['stage1', 'stage3'],
    )
    config = transformers.RfDetrConfig(
        **{'backbone_config': backbone, 'd_model': 32, 'decoder_layers': 2, 'num_labels': 3},
        **{'decoder_self_attention_heads': 2, 'decoder_cross_attention_heads': 4},
        **{'decoder_n_points': 2, 'decoder_ffn_dim': 16, 'num_queries': 5, 'group_detr': GROUPS},
        dropout=0.0,
    )
    return perturbed(transformers.RfDetrForObjectDetection(config)).train()


def batch() -> dict[str, Any]:
    """Two normalized images, the second padded, with three objects and with one."""
    rng = np.random.default_rng(0)
    mask = np.ones((2, SIDE, SIDE), bool)
    mask[1, 24:], mask[1, :, 28:] = False, False
    corners = np.sort(rng.uniform(0, 24, (2, 3, 2, 2)), axis=2).reshape(2, 3, 4)
    return {
        'image': jnp.asarray(rng.normal(size=(2, SIDE, SIDE, 3)) * mask[..., None], jnp.float32),
        'pixel_mask': jnp.asarray(mask),
        'boxes': jnp.asarray(corners, jnp.float32),
        'labels': jnp.asarray(rng.integers(3, size=(2, 3)), jnp.int32),
        'object_mask': jnp.asarray([[True, True, True], [True, False, False]]),
    }
