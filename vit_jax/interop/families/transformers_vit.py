"""ViT, DeiT, MSN and I-JEPA of transformers: safetensors with the names of versions 4 and 5.

Non-square grids, GELU and epsilons come from config.json, by default from transformers.ViTConfig.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping
from typing import Any

import numpy as np

from vit_jax.interop import names
from vit_jax.interop.families import (
    _transformers,
    transformers_beit,
    transformers_dinov2,
    transformers_dinov3,
    transformers_vision_tower,
    transformers_yolos,
)
from vit_jax.interop.families._transformers import HEAD, POOLER, Form, pooler
from vit_jax.interop.files import Flat
from vit_jax.interop.trained import TrainedModel, Written

POSITIONS = 'bicubic'
_PREFIX = 'vit.'


_KINDS = (
    _transformers.Kind(
        'transformers ViT',
        ('vit', 'vit_mae'),
        _transformers.VIT_TABLE,
        prefixes=(_PREFIX,),
        unused=('embeddings.mask_token',),  # for pretraining
        defaults={'layer_norm_eps': 1e-12},
    ),
    _transformers.Kind(
        'transformers MSN',
        ('vit_msn',),
        _transformers.VIT_TABLE,
        prefixes=(_PREFIX,),
        unused=('embeddings.mask_token',),
        defaults={'layer_norm_eps': 1e-6, 'num_attention_heads': 12},
    ),
    _transformers.Kind(
        'transformers DeiT',
        ('deit',),
        (
            *_transformers.VIT_TABLE,
            ('embeddings.distillation_token', 'register_tokens'),
            ('cls_classifier', 'head'),
            ('distillation_classifier', 'head/distillation'),
        ),
        prefixes=('deit.',),
        unused=('embeddings.mask_token',),
        defaults={'layer_norm_eps': 1e-12, 'num_attention_heads': 12},
    ),
    _transformers.Kind(
        'transformers I-JEPA',
        ('ijepa',),
        _transformers.VIT_TABLE,
        prefixes=('ijepa.',),
        unused=('embeddings.mask_token', 'pooler.'),
        defaults={'layer_norm_eps': 1e-12, 'num_attention_heads': 12},
    ),
)
# Parts that identify them.
_PLAIN = _transformers.Kind('', (), (), tuple(p for kind in _KINDS for p in kind.prefixes))
_EMBEDDING = 'embeddings.patch_embeddings.projection.weight'
_NORMS = ('encoder.layer.0.layernorm_before.weight', 'layers.0.layernorm_before.weight')
# Parts that only other families have.
_OTHERS = ('decoder.decoder_pred.weight', 'embeddings.detection_tokens', 'pooler.layernorm.weight')


def matches(flat: Mapping[str, np.ndarray]) -> bool:
    """Return whether these are the names of such a model, not of a family with more parts."""
    plain_names = {_PLAIN.plain(name) for name in flat}
    is_vit = _EMBEDDING in plain_names and not plain_names.isdisjoint(_NORMS)
    lambdas = any(re.search(r'\.0\.(lambda_1|layer_scale1)', name) for name in plain_names)
    return is_vit and not lambdas and plain_names.isdisjoint(_OTHERS)


def read(flat: Flat, extra: Mapping[str, Any]) -> TrainedModel:
    """Read a ViTModel, whose pooler is our `pre_logits`, a ViTForImageClassification or a
    ViTMAEModel; or the same of DeiT, MSN or I-JEPA.

    The distillation token of a DeiT, with its position, becomes a register unless it has a
    classifier.

    Raises:
      UserError: if parameters are unknown, missing or have the wrong shape, or contradict the
        config.
    """
    model_type = extra.get('model_type')
    by_type = (kind for kind in _KINDS if model_type in kind.types)
    by_name = (k for k in _KINDS if any(name.startswith(k.prefixes) for name in flat))
    kind = next(by_type, None) or next(by_name, _KINDS[0])
    used = kind.used(flat)
    if 'classifier.weight' in flat:  # the pooler is unused
        used = {n: array for n, array in used.items() if not kind.plain(n).startswith('pooler.')}
    if 'distillation_classifier.weight' in flat:  # both tokens are read
        rows = ((a, b.replace('register_tokens', 'dist_token')) for a, b in kind.table)
        return _transformers.read(dataclasses.replace(kind, table=tuple(rows)), used, extra, rows=2)
    distilled = any(name.endswith('embeddings.distillation_token') for name in flat)
    return _transformers.read(kind, used, extra, rows=2 if distilled else 1)


_VIT, _MSN, _DEIT, _IJEPA = _KINDS
_DEIT_TOKEN = {'registers': '1'}
_TEACHER: names.Table = (
    ('embeddings.distillation_token', 'dist_token'),
    ('distillation_classifier', 'head/distillation'),
    ('cls_classifier', 'head'),
)
_CLASSIFIER = 'ForImageClassification'
FORMS = (
    Form(_VIT, f'ViT{_CLASSIFIER}', _PREFIX, HEAD),
    Form(_VIT, 'ViTModel', '', POOLER, config=pooler),
    Form(_IJEPA, f'IJepa{_CLASSIFIER}', 'ijepa.', {**HEAD, 'pool': 'gap'}),
    Form(_IJEPA, 'IJepaModel', '', {'pool': 'gap'}),
    Form(_DEIT, f'DeiT{_CLASSIFIER}WithTeacher', 'deit.', {**HEAD, 'pool': 'distilled'}, _TEACHER),
    Form(_DEIT, f'DeiT{_CLASSIFIER}', 'deit.', {**HEAD, **_DEIT_TOKEN}, posemb_prefix='all'),
    Form(_DEIT, 'DeiTModel', '', {**POOLER, **_DEIT_TOKEN}, config=pooler, posemb_prefix='all'),
    Form(_MSN, f'ViTMSN{_CLASSIFIER}', _PREFIX, HEAD),
    Form(_MSN, 'ViTMSNModel'),
)


def write(trained: TrainedModel) -> Written:
    """Write the files of the first class of transformers that computes the same as a ViT, if
    possible of the original kind; see `_transformers.write`.
    """
    other_families = (
        *(transformers_dinov2, transformers_dinov3, transformers_vision_tower),
        *(transformers_beit, transformers_yolos),
    )
    forms = (*FORMS, *(form for family in other_families for form in family.FORMS))
    return _transformers.write(trained, forms)


WRITERS = {('vit', 'transformers'): write}
