"""DINOv2 of transformers, with or without registers: safetensors and config.json."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping
from typing import Any

import numpy as np

from vit_jax.errors import UserError
from vit_jax.interop import names
from vit_jax.interop.families import _transformers
from vit_jax.interop.families._transformers import HEAD, MLPS, REGISTERS, Fields, Form
from vit_jax.interop.files import Flat
from vit_jax.interop.trained import TrainedModel

_LAYER = 'encoder.layer'
TABLE: names.Table = (
    ('embeddings.register_tokens', 'register_tokens'),
    *_transformers.blocks(
        _LAYER,
        *((norm, norm) for norm in ('norm1', 'norm2')),
        *((f'layer_scale{i}.lambda1', f'layer_scale{i}') for i in (1, 2)),
        *((f'mlp.{part}', f'mlp/{part}') for part in ('gate', 'fc1', 'fc2')),
        ('mlp.weights_out', 'mlp/fc2'),
    ),
    *_transformers.VIT_TABLE,
)
_KIND = _transformers.Kind(
    'transformers DINOv2',
    ('dinov2', 'dinov2_with_registers'),
    TABLE,
    prefixes=('dinov2.', 'dinov2_with_registers.'),
    unused=('embeddings.mask_token',),  # for pretraining
    defaults={'layer_norm_eps': 1e-6, 'num_attention_heads': 12},
)


def matches(flat: Mapping[str, np.ndarray]) -> bool:
    """Return whether these are the names of such a model."""
    plain_names = {_KIND.plain(name) for name in flat}
    embedding = 'embeddings.patch_embeddings.projection.weight'
    return {
        embedding,
        f'{_LAYER}.0.norm1.weight',
        f'{_LAYER}.0.layer_scale1.lambda1',
    } <= plain_names


def read(flat: Flat, extra: Mapping[str, Any]) -> TrainedModel:
    """Read a Dinov2Model, whose `pooler_output` is our `pre_logits`, or a
    Dinov2ForImageClassification, which classifies the class token and the mean of the patches.

    Raises:
      UserError: if parameters are unknown, missing or have the wrong shape, or contradict the
        config.
    """
    fields = {'pool': 'cls_patches'} if 'classifier.weight' in flat else {}
    imported = _transformers.read(_KIND, _split_gates(_KIND.used(flat)), extra, fields=fields)
    positions = 'antialiased' if 'register_tokens' in imported.params else 'bicubic'
    return dataclasses.replace(imported, positions=positions)


def _split_gates(flat: Flat) -> Flat:
    """Split the layer of gates and values; gates come first."""
    parts: Flat = {}
    for name, array in flat.items():
        if '.mlp.weights_in.' in name:
            gate, value = np.split(array, 2)
            parts[name.replace('weights_in', 'gate')] = gate
            parts[name.replace('weights_in', 'fc1')] = value
        else:
            parts[name] = array
    return parts


def _join_gates(arrays: Flat) -> Flat:
    """Invert `_split_gates`, and add the unused token of masked patches."""
    token = arrays['embeddings.cls_token'][0]
    joined: Flat = {'embeddings.mask_token': np.zeros_like(token)}
    for name, array in arrays.items():
        if '.mlp.gate.' in name:
            value = arrays[name.replace('gate', 'fc1')]
            joined[name.replace('gate', 'weights_in')] = np.concatenate([array, value])
        elif (gate := re.sub(r'mlp\.fc\d', 'mlp.gate', name)) == name or gate not in arrays:
            joined[name] = array
        elif '.fc2.' in name:
            joined[name.replace('fc2', 'weights_out')] = array
    return joined


def _config(model: Fields) -> dict[str, Any]:
    """Return entries for registers and MLPs, whose width is a multiple of the tokens'.

    Raises:
      UserError: if the width is not such a multiple.
    """
    width, gated = model['width'], model['mlp'] == 'swiglu'
    for ratio in range(1, 65):
        # With gates, two thirds of it, rounded up to a multiple of 8.
        mlp_dim = (int(width * ratio * 2 / 3) + 7) // 8 * 8 if gated else width * ratio
        if mlp_dim == model['mlp_dim']:
            registers = {'num_register_tokens': model['registers']} if model['registers'] else {}
            return {'mlp_ratio': ratio, 'use_swiglu_ffn': gated, **registers}
    raise UserError(
        f"transformers' DINOv2 has no mlp_dim {model['mlp_dim']} at width {width}: it is a whole "
        'multiple of the width there; write an .npz file, or for timm'
    )


def _forms(name: str, model_type: str, fields: Mapping[str, str]) -> tuple[Form, Form]:
    """Return the forms without a head and as a classifier."""

    def form(suffix: str, prefix: str, more: Mapping[str, str]) -> Form:
        return Form(
            _KIND,
            f'{name}{suffix}',
            prefix,
            {**MLPS, **fields, **more},
            config=_config,
            named=_join_gates,
            model_type=model_type,
        )

    classifier = form('ForImageClassification', f'{model_type}.', {**HEAD, 'pool': 'cls_patches'})
    return form('Model', '', {}), classifier


FORMS = (
    *_forms('Dinov2', 'dinov2', {}),
    *_forms('Dinov2WithRegisters', 'dinov2_with_registers', REGISTERS),
)
