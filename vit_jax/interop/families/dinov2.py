"""DINOv2 in the layout of its authors: facebookresearch/dinov2, with registers or without."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping
from typing import Any

import numpy as np

from vit_jax.errors import UserError
from vit_jax.interop import names, preprocessing, torch_layout
from vit_jax.interop.families import _timm, _vit, timm_vit
from vit_jax.interop.files import Flat
from vit_jax.interop.trained import GIVEN_SIZE, TrainedModel

_SOURCE = 'DINOv2'
_HEAD = 64  # width of a head in all of its models
_EPS = 1e-6
# Of ImageNet: the files say nothing about their images.
_IMAGES = {'mean': [0.485, 0.456, 0.406], 'std': [0.229, 0.224, 0.225]}
# Blocks of a chunk have their numbers in the whole model: blocks.CHUNK.NUMBER.
_CHUNKED = re.compile(r'blocks\.\d+\.(\d+)\.')
_GATED = {'mlp.w12.': 'mlp.fc1.', 'mlp.w3.': 'mlp.fc2.'}
TABLE: names.Table = (('register_tokens', 'register_tokens'), *timm_vit.TABLE)


def matches(flat: Mapping[str, np.ndarray]) -> bool:
    """Whether these are the names of such a model, which has a token for masked patches."""
    is_scaled = any(re.fullmatch(r'blocks\.(\d+\.)?0\.ls1\.gamma', name) for name in flat)
    return is_scaled and {'mask_token', 'patch_embed.proj.weight'} <= flat.keys()


def read(flat: Flat, extra: Mapping[str, Any]) -> TrainedModel:
    """A DinoVisionTransformer, whose `x_norm_clstoken` is our `pre_logits`.

    Raises:
      UserError: if parameters are unknown, absent or of the wrong shape.
    """
    in_file = {_plain(name): name for name in flat if name != 'mask_token'}
    if len(in_file) < len(flat) - 1:
        raise UserError(f'{_SOURCE}: two chunks hold a block with the same number')
    parts = _timm.plain({name: flat[theirs] for name, theirs in in_file.items()}, _SOURCE)
    width = parts['patch_embed.proj.weight'].shape[0]
    params = torch_layout.read(parts, TABLE, max(width // _HEAD, 1), _SOURCE)
    imported = _vit.assemble(
        params,
        _SOURCE,
        lambda name: in_file.get(theirs := torch_layout.theirs(name, TABLE), theirs),
        gelu='erf',
        norm_eps=_EPS,
        hints=[extra[GIVEN_SIZE]] if GIVEN_SIZE in extra else [],
        rows=1,
    )
    positions = 'antialiased' if 'register_tokens' in params else 'bicubic_offset'
    imported = dataclasses.replace(imported, positions=positions)
    return preprocessing.with_normalization(imported, {'pretrained_cfg': _IMAGES, **extra})


def _plain(name: str) -> str:
    """A name without its chunk, and with timm's names of gated layers."""
    name = _CHUNKED.sub(r'blocks.\1.', name)
    for theirs, same in _GATED.items():
        name = name.replace(theirs, same)
    return name
