"""A small LW-DETR of transformers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from helpers.rf_detr import GROUPS, SIDE
from helpers.transformers_models import perturbed


def reference(
    scales: Sequence[float] = (2.0, 0.5), width: int = 16, windows: int = 2, side: int = SIDE
) -> Any:
    """A detector with maps of these scales in training mode, but for its batch norms."""
    import torch
    import transformers

    torch.manual_seed(0)
    backbone = transformers.LwDetrViTConfig(
        **{'hidden_size': width, 'num_hidden_layers': 4, 'num_attention_heads': 2, 'mlp_ratio': 2},
        **{'patch_size': 4, 'image_size': side, 'pretrain_image_size': side},
        **{'num_windows': windows**2, 'window_block_indices': [0, 2], 'out_indices': [1, 3]},
    )
    config = transformers.LwDetrConfig(
        **{'backbone_config': backbone, 'd_model': 32, 'decoder_layers': 2, 'num_labels': 3},
        **{'decoder_self_attention_heads': 2, 'decoder_cross_attention_heads': 4},
        **{'decoder_n_points': 2, 'decoder_ffn_dim': 16, 'num_queries': 5, 'group_detr': GROUPS},
        projector_scale_factors=list(scales),
    )
    model = perturbed(transformers.LwDetrForObjectDetection(config)).train()
    for module in model.modules():
        if isinstance(module, torch.nn.BatchNorm2d):
            module.eval().requires_grad_(False)
            module.running_mean.normal_()
            module.running_var.uniform_(0.5, 2)
    return model
