"""ViTs of DINOv2's authors, whose names are similar to timm's.

Gates and values are in one layer, and blocks in chunks, numbered consecutively:
blocks.CHUNK.NUMBER. The files do not contain the number of heads or image settings.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping
from typing import Any

import numpy as np

from vit_jax.errors import UserError
from vit_jax.interop import names, normalization, torch_layout
from vit_jax.interop.families import _timm, _vit
from vit_jax.interop.families.timm_vit import TABLE
from vit_jax.interop.files import Flat
from vit_jax.interop.trained import GIVEN_SIZE, TrainedModel

_SOURCE = 'DINOv2'
_TABLE: names.Table = (('register_tokens', 'register_tokens'), *TABLE)
_DINOV3 = 'rope_embed.periods'  # of DINOv3's authors
_CHUNKED = re.compile(r'blocks\.\d+\.(\d+)\.')
_GATED = {'mlp.w12.': 'mlp.fc1.', 'mlp.w3.': 'mlp.fc2.'}
_HEAD_WIDTH, _EPS = 64, 1e-6


def matches(flat: Mapping[str, np.ndarray]) -> bool:
    """Return whether these are names of DINOv2's authors, with a token for masked patches."""
    return _is_dino(flat) and not is_tips(flat)


def is_tips(flat: Mapping[str, np.ndarray]) -> bool:
    """Return whether they are of TIPSv2's image tower, by its MLPs, or by its only register."""
    if not _is_dino(flat):
        return False
    registers = flat.get('register_tokens')
    is_gated = 'blocks.0.mlp.w12.weight' in flat
    is_single = registers is not None and registers.shape[-2:-1] == (1,)
    return 'blocks.0.mlp.c_fc.weight' in flat or (is_gated and is_single)


def _is_dino(flat: Mapping[str, np.ndarray]) -> bool:
    is_scaled = any(re.fullmatch(r'blocks\.(\d+\.)?0\.ls1\.gamma', name) for name in flat)
    is_dinov2 = is_scaled and _DINOV3 not in flat
    return is_dinov2 and {'mask_token', 'patch_embed.proj.weight'} <= flat.keys()


def read(flat: Flat, extra: Mapping[str, Any]) -> TrainedModel:
    """Read a DinoVisionTransformer, whose `x_norm_clstoken` is our `pre_logits`.

    Raises:
      UserError: if parameters are unknown, missing or have the wrong shape.
    """
    in_file = {_timm_name(name): name for name in flat if name != 'mask_token'}
    if len(in_file) < len(flat) - 1:
        raise UserError(f'{_SOURCE}: two chunks have a block with the same number')
    parts = _timm.split_fused_arrays(
        {name: flat[torch_name] for name, torch_name in in_file.items()}, _SOURCE
    )
    width = parts['patch_embed.proj.weight'].shape[0]
    params = torch_layout.read(parts, _TABLE, max(width // _HEAD_WIDTH, 1), _SOURCE)
    imported = _vit.assemble(
        params,
        _SOURCE,
        lambda name: in_file.get(torch_name := torch_layout.to_theirs(name, _TABLE), torch_name),
        gelu='erf',
        norm_eps=_EPS,
        hints=[extra[GIVEN_SIZE]] if GIVEN_SIZE in extra else [],
        rows=1,
    )
    positions = 'antialiased' if 'register_tokens' in params else 'bicubic_offset'
    imported = dataclasses.replace(imported, positions=positions)
    return normalization.with_normalization(imported, normalization.with_imagenet_default(extra))


def _timm_name(name: str) -> str:
    """Remove the chunk from a name, and use timm's names of gated layers."""
    name = _CHUNKED.sub(r'blocks.\1.', name)
    for torch_name, timm_name in _GATED.items():
        name = name.replace(torch_name, timm_name)
    return name
