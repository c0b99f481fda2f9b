"""Text towers of transformers: CLIP, SigLIP and SigLIP 2; safetensors and config.json.

`FILE:text` reads the text tower of a file with both towers. The output of the head, CLIP's
projection into the space shared with images, is the embedding of the text.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import numpy as np

from vit_jax.data.batches import ArraySpec
from vit_jax.errors import UserError
from vit_jax.interop import names, texts
from vit_jax.interop.families import _text
from vit_jax.interop.files import Flat
from vit_jax.interop.trained import TrainedModel, Written, fields

_PREFIX = 'text_model.'
_UNUSED = 'embeddings.position_ids'
_TYPES = {
    'CLIP': ('clip', 'metaclip_2', 'clipseg'),
    'SigLIP': ('siglip', 'siglip2'),
}
_KINDS = {'CLIP': _text.CLIP, 'SigLIP': _text.SIGLIP}


def matches(flat: Mapping[str, np.ndarray]) -> bool:
    """Return whether these are the names of such a tower without an image tower."""
    names_in_tower = {name.removeprefix(_PREFIX) for name in flat}
    required = {'encoder.layers.0.layer_norm1.weight', 'embeddings.token_embedding.weight'}
    return required <= names_in_tower and not any(name.startswith('vision_model.') for name in flat)


def read(flat: Flat, extra: Mapping[str, Any]) -> TrainedModel:
    """Read a CLIPTextModel (its `pooler_output` is our `pre_logits`), with or without projection;
    or a SiglipTextModel or Siglip2TextModel (its `pooler_output` is our `logits`).

    Raises:
      UserError: if parameters are unknown, missing or have the wrong shape, or contradict the
        config.
    """
    parts = {name.removeprefix(_PREFIX): array for name, array in flat.items()}
    parts.pop(_UNUSED, None)
    kind = 'SigLIP' if 'head.weight' in parts else 'CLIP'
    source = f'transformers {kind} text tower'
    model_type = extra.get('model_type', _TYPES[kind][0])
    if model_type.removesuffix('_text_model') not in _TYPES[kind]:
        raise UserError(f'{source}: config.json describes a {model_type!r}, not a {kind}')
    config = {**extra, **(extra.get('text_config') or {})} if 'model_type' in extra else None
    prefix = _PREFIX if any(name.startswith(_PREFIX) for name in flat) else ''
    params, model = _text.read(_KINDS[kind], parts, config, source, prefix)
    imported = TrainedModel.from_file(
        params, {'name': 'text_encoder', **model}, None, source, task={'name': 'classify_text'}
    )
    spec = {texts.FIELD: ArraySpec((model['length'],), np.dtype(np.int32))}
    return dataclasses.replace(imported, spec=spec)


def write(trained: TrainedModel) -> Written:
    """Write the files of a CLIPTextModel, with its projection if any, or of a SiglipTextModel.

    Raises:
      UserError: if transformers has no such model.
    """
    model = fields(trained.model)
    kind = 'CLIP' if model['causal'] else 'SigLIP'
    name, model_prefix = (
        ('Siglip', 'siglip') if kind == 'SigLIP' else _text.clip_names(model['eos'])
    )
    form = f'{name}TextModel'
    if kind == 'CLIP' and model['num_classes']:
        form += 'WithProjection'
    if unsupported := _KINDS[kind].misfits(model):
        raise UserError(f'{form} of transformers has no {", ".join(unsupported)}')
    flat = _text.to_transformers(names.flatten(trained.params), _KINDS[kind].table)
    arrays = {_text.full(_PREFIX, name): array for name, array in flat.items()}
    config = {'model_type': f'{model_prefix}_text_model', 'architectures': [form]}
    return Written(arrays, config | _text.config(model))


WRITERS = {('text_encoder', 'transformers'): write}
