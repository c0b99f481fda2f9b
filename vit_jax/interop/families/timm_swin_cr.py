"""timm's Swin v2 CR, `swinv2_cr_*`: safetensors and config.json.

Patches are merged at the start of a stage, and the norm after the last block is our final norm. In
training, timm drops an eighth of the hidden units of the position bias MLP, which this package does
not.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import numpy as np

from vit_jax.errors import UserError
from vit_jax.interop import names, normalization, torch_layout
from vit_jax.interop.families import _swin, timm_swin
from vit_jax.interop.files import Flat
from vit_jax.interop.trained import TrainedModel

_SOURCE = 'timm Swin v2 CR'
_STAGE, _RATIO = 'stages.{0}', 8  # patches per side of the grid / windows per side
_ROWS = (
    *((f'norm{i}', f'norm{i}') for i in (1, 2, 3)),
    *((f'attn.{a}', f'attention/{b}') for a, b in (('q', 'query'), ('k', 'key'), ('v', 'value'))),
    ('attn.proj', 'attention/out'),
    ('attn.logit_scale', _swin.SCALE),
    *((f'attn.meta_mlp.fc{i}', f'{_swin.BIAS}/fc{i}') for i in (1, 2)),
    *((f'mlp.fc{i}', f'mlp/fc{i}') for i in (1, 2)),
)
TABLE: names.Table = (
    ('patch_embed.proj', 'patch_embed'),
    ('patch_embed.norm', 'embed_norm'),
    *((f'{_STAGE}.blocks.{{0}}.{a}', f'{_swin.BLOCK}/{b}') for a, b in _ROWS),
    *((f'stages.{{1}}.downsample.{x}', f'stage_{{0}}/merge/{x}') for x in ('norm', 'reduction')),
    ('norm', 'norm'),
    ('head.fc', 'head'),
)
_BLOCK = re.compile(r'stages\.(\d+)\.blocks\.(\d+)\.')
_EXTRA = re.compile(r'stages\.(\d+)\.blocks\.(\d+)\.norm3\.weight')


def matches(flat: Mapping[str, np.ndarray]) -> bool:
    """Return whether these are the names of such a model."""
    return 'stages.0.blocks.0.attn.meta_mlp.fc1.weight' in flat


def read(flat: Flat, extra: Mapping[str, Any]) -> TrainedModel:
    """Read a SwinTransformerV2Cr.

    Raises:
      UserError: if parameters are unknown, missing or have the wrong shape, or the model has a part
        that ours lacks.
    """
    last = max((int(m[1]), int(m[2])) for n in flat if (m := _BLOCK.match(n)))
    end = f'stages.{last[0]}.blocks.{last[1]}.norm3.'
    used = {f'norm.{n.removeprefix(end)}' if n.startswith(end) else n: a for n, a in flat.items()}
    extras = sorted((int(m[1]), int(m[2])) for n in used if (m := _EXTRA.fullmatch(n)))
    size = _image_size(extra)
    kernel = used.get('patch_embed.proj.weight', np.zeros((1, 1, 1, 1)))
    windows = {
        'name': 'swin_v2_cr',
        'window': _window(extra, size[0] // max(kernel.shape[-1], 1)),
        'extra_norms': tuple(extras),
    }
    parts = torch_layout.split_fused(used, _SOURCE)
    imported = _swin.assemble(parts, TABLE, _SOURCE, extra, image_size=size, windows=windows)
    timm_swin.require_like(imported, extra)
    return normalization.with_normalization(imported, extra, normalization.UNKNOWN_NORMALIZATION)


def _image_size(config: Mapping[str, Any]) -> _swin.Size:
    """Return height and width of the images from config.json or the architecture's name.

    Raises:
      UserError: if neither has them, or the images are not square.
    """
    name = str(config.get('architecture') or '').partition('.')[0]
    number = re.fullmatch(r'swinv2_cr_\w+_(\d+)', name)
    size = timm_swin.images_of(config) or ((int(number[1]),) * 2 if number else None)
    if size is None or size[0] != size[1]:
        raise UserError(
            f'{_SOURCE}: images must be squares of a known size; add a config.json with one of '
            "timm's architectures, or model_args with img_size"
        )
    return size[0], size[1]


def _window(config: Mapping[str, Any], grid: int) -> int:
    """Return the side of the windows: 1/8 of the grid's side, unless set in model_args.

    Raises:
      UserError: if stages differ, or windows are not square.
    """
    model_args = config.get('model_args') or {}
    window, ratio = model_args.get('window_size'), model_args.get('window_ratio') or _RATIO
    if isinstance(window, list | tuple) and len({*map(str, window)}) == 1:
        window = window[0]
    for key, value in (('window_size', window or 1), ('window_ratio', ratio)):
        if not isinstance(value, int):
            raise UserError(
                f'{_SOURCE}: {key} {model_args[key]} is not supported: one number for all stages'
            )
    return window or max(1, grid // ratio)
