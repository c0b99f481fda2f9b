"""Masked autoencoders with their authors' names (github.com/facebookresearch/mae).

The names are timm's plus a decoder. Heads, norms and targets default to the released models; a
config.json next to the file, as written by `convert`, can change them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from vit_jax.errors import UserError
from vit_jax.interop import names, normalization, torch_layout
from vit_jax.interop.families import _timm, mae, timm_vit
from vit_jax.interop.families._transformers import square
from vit_jax.interop.files import Flat
from vit_jax.interop.trained import TrainedModel, Written, fields

_SOURCE = "MAE in its authors' names"
TABLE: names.Table = (
    *timm_vit.TABLE,
    ('mask_token', 'decoder/mask_token'),
    ('decoder_pos_embed', 'decoder/pos_embed'),
    *((a, f'decoder/{b}') for a, b in mae.PARTS),
    *mae.blocks(timm_vit.TABLE, 'blocks.', 'decoder_blocks.'),
)
_MODEL = {'gelu': 'erf', 'norm_eps': 1e-6, 'qkv_bias': True}  # fixed in the authors' code
_TARGET = (
    'assumed to predict normalized patches of images with the mean and standard deviation of '
    'ImageNet; reconstructions of models that predict pixels (mae_visualize_*) are wrong'
)


def matches(flat: Mapping[str, np.ndarray]) -> bool:
    """Return whether these are the names of an encoder with a decoder."""
    return 'decoder_pred.weight' in flat


def read(flat: Flat, extra: Mapping[str, Any]) -> TrainedModel:
    """Read a MaskedAutoencoderViT.

    Raises:
      UserError: if parameters are unknown, missing or have the wrong shape.
    """
    encoder, decoder = mae.split_halves(flat, ('decoder_', 'mask_token'))
    extra = normalization.with_imagenet_default(extra)
    decoder = torch_layout.split_fused(decoder, _SOURCE)
    heads = extra.get('decoder_num_attention_heads')
    imported = mae.join_halves(timm_vit.read(encoder, extra), decoder, TABLE, heads, _SOURCE)
    normalized = extra.get('norm_pix_loss')
    imported = imported.with_groups(task=mae.task_fields(extra, normalized is not False))
    return imported.with_notes(_TARGET) if normalized is None else imported


def write(trained: TrainedModel) -> Written:
    """Write the arrays of a MaskedAutoencoderViT, and a config.json for `read`.

    Raises:
      UserError: if the authors' code has no such model, or the image size is unknown and the
        positions do not form a square.
    """
    model, flat = fields(trained.model), mae.flatten(trained)
    if unsupported := [f'{key} {model[key]!r}' for key in _MODEL if model[key] != _MODEL[key]]:
        raise UserError(f"the authors' code has no MAE with {', '.join(unsupported)}")
    size = trained.image_size or square(flat, model['patch_size'])
    channels = flat['patch_embed/kernel'].shape[2]
    config = {
        'model_args': {'embed_dim': model['width'], 'num_heads': model['num_heads']},
        'decoder_num_attention_heads': model['decoder_heads'],
        'norm_pix_loss': mae.is_normalized(trained),
        'pretrained_cfg': {
            'input_size': [channels, *size],
            **normalization.keys(trained, channels),
        },
    }
    arrays = torch_layout.join_fused(torch_layout.write(flat, TABLE), _timm.FUSED)
    return Written(arrays, config, mae.target_notes(trained))


WRITERS = {('mae', 'authors'): write}
