"""DINOv3 ViTs of transformers: safetensors and config.json.

Their positions are rotary and fit images of any size.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from vit_jax import signatures
from vit_jax.errors import UserError
from vit_jax.interop import names
from vit_jax.interop.families import _transformers
from vit_jax.interop.families._transformers import MLPS, Fields, Form
from vit_jax.interop.files import Flat
from vit_jax.interop.trained import TrainedModel

_GATE = 'mlp.gate_proj'
TABLE: names.Table = (
    ('embeddings.cls_token', 'cls_token'),
    ('embeddings.register_tokens', 'register_tokens'),
    ('embeddings.patch_embeddings', 'patch_embed'),
    *_transformers.blocks(
        'layer',
        ('norm1', 'norm1'),
        ('attention.q_proj', 'attention/query'),
        ('attention.k_proj', 'attention/key'),
        ('attention.v_proj', 'attention/value'),
        ('attention.o_proj', 'attention/out'),
        ('layer_scale1.lambda1', 'layer_scale1'),
        ('norm2', 'norm2'),
        (_GATE, 'mlp/gate'),
        ('mlp.up_proj', 'mlp/fc1'),
        ('mlp.down_proj', 'mlp/fc2'),
        ('layer_scale2.lambda1', 'layer_scale2'),
    ),
    ('norm', 'encoder/norm'),
)
_KIND = _transformers.Kind(
    'transformers DINOv3',
    ('dinov3_vit',),
    TABLE,
    prefixes=('model.',),
    unused=('embeddings.mask_token',),  # for pretraining
    defaults={'layer_norm_eps': 1e-5, 'num_attention_heads': 6, 'rope_theta': 100.0},
)


def matches(flat: Mapping[str, np.ndarray]) -> bool:
    """Return whether these are the names of such a model."""
    plain_names = {_KIND.plain(name) for name in flat}
    return {'embeddings.patch_embeddings.weight', 'layer.0.layer_scale1.lambda1'} <= plain_names


def read(flat: Flat, extra: Mapping[str, Any]) -> TrainedModel:
    """Read a DINOv3ViTModel, whose `pooler_output` is our `pre_logits`.

    Raises:
      UserError: if parameters are unknown, missing or have the wrong shape, or contradict the
        config.
    """
    config = {**_KIND.defaults, **extra}
    if any(_GATE in name for name in flat):
        if (act := config.get('hidden_act', 'silu')) != 'silu':
            raise UserError(f'{_KIND.source}: gates of {act!r} are not supported (only silu)')
        extra = {**extra, 'hidden_act': 'gelu'}  # unused by gates
    rescale = float(config.get('pos_embed_rescale') or 1.0)
    positions = f'rope_dinov3(theta={float(config["rope_theta"])}, {rescale=})'
    fields = {'positions': positions}
    return _transformers.read(_KIND, _KIND.used(flat), extra, posemb='none', fields=fields)


def _arrays(flat: Flat, model: Fields) -> Flat:
    """Add an empty array of registers to a model without registers."""
    return {'register_tokens': np.zeros((1, 0, model['width']), np.float32)} | flat


def _named(arrays: Flat) -> Flat:
    """Add the token of masked patches, which outputs do not depend on."""
    token = arrays['embeddings.cls_token']
    return arrays | {'embeddings.mask_token': np.zeros_like(token)}


def _config(model: Fields) -> dict[str, Any]:
    """Return entries for rotary positions and their augmentation, gates, biases and registers."""
    _, options = signatures.arguments(signatures.parse_call(model['positions'], 'positions'))
    gated, absent = model['mlp'] == 'swiglu', model['no_bias'].split('|')
    augmented = {
        f'pos_embed_{key}': options.get(key, plain) if options.get(key, plain) != plain else None
        for key, plain in (('shift', 0.0), ('jitter', 1.0), ('rescale', 1.0))
    }
    return {
        'rope_theta': options.get('theta', 100.0),
        'num_register_tokens': model['registers'],
        'use_gated_mlp': gated,
        **{f'{key}_bias': layer not in absent for key, layer in _BIASES},
        **augmented,
        **({'hidden_act': 'silu'} if gated else {}),
    }


def _notes(model: Fields) -> tuple[str, ...]:
    """Note periods that the authors' training rounded, which transformers does not."""
    _, options = signatures.arguments(signatures.parse_call(model['positions'], 'positions'))
    if (dtype := options.get('periods', 'float32')) == 'float32':
        return ()
    return (f'transformers does not round the periods of rotary positions to {dtype}, as here',)


# Keys of config.json for biases, and the layers that have them.
_BIASES = (*((part, part) for part in ('query', 'key', 'value', 'mlp')), ('proj', 'out'))
_POSITIONS = r'rope_dinov3(\((?!.*normalize).*\))?'
_FIELDS = {**MLPS, 'posemb': 'none', 'positions': _POSITIONS, 'registers': '.*'}
FORMS = (
    Form(
        _KIND,
        'DINOv3ViTModel',
        '',
        _FIELDS,
        config=_config,
        arrays=_arrays,
        named=_named,
        notes=_notes,
        no_bias=tuple((layer,) for _, layer in _BIASES),
    ),
)
