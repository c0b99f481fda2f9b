"""RADIO's ViTs of transformers (C-RADIO): safetensors and config.json.

They have several class tokens, of which the first in the summary is our class token and the others
are registers; transformers' `summary` is some of these tokens side by side. Positions are cropped
from a large table, and the tokens have no final norm.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from vit_jax.errors import UserError
from vit_jax.interop import names, normalization
from vit_jax.interop.families import _timm, _transformers
from vit_jax.interop.files import Flat
from vit_jax.interop.trained import TrainedModel

# Files have the authors' names, with the projections of attention in one array.
_PATCHES = 'model.patch_generator'
_TOKENS, _PROJECTION = f'{_PATCHES}.cls_token.token', f'{_PATCHES}.embedder.weight'
_BIAS = f'{_PATCHES}.embedder.bias'  # which files lack
_POSITIONS, _INDICES = f'{_PATCHES}.pos_embed', 'summary_idxs'
_CLASS, _REGISTERS = f'{_PATCHES}.cls_token', f'{_PATCHES}.registers'
TABLE: names.Table = (
    (_CLASS, 'cls_token'),
    (_REGISTERS, 'register_tokens'),
    (_POSITIONS, 'pos_embed'),
    (f'{_PATCHES}.embedder', 'patch_embed'),
    *_transformers.blocks(
        'model.blocks',
        ('norm1', 'norm1'),
        *((f'attn.{part[0]}', f'attention/{part}') for part in ('query', 'key', 'value')),
        ('attn.proj', 'attention/out'),
        ('layer_scale1.lambda1', 'layer_scale1'),
        ('norm2', 'norm2'),
        *((f'mlp.{part}', f'mlp/{part}') for part in ('fc1', 'fc2')),
        ('mlp.gate_proj', 'mlp/gate'),
        ('mlp.up_proj', 'mlp/fc1'),
        ('mlp.down_proj', 'mlp/fc2'),
        ('layer_scale2.lambda1', 'layer_scale2'),
    ),
)
_KIND = _transformers.Kind(
    'transformers RADIO',
    ('radio',),
    TABLE,
    prefixes=('radio_model.',),
    unused=(_INDICES, 'input_conditioner.', f'{_PATCHES}.video_embedder'),
    defaults={'layer_norm_eps': 1e-6, 'num_attention_heads': 16, 'patch_size': 16},
)
POSITIONS = 'linear_cropped'


def matches(flat: Mapping[str, np.ndarray]) -> bool:
    """Return whether these are the names of such a model."""
    return {_TOKENS, _PROJECTION} <= {_KIND.plain(name) for name in flat}


def read(flat: Flat, extra: Mapping[str, Any]) -> TrainedModel:
    """Read a RadioModel, whose `last_hidden_state` is our `tokens`.

    Raises:
      UserError: if parameters are unknown, missing or have the wrong shape, or contradict the
        config.
    """
    plain = {_KIND.plain(name): array for name, array in flat.items()}
    first = int(np.ravel(plain.get(_INDICES, extra.get(_INDICES, (0,))))[0])
    arrays, side = _convert(_KIND.used(plain), first)
    keys = {key: f'input_conditioner.norm_{key}' for key in ('mean', 'std')}
    if plain.keys() >= set(keys.values()):
        settings = {key: np.ravel(plain[name]).tolist() for key, name in keys.items()}
        extra = {normalization.GIVEN_NORMALIZATION: settings, **extra}
    # The table's size: `image_size` of config.json is only the usual size of images.
    trained = _transformers.read(
        _KIND,
        arrays,
        {**extra, 'image_size': side},
        rows=0,
        fields={'final_norm': False},
    )
    return dataclasses.replace(trained, positions=POSITIONS)


def _convert(flat: Flat, first: int) -> tuple[Flat, int]:
    """Split class tokens and registers, and shape the projection as a convolution.

    Args:
      flat: Arrays by their plain names.
      first: Index of the first class token of the summary.

    Returns:
      The arrays, and the side in pixels of the image whose grid the table of positions has.

    Raises:
      UserError: if an array has the wrong shape.
    """
    tokens, kernel = flat[_TOKENS], flat[_PROJECTION]
    patch_size = round(math.sqrt(kernel.shape[-1] / 3))
    if tokens.ndim != 2 or not first < len(tokens):
        raise UserError(f'{_KIND.source}: {_TOKENS} has the shape {tokens.shape}')
    if kernel.ndim != 2 or kernel.shape[1] != 3 * patch_size**2:
        raise UserError(f'{_KIND.source}: {_PROJECTION} has the shape {kernel.shape}')
    arrays = {name: array for name, array in flat.items() if name != _TOKENS}
    arrays[_PROJECTION] = kernel.reshape(-1, 3, patch_size, patch_size)
    arrays[_BIAS] = np.zeros(len(kernel), np.float32)
    arrays[_CLASS] = tokens[None, first : first + 1]
    arrays[_REGISTERS] = np.delete(tokens, first, axis=0)[None]
    rows = flat[_POSITIONS].shape[1]
    return _timm.split_fused_arrays(arrays, _KIND.source), round(math.sqrt(rows)) * patch_size
