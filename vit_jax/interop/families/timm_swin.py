"""Swin and Swin v2 of timm and the authors (github.com/microsoft/Swin-Transformer): safetensors.

The authors' checkpoints are .pth files, {'model': arrays}: save these arrays as safetensors first.
timm merges patches at the start of a stage, the authors at its end, which identifies them. The
normalization comes from timm's config.json.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import numpy as np

from vit_jax.errors import UserError
from vit_jax.interop import names, normalization, torch_layout
from vit_jax.interop.families import _swin
from vit_jax.interop.files import Flat
from vit_jax.interop.trained import TrainedModel

_LAYER = 'layers.{0}'
# Buffers.
_UNUSED = ('relative_position_index', 'relative_coords_table', 'attn_mask')
_UNSUPPORTED = {
    'absolute_pos_embed': 'it has an absolute position embedding',
}

_ROWS = (
    ('norm1', 'norm1'),
    *((f'attn.{a}', f'attention/{b}') for a, b in (('q', 'query'), ('k', 'key'), ('v', 'value'))),
    ('attn.proj', 'attention/out'),
    # Swin v2.
    ('attn.q_bias', 'attention/query/bias'),
    ('attn.v_bias', 'attention/value/bias'),
    ('attn.logit_scale', _swin.SCALE),
    ('attn.cpb_mlp.0', f'{_swin.BIAS}/fc1'),
    ('attn.cpb_mlp.2', f'{_swin.BIAS}/fc2'),
    ('attn.relative_position_bias_table', _swin.BIAS),
    ('norm2', 'norm2'),
    ('mlp.fc1', 'mlp/fc1'),
    ('mlp.fc2', 'mlp/fc2'),
)
_COMMON: names.Table = (
    ('patch_embed.proj', 'patch_embed'),
    ('patch_embed.norm', 'embed_norm'),
    *((f'{_LAYER}.blocks.{{0}}.{a}', f'{_swin.BLOCK}/{b}') for a, b in _ROWS),
    ('norm', 'norm'),
)
_MERGING = ('norm', 'reduction')


def _merging(layer: str) -> names.Table:
    return tuple((f'{layer}.downsample.{part}', f'stage_{{0}}/merge/{part}') for part in _MERGING)


MICROSOFT: names.Table = (*_COMMON, *_merging(_LAYER), ('head', 'head'))
TIMM: names.Table = (*_COMMON, *_merging('layers.{1}'), ('head.fc', 'head'))


def matches(flat: Mapping[str, np.ndarray]) -> bool:
    """Return whether these are the names of such a model."""
    return 'patch_embed.proj.weight' in flat and 'layers.0.blocks.0.norm1.weight' in flat


def read(flat: Flat, extra: Mapping[str, Any]) -> TrainedModel:
    """Read a SwinTransformer, with or without its head.

    Raises:
      UserError: if parameters are unknown, missing or have the wrong shape, or the model has a part
        that ours lacks.
    """
    table, source = TIMM, 'timm Swin'
    if 'layers.0.downsample.reduction.weight' in flat or 'head.weight' in flat:
        table, source = MICROSOFT, 'Microsoft Swin'
    for name, reason in _UNSUPPORTED.items():
        if name in flat:
            raise UserError(f'{source}: not supported: {reason} ({name})')
    used = {name: array for name, array in flat.items() if not name.endswith(_UNUSED)}
    parts = torch_layout.split_fused(used, source)
    size, windows = images_of(extra), None
    if 'layers.0.blocks.0.attn.logit_scale' in flat:
        named = _named(extra, source)
        size = size or (named['image_size'],) * 2
        windows = named | {'image_size': size[0]}
    imported = _swin.assemble(parts, table, source, extra, image_size=size, windows=windows)
    if table is TIMM:
        require_like(imported, extra)
    return normalization.with_normalization(imported, extra, normalization.UNKNOWN_NORMALIZATION)


def require_like(imported: TrainedModel, extra: Mapping[str, Any]) -> None:
    """Raise UserError if timm computes something else with these arrays."""
    arguments = extra.get('model_args') or {}
    pool = arguments.get('global_pool', extra.get('global_pool', 'avg'))
    if pool != 'avg':
        raise UserError(f'{imported.source}: global_pool {pool!r} is not supported (only avg)')
    if arguments.get('always_partition'):
        raise UserError(f'{imported.source}: always_partition is not supported')
    model = imported.model_config
    side, window = model['patch_size'], model['window']
    for stage in range(len(model['depths'])):
        grid = [-(-pixels // (side * 2**stage)) for pixels in imported.image_size or ()]
        if grid and len({min(tokens, window + 1) for tokens in grid}) > 1:
            raise UserError(
                f'{imported.source}: among the {grid[1]} x {grid[0]} tokens of stage {stage}, timm '
                f'cuts or shifts windows of {window} tokens along one axis only: not supported'
            )
        for tokens in grid:
            if tokens > window and tokens % window:
                raise UserError(
                    f'{imported.source}: windows of {window} tokens do not tile the {tokens} of '
                    f'stage {stage}: timm pads such maps after shifting them, this model before'
                )


def _named(config: Mapping[str, Any], source: str) -> dict[str, Any]:
    """Return the windows of a Swin v2: from `model_args`, or the architecture's name, such as
    swinv2_base_window12to16_192to256.
    """
    arguments = config.get('model_args') or {}
    pattern = r'swinv2_[a-z]+_window(\d+)(?:to(\d+))?_(\d+)(?:to(\d+))?(?:\..*)?'
    match = re.fullmatch(pattern, str(config.get('architecture')))
    window = arguments.get('window_size')
    if not isinstance(window, int) and (window is not None or not match):
        raise UserError(
            f"{source} v2: unknown window size; put config.json with one of timm's "
            'architectures, or model_args with window_size, next to the file'
        )
    first, second, pixels, more = map(int, match.groups(default='0')) if match else (0, 0, 0, 0)
    pretrained = [min(first, pixels // 4 // 2**i) for i in range(4)] if second else ()
    return {
        'window': window or second or first,
        'pretrained_windows': tuple(arguments.get('pretrained_window_sizes', pretrained)),
        'image_size': more or pixels,
    }


def images_of(config: Mapping[str, Any]) -> _swin.Size | None:
    """Return height and width of the images, if config.json has them."""
    side = (config.get('model_args') or {}).get('img_size')
    if side is not None:
        return (int(side), int(side)) if isinstance(side, int) else (int(side[0]), int(side[1]))
    size = (config.get('pretrained_cfg') or {}).get('input_size', ())[1:]
    return (int(size[0]), int(size[1])) if len(size) == 2 else None
