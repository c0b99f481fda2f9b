"""timm's ViTs: safetensors and config.json.

The architecture named by config.json determines heads, pooling, GELU and epsilons; see
`_timm.arguments`. The task takes its mean and standard deviation.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from vit_jax.errors import UserError
from vit_jax.interop import names, normalization, torch_layout
from vit_jax.interop.families import _timm, _vit
from vit_jax.interop.files import Flat
from vit_jax.interop.trained import GIVEN_SIZE, TrainedModel, Written
from vit_jax.models.vit_factorized import TABLES

# Interpolation of positions by architecture; 'antialiased' by default.
_POSITIONS = (('(base|huge)_patch16_radio_v3', 'bilinear'), ('flexivit|radio', 'linear'))
_SOURCE = 'timm ViT'
_BLOCK = ('blocks.{0}', 'encoder/block_{0}')
_RELATIVE = 'relative_position_bias_table'
_NAFLEX = 'embeds.proj.weight'
_MLP = ('gate', 'fc1', 'norm', 'fc2')
_ATTENTION = (('q', 'query'), ('k', 'key'), ('v', 'value'), ('proj', 'out'))
# ResNet of a hybrid; timm names its root differently if there are no stages.
_BACKBONE = 'patch_embed.backbone'
_UNIT = (f'{_BACKBONE}.stages.{{0}}.blocks.{{0}}', 'resnet/stage_{0}/block_{0}')
_RESNET: names.Table = (
    *(
        (f'{_BACKBONE}.{root}{layer}', f'resnet/root/{layer}')
        for root in ('stem.', '')
        for layer in ('conv', 'norm')
    ),
    *(
        (f'{_UNIT[0]}.{layer}{i}', f'{_UNIT[1]}/{layer}{i}')
        for layer in ('conv', 'norm')
        for i in (1, 2, 3)
    ),
    (f'{_UNIT[0]}.downsample.conv', f'{_UNIT[1]}/proj'),
    (f'{_UNIT[0]}.downsample.norm', f'{_UNIT[1]}/proj_norm'),
)
# `global_pool`, and our equivalent pools, without and with a class token.
_POOLS = {'token': (None, 'cls'), 'avg': ('gap', 'patches'), 'map': ('map', 'cls_map')}
# Unsupported parts, by names of their arrays.
_UNSUPPORTED = ((r'patch_embed\.norm\..*', 'a norm of the embedded patches, as in AIMv2'),)
TABLE: names.Table = (
    ('cls_token', 'cls_token'),
    ('dist_token', 'dist_token'),
    ('reg_token', 'register_tokens'),
    ('pos_embed', 'pos_embed'),
    ('patch_embed.proj', 'patch_embed'),
    ('norm_pre', 'norm_pre'),
    (f'{_BLOCK[0]}.attn.norm', f'{_BLOCK[1]}/attention/out/norm'),
    *((f'{_BLOCK[0]}.attn.{a}', f'{_BLOCK[1]}/attention/{b}') for a, b in _ATTENTION),
    *((f'{_BLOCK[0]}.attn.{a}', f'{_BLOCK[1]}/attention/{a}') for a in ('q_norm', 'k_norm')),
    *((f'{_BLOCK[0]}.{norm}', f'{_BLOCK[1]}/{norm}') for norm in ('norm1', 'norm2')),
    *((f'{_BLOCK[0]}.ls{i}.gamma', f'{_BLOCK[1]}/layer_scale{i}') for i in (1, 2)),
    *((f'{_BLOCK[0]}.gamma_{i}', f'{_BLOCK[1]}/layer_scale{i}') for i in (1, 2)),
    *((f'{_BLOCK[0]}.mlp.{part}', f'{_BLOCK[1]}/mlp/{part}') for part in _MLP),
    ('norm', 'encoder/norm'),
    ('fc_norm', 'fc_norm'),
    ('attn_pool.latent', 'map_head/probe'),
    *((f'attn_pool.{a}', f'map_head/attention/{b}') for a, b in _ATTENTION),
    ('attn_pool.norm', 'map_head/norm'),
    *((f'attn_pool.mlp.{fc}', f'map_head/mlp/{fc}') for fc in ('fc1', 'fc2')),
    ('pre_logits.fc', 'pre_logits'),
    ('head_dist', 'head/distillation'),
    ('head', 'head'),
    (f'{_BLOCK[0]}.attn.{_RELATIVE}', f'{_BLOCK[1]}/attention/position_bias/table'),
    (f'rel_pos_bias.{_RELATIVE}', 'position_bias/table'),
    *_RESNET,
    # NaFlexViT.
    *(
        (f'embeds.{a}', b)
        for a, b in (('cls_token', 'cls_token'), ('reg_token', 'register_tokens'))
    ),
    *((f'embeds.{a}', b) for a, b in (('pos_embed', 'pos_embed'), ('proj', 'patch_embed'))),
    *((f'embeds.{name}', name) for name in TABLES),
)

_FACTORIZED = {'name': 'vit_factorized', 'posemb': 'learn', 'posemb_prefix': 'none'}

_DINOV3 = 'rope_embed.periods'  # of DINOv3's authors, whose names are similar


def matches(flat: Mapping[str, np.ndarray]) -> bool:
    """Return whether these are the names of such a model, without parts for pretraining."""
    has_patches = 'patch_embed.proj.weight' in flat or _NAFLEX in flat
    is_vit = has_patches and any(name.startswith('blocks.0.') for name in flat)
    excluded = ('decoder_pred.weight', 'mask_token', 'blocks.0.attn.rel_pos_h', _DINOV3)
    return is_vit and flat.keys().isdisjoint(excluded)


def read(flat: Flat, extra: Mapping[str, Any]) -> TrainedModel:
    """Read timm's VisionTransformer.

    Raises:
      UserError: if parameters are unknown, missing or have the wrong shape, or the model has a part
        that ours lacks.
    """
    source = _SOURCE
    arguments = _timm.arguments(extra, source)
    _require_known(flat, arguments)
    flat, position_sizes = _timm.naflex(flat, arguments, source) if _NAFLEX in flat else (flat, [])
    parts = _timm.split_fused_arrays(flat, source)
    in_file = names.file_names({name: torch_layout.to_ours(name, TABLE) for name in parts}, source)
    shapes = {name: parts[torch_name].shape for name, torch_name in in_file.items()}
    params = torch_layout.read(parts, TABLE, _heads(extra, arguments, shapes), source)
    params = _with_pool_heads(params, arguments.get('attn_pool_num_heads'))
    sizes = [*position_sizes, *_sizes(extra, arguments)]
    norm, norm_eps = _timm.norm(arguments, source)
    positions = _timm.positions(arguments, source)
    factorized = set(TABLES) <= params.keys()
    absent = factorized or positions != 'none' or _has_relative(params)
    imported = _vit.assemble(
        params,
        source,
        lambda name: in_file.get(name) or torch_layout.to_theirs(name, TABLE),
        gelu=_timm.gelu(arguments, source, 'blocks.0.mlp.gate.weight' in parts),
        norm_eps=norm_eps,
        hints=[*sizes, extra[GIVEN_SIZE]] if GIVEN_SIZE in extra else sizes,
        rows=_prefix_rows(params, arguments, sizes),
        posemb='none' if absent else 'learn',
        image_size=position_sizes[0] if factorized else None,
        fields=_fields(params, norm, positions)
        | (_FACTORIZED if factorized else {})
        | _timm.norm_place(arguments)
        | _timm.final_norm(arguments),
    )
    imported = _set_pool(imported, arguments.get('global_pool'))
    if 'class' not in arguments:
        imported = imported.with_notes(_describe_assumptions(imported.model_config, extra))
    name = _timm.architecture(extra)
    methods = (method for pattern, method in _POSITIONS if re.search(pattern, name))
    method = _timm.naflex_positions(arguments) if position_sizes else next(methods, 'antialiased')
    imported = dataclasses.replace(imported, positions=method)
    return normalization.with_normalization(imported, extra, normalization.UNKNOWN_NORMALIZATION)


def _require_known(flat: Flat, arguments: Mapping[str, Any]) -> None:
    """Raise UserError if the file has an unsupported part with a known name."""
    for pattern, part in _UNSUPPORTED:
        if name := next((name for name in flat if re.fullmatch(pattern, name)), None):
            raise UserError(f'{_SOURCE}: {part} is not supported ({name})')
    if arguments.get('class') == 'VisionTransformerSAM':
        raise UserError(
            f'{_SOURCE}: the file lacks attn.rel_pos_h of a SAM with windows, unlike the '
            'architecture in config.json'
        )
    if (_NAFLEX in flat) != (arguments.get('class') == _timm.NAFLEX):
        which = 'holds' if _NAFLEX in flat else 'does not hold'
        raise UserError(
            f'{_SOURCE}: the file {which} the {_NAFLEX} of a NaFlexViT, unlike the architecture in '
            'config.json'
        )
    if {'cls_token', 'attn_pool.latent'} <= flat.keys() and arguments.get('class') != 'Eva':
        raise UserError(
            f'{_SOURCE}: a class token with attention pooling of the patches is not supported'
        )


def _with_pool_heads(params: Flat, heads: int | None) -> Flat:
    """Reshape attention pooling to its own number of heads, if it has one.

    Raises:
      UserError: if the number of heads does not divide the width.
    """
    if not heads:
        return params
    result = dict(params)
    for name, array in params.items():
        match = re.fullmatch(r'map_head/attention/(\w+)/(kernel|bias)', name)
        if match is None or match.groups() == ('out', 'bias'):
            continue
        *before, width = array.shape
        shape = (heads, -1, width) if match[1] == 'out' else (*before[:-1], heads, -1)
        try:
            result[name] = array.reshape(shape)
        except ValueError:
            raise UserError(f'{_SOURCE}: attn_pool_num_heads cannot be {heads}') from None
    return result


def _has_relative(params: Flat) -> bool:
    return any(name.endswith('position_bias/table') for name in params)


def _fields(params: Flat, norm: str, positions: str) -> dict[str, Any]:
    """Return the fields that differ from a plain ViT."""
    fields = {'norm': norm, 'positions': positions}
    fields |= {'qk_norm': norm} if 'encoder/block_0/attention/q_norm/scale' in params else {}
    fields |= {'epsilons': 'timm'} if 'resnet/root/conv/kernel' in params else {}
    plain = {'norm': 'layer', 'positions': 'none'}
    return {key: value for key, value in fields.items() if value != plain.get(key)}


def _heads(
    extra: Mapping[str, Any], arguments: Mapping[str, Any], shapes: Mapping[str, tuple[int, ...]]
) -> int:
    """Return the architecture's number of heads, by default the published one.

    Raises:
      UserError: if the number is unknown.
    """
    width = shapes.get('patch_embed/kernel', (0,))[0]
    if heads := _timm.num_heads(arguments, width):
        return heads
    if extra.get('architecture'):
        raise UserError(
            f'{_SOURCE}: unknown number of attention heads of a {extra["architecture"]!r} of '
            f'width {width}; set num_heads in model_args of config.json'
        )
    return _vit.published_heads(shapes, _SOURCE)


def _describe_assumptions(model: Mapping[str, Any], extra: Mapping[str, Any]) -> str:
    """Describe assumptions about an unknown architecture: several models have the same arrays."""
    name = _timm.architecture(extra)
    unknown = (
        f'{name!r} is not a ViT of timm' if name else 'config.json names no architecture of timm'
    )
    return (
        f'{unknown}: assumed to be a plain ViT with {model["num_heads"]} heads, pool '
        f'{model["pool"]!r} and GELU {model["gelu"]!r}'
    )


def _set_pool(imported: TrainedModel, pool: Any) -> TrainedModel:
    """Set the pooling of config.json, which arrays do not fully determine.

    Raises:
      UserError: if the pooling is not supported, or contradicts the arrays.
    """
    our_pool, has_token = imported.model_config['pool'], 'cls_token' in imported.params
    requested = _POOLS.get(str(pool), (None, None))[has_token]
    if (our_pool, requested) == ('cls', 'patches'):  # both have the same arrays
        return imported.with_groups(model=imported.model_config | {'pool': requested})
    if our_pool == 'distilled' and pool in (None, 'token'):
        return imported
    if pool is not None and requested != our_pool:
        raise UserError(
            f'{_SOURCE}: global_pool {pool!r} of a model with {"a" if has_token else "no"} class '
            f'token is not supported{_reason(imported)}'
        )
    return imported


def _reason(imported: TrainedModel) -> str:
    """Describe the array that contradicts a pooling."""
    if imported.model_config['fc_norm']:
        return ' (the file holds a norm that comes after the mean)'
    return ' (the file holds attention pooling)' if imported.model_config['pool'] == 'map' else ''


def _prefix_rows(params: Flat, arguments: Mapping[str, Any], sizes: Sequence[_vit.Size]) -> int:
    """Return the number of positions before the patches: 0 with `no_embed_class`."""
    registers = params['register_tokens'].shape[1] if 'register_tokens' in params else 0
    tokens = sum(name in params for name in ('cls_token', 'dist_token'))
    prefix = tokens + registers
    if arguments.get('no_embed_class') or 'pos_embed' not in params:
        return 0
    if 'no_embed_class' in arguments or 'class' in arguments:
        return prefix
    rows = _vit.first_rows(params, sizes, (0, prefix))
    if rows is not None:
        return rows
    return prefix if _vit.square_side(params['pos_embed'].shape[1]) is None else 0


def _sizes(config: Mapping[str, Any], arguments: Mapping[str, Any]) -> list[_vit.Size]:
    """Return possible heights and widths of the images from config.json."""
    side = arguments.get('img_size')
    pretrained = (config.get('pretrained_cfg') or {}).get('input_size', ())[1:]
    square = (side, side) if isinstance(side, int) else side
    return [
        (size[0], size[1])
        for size in (square, pretrained)
        if isinstance(size, list | tuple)
        and len(size) == 2
        and all(isinstance(x, int) for x in size)
    ]


def write(trained: TrainedModel) -> Written:
    """Write the files of timm's VisionTransformer; see `_timm.write`."""
    return _timm.write(trained, TABLE)


WRITERS = {('vit', 'timm'): write, ('hybrid', 'timm'): write}
