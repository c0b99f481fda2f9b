"""ViT of transformers' YOLOS: safetensors and config.json.

Its detection tokens, which come last in transformers, become registers: blocks do not depend on the
order of tokens. The detection head is ignored.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from vit_jax.errors import UserError
from vit_jax.interop.families import _transformers
from vit_jax.interop.families._transformers import (
    POOLER,
    REGISTERS,
    Fields,
    Form,
    pooler,
)
from vit_jax.interop.files import Flat
from vit_jax.interop.trained import TrainedModel

POSITIONS = 'bicubic'
_TOKENS, _POSITIONS = 'embeddings.detection_tokens', 'embeddings.position_embeddings'
_HEADS = ('class_labels_classifier.', 'bbox_predictor.')
_KIND = _transformers.Kind(
    'transformers YOLOS',
    ('yolos',),
    ((_TOKENS, 'register_tokens'), *_transformers.VIT_TABLE),
    prefixes=('vit.',),
    unused=_HEADS,
    defaults={'layer_norm_eps': 1e-12, 'num_attention_heads': 12},
)


def matches(flat: Mapping[str, np.ndarray]) -> bool:
    """Return whether these are the names of such a model."""
    return _TOKENS in {_KIND.plain(name) for name in flat}


def read(flat: Flat, extra: Mapping[str, Any]) -> TrainedModel:
    """Read a YolosModel, whose pooler is our `pre_logits`, or the one in a YolosForObjectDetection.

    Raises:
      UserError: if positions are also added to later blocks; if parameters are unknown, missing or
        have the wrong shape, or contradict the config.
    """
    if any(name.endswith('mid_position_embeddings') for name in flat):
        raise UserError(f'{_KIND.source}: positions between blocks are not supported')
    used = _KIND.used(flat)
    by_name = {_KIND.plain(name): name for name in used}
    tokens, table = (used.get(by_name.get(name, '')) for name in (_TOKENS, _POSITIONS))
    if tokens is None or table is None or tokens.ndim != 3 or table.ndim != 3:
        raise UserError(f'{_KIND.source}: {_TOKENS} and {_POSITIONS} [1 N D] are not in the file')
    count = tokens.shape[1]
    sections = np.split(table, [1, max(table.shape[1] - count, 1)], axis=1)
    used[by_name[_POSITIONS]] = np.concatenate([sections[0], sections[2], sections[1]], axis=1)
    imported = _transformers.read(_KIND, used, extra, rows=1 + count)
    if any(name.startswith(_HEADS) for name in flat):
        return imported.with_notes('the detection head is ignored: a YOLOS is read as its ViT')
    return imported


def _arrays(flat: Flat, model: Fields) -> Flat:
    """Reorder positions like the tokens in transformers, where registers come last."""
    sections = np.split(flat['pos_embed'], [1, 1 + model['registers']], axis=1)
    return flat | {'pos_embed': np.concatenate([sections[0], sections[2], sections[1]], axis=1)}


def _config(model: Fields) -> dict[str, Any]:
    size = model['image_size']
    return {
        **pooler(model),
        'image_size': size if isinstance(size, list) else [size, size],
        'num_detection_tokens': model['registers'],
        'use_mid_position_embeddings': False,
    }


FORMS = (
    Form(
        _KIND,
        'YolosModel',
        '',
        {**POOLER, **REGISTERS},
        config=_config,
        arrays=_arrays,
        posemb_prefix='all',
    ),
)
