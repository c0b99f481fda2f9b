"""DETRs, also panoptic ones, in their authors' names (github.com/facebookresearch/detr).

The authors' files are pickled: save the arrays of `model` as safetensors first. Heads, activations
and images are those of the paper, unless a config.json beside the file, as `convert` writes it,
names others in the words of transformers.
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
_MODEL = {'norm_eps': 1e-5, 'dilate': False, 'backbone_norm': 'frozen'}  # of the files
_FUSED = {'self_attn': 'in_proj', 'multihead_attn': 'in_proj'}
_MASKS = ('mask_head.', 'bbox_attention.')


def matches(flat: Mapping[str, np.ndarray]) -> bool:
    """Whether these are the names of a DETR of the authors."""
    return any(f'{prefix}class_embed.weight' in flat for prefix in ('', 'detr.'))


def read(flat: Flat, extra: Mapping[str, Any]) -> TrainedModel:
    """A DETR or a DETRsegm; see `detr.read`."""
    return detr.read(flat, extra)


def write(trained: TrainedModel) -> Written:
    """Make the arrays of a DETR, or of a DETRsegm if there are masks, and configs for `read`.

    A `FrozenNorm` becomes a batch norm with mean 0 and standard deviation 1.

    Raises:
      UserError: if the model is not the paper's.
    """
    model = {**_DEFAULTS, **trained.model_config}
    if lacking := [f'{key} {model[key]!r}' for key in _MODEL if model[key] != _MODEL[key]]:
        raise UserError(f"files in the names of DETR's authors cannot have {', '.join(lacking)}")
    parts = torch_layout.write(names.flattened(trained.params), _detr.AUTHORS)
    arrays = _detr.with_statistics(torch_layout.fused(parts, _FUSED))
    if model['name'] != 'detr':
        arrays = {n if n.startswith(_MASKS) else f'detr.{n}': a for n, a in arrays.items()}
    config = {
        'encoder_attention_heads': model['num_heads'],
        'decoder_attention_heads': model['decoder_heads'] or model['num_heads'],
        'activation_function': model['activation'],
        'dropout': model['dropout'],
        **class_names_config(trained.class_names, model['num_classes']),
    }
    resize = _detr.resizing(trained.transforms) or {}
    resize.pop('rounding', None)
    channels = trained.params['backbone']['root']['conv']['kernel'].shape[2]
    return Written(arrays, config, (), _detr.preprocessor(trained, channels, resize or None))


WRITERS = {(name, 'authors'): write for name in ('detr', 'detr_panoptic')}
