"""BEiT and Data2VecVision of transformers: safetensors and config.json.

Relative positions belong to each block or are shared by all blocks.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from vit_jax.interop import names
from vit_jax.interop.families import _transformers, _vit
from vit_jax.interop.families._transformers import HEAD, Fields, Form
from vit_jax.interop.files import Flat
from vit_jax.interop.trained import TrainedModel

POSITIONS = 'bicubic'
_LAYER = 'encoder.layer'
_BIAS = 'relative_position_bias.relative_position_bias_table'
TABLE: names.Table = (
    *_transformers.blocks(
        _LAYER,
        (f'attention.attention.{_BIAS}', 'attention/position_bias/table'),
        *((f'lambda_{i}', f'layer_scale{i}') for i in (1, 2)),
    ),
    (f'encoder.{_BIAS}', 'position_bias/table'),
    ('pooler.layernorm', 'fc_norm'),
    *_transformers.VIT_TABLE,
)
_KIND = _transformers.Kind(
    'transformers BEiT',
    ('beit', 'data2vec-vision'),
    TABLE,
    prefixes=('beit.', 'data2vec_vision.'),
    unused=('embeddings.mask_token',),  # for pretraining
    defaults={'layer_norm_eps': 1e-12, 'num_attention_heads': 12},
)


def matches(flat: Mapping[str, np.ndarray]) -> bool:
    """Return whether these are the names of such a model."""
    plain_names = {_KIND.plain(name) for name in flat}
    is_vit = f'{_LAYER}.0.layernorm_before.weight' in plain_names
    return is_vit and bool({f'{_LAYER}.0.lambda_1', 'pooler.layernorm.weight'} & plain_names)


def read(flat: Flat, extra: Mapping[str, Any]) -> TrainedModel:
    """Read a BeitModel, whose `pooler_output` is our `pre_logits`, or a BeitForImageClassification.

    A Data2VecVisionModel without a pooler has no final norm, unless it uses the class token.

    Raises:
      UserError: if parameters are unknown, missing or have the wrong shape, or contradict the
        config.
    """
    used = {n: a for n, a in _KIND.used(flat).items() if not n.endswith('relative_position_index')}
    fields = {'pool': 'patches', 'final_norm': False} if _is_bare(used, extra) else {}
    return _transformers.read(_KIND, used, extra, posemb='none', fields=fields)


def _is_bare(used: Flat, extra: Mapping[str, Any]) -> bool:
    """Return whether the model's only norm would be part of a pooler, which it lacks."""
    plain_names = {_KIND.plain(name) for name in used}
    norms = {'layernorm.weight', 'pooler.layernorm.weight', 'classifier.weight'} & plain_names
    return bool(extra.get('model_type') and extra.get('use_mean_pooling', True)) and not norms


def _arrays(flat: Flat, model: Fields) -> Flat:
    """Drop the biases of keys, which shift all scores of a query equally."""
    without_key_biases = {
        name: array for name, array in flat.items() if not name.endswith('/key/bias')
    }
    return _vit.without_tables(without_key_biases)


def _config(model: Fields) -> dict[str, Any]:
    return {
        'use_mean_pooling': model['pool'] == 'patches',
        'use_absolute_position_embeddings': model['posemb'] != 'none',
        'use_relative_position_bias': model['positions'] == 'relative',
        'use_shared_relative_position_bias': 'shared' in model['positions'],
    }


def _forms(fields: Mapping[str, str]) -> tuple[Form, Form]:
    """Return the forms without a head and as a classifier."""

    def form(suffix: str, prefix: str, extra: Mapping[str, str]) -> Form:
        conditions = {
            'posemb': '.*',
            'positions': r'none|relative(\(shared=True\))?',
            **fields,
            **extra,
        }
        return Form(
            _KIND,
            f'Beit{suffix}',
            prefix,
            conditions,
            config=_config,
            arrays=_arrays,
            no_bias=(('key',),),
        )

    return form('Model', '', {}), form('ForImageClassification', 'beit.', HEAD)


FORMS = (*_forms({'pool': 'patches', 'fc_norm': 'True'}), *_forms({}))
