"""DETRs, including panoptic ones, with their authors' names (github.com/facebookresearch/detr).

Heads, activations and images default to the paper's; a config.json next to the file, as written by
`convert`, can change them, with the keys of transformers.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import numpy as np

from vit_jax.errors import UserError
from vit_jax.interop import names, torch_layout
from vit_jax.interop.families import _detr, detr
from vit_jax.interop.files import Flat
from vit_jax.interop.trained import TrainedModel, Written, class_names_config
from vit_jax.models.detr import Model

_DEFAULTS = {field.name: field.default for field in dataclasses.fields(Model)}
_MODEL = {'norm_eps': 1e-5, 'dilate': False, 'backbone_norm': 'frozen'}  # fixed in these files
_FUSED = {'self_attn': 'in_proj', 'multihead_attn': 'in_proj'}
_MASKS = ('mask_head.', 'bbox_attention.')


def matches(flat: Mapping[str, np.ndarray]) -> bool:
    """Return whether these are the names of the authors' DETR."""
    later = {'refpoint_embed.weight', 'model.reference_point_embed.weight'}  # RF-DETR, LW-DETR
    named = any(f'{prefix}class_embed.weight' in flat for prefix in ('', 'detr.'))
    return named and not later & flat.keys()


def read(flat: Flat, extra: Mapping[str, Any]) -> TrainedModel:
    """Read a DETR or a DETRsegm; see `detr.read`."""
    return detr.read(flat, extra)


def write(trained: TrainedModel) -> Written:
    """Write a DETR, or a DETRsegm if there are masks, with a config for `read`.

    A `FrozenNorm` becomes a batch norm with mean 0 and standard deviation 1.

    Raises:
      UserError: if the model differs from the paper's.
    """
    model = {**_DEFAULTS, **trained.model_config}
    if unsupported := [f'{key} {model[key]!r}' for key in _MODEL if model[key] != _MODEL[key]]:
        raise UserError(f"files of DETR's authors do not support {', '.join(unsupported)}")
    torch_arrays = torch_layout.write(names.flatten(trained.params), _detr.AUTHORS)
    arrays = _detr.add_statistics(torch_layout.join_fused(torch_arrays, _FUSED))
    if model['name'] != 'detr':
        arrays = {n if n.startswith(_MASKS) else f'detr.{n}': a for n, a in arrays.items()}
    config = {
        'encoder_attention_heads': model['num_heads'],
        'decoder_attention_heads': model['decoder_heads'] or model['num_heads'],
        'activation_function': model['activation'],
        'dropout': model['dropout'],
        **class_names_config(trained.class_names, model['num_classes']),
    }
    resize = _detr.resize_keys(trained.transforms)
    channels = trained.params['backbone']['root']['conv']['kernel'].shape[2]
    return Written(arrays, config, (), _detr.preprocessor(trained, channels, resize))


WRITERS = {(name, 'authors'): write for name in ('detr', 'detr_panoptic')}
