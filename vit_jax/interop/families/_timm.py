"""timm's ViTs: arguments of architectures, changes by config.json, and writing files for timm.

The table next to this file has the arguments of each architecture that shapes do not determine.
"""

from __future__ import annotations

import functools
import json
import math
import re
from collections.abc import Mapping
from pathlib import Path
from textwrap import shorten
from typing import Any

import numpy as np

from vit_jax.errors import UserError
from vit_jax.interop import equivalent, names, normalization, preprocessing, torch_layout
from vit_jax.interop.families._transformers import (
    Fields,
    fixed_positions,
    misfits,
    square,
    without_patch_bias,
)
from vit_jax.interop.files import Flat
from vit_jax.interop.trained import Size, TrainedModel, Written, fields
from vit_jax.models.vit_factorized import TABLES
from vit_jax.ops import resize

Arguments = Mapping[str, Any]

TABLE = Path(__file__).with_name('timm_architectures.json')
# Defaults of timm's constructors.
_DEFAULTS: dict[str, dict[str, Any]] = {
    'VisionTransformer': {'global_pool': 'token'},
    'VisionTransformerDistilled': {'global_pool': 'token'},
    'Beit': {'global_pool': 'avg'},
    'Eva': {'global_pool': 'avg'},
    'NaFlexVit': {'global_pool': 'map', 'no_embed_class': True},
}
NAFLEX = 'NaFlexVit'
_REFUSED = {
    'VisionTransformerRelPos': 'it has relative positions (RelPos)',
}
_RES_POST = 'ResPostBlock'
# Arguments of unsupported parts, with the values that disable the part.
_PLAIN = {
    'attn_layer': (None, '', 'Attention'),
    'block_fn': (None, '', 'Block', _RES_POST),
    'mlp_layer': (None, '', 'Mlp', 'mlp', 'SwiGLU', 'GluMlp(gate_last=False)'),
    'pos_embed': ('learn', 'learned', 'factorized'),
    **{'pos_embed_use_grid_sample': (False,), 'patchify_channels_last': (True,)},
    'pos_embed_interp_mode': ('bicubic', 'bilinear'),
    'attn_gated': (False,),
    'pool_include_prefix': (False,),
    'num_kv_heads': (None,),
    'padding_same': (True,),
    'gated_attn': (False,),
    'rope_type': (None, '', 'none', 'cat', 'dinov3'),
}
_GELUS = {None: 'erf', 'gelu': 'erf', 'GELU': 'erf', 'gelu_tanh': 'tanh', 'quick_gelu': 'quick'}
_SILUS = ('silu', 'SiLU', 'swish')
_NORM = re.compile(r'(layer|rms)_?norm(?:\(eps=([-\de.]+)\))?', re.IGNORECASE)
_NORM_EPS = 1e-6
_THETA = 10_000.0


def arguments(extra: Mapping[str, Any], source: str) -> Arguments:
    """Return the model's arguments: `model_args` of config.json over the architecture's.

    Raises:
      UserError: if the architecture has an unsupported part.
    """
    defaults = architectures().get(architecture(extra), {})
    kind = defaults.get('class', '')
    if kind in _REFUSED:
        raise UserError(f'{source}: {extra["architecture"]!r} is not supported: {_REFUSED[kind]}')
    top_level = {key: extra[key] for key in ('global_pool',) if key in extra}
    changed = extra.get('model_args') or {}
    model_arguments = {**_DEFAULTS.get(kind, {}), **defaults, **top_level, **changed}
    if 'num_heads' in changed:
        model_arguments['embed_dim'] = changed.get('embed_dim')
    for key, plain in _PLAIN.items():
        if key in model_arguments and model_arguments[key] not in plain:
            raise UserError(
                f'{source}: {extra.get("architecture")!r} is not supported: its {key} is '
                + shorten(repr(model_arguments[key]), 60, placeholder=' ...')
            )
    return model_arguments


def architecture(extra: Mapping[str, Any]) -> str:
    """Return the name of the architecture without the weights' tag; empty if there is none."""
    return str(extra.get('architecture') or '').partition('.')[0]


def num_heads(arguments: Arguments, width: int) -> int | None:
    """Return the number of heads; None if neither config.json nor the architecture sets it.

    Args:
      arguments: Model arguments, see `arguments`.
      width: Width of the arrays. If the arguments are for a different width, their number of heads
        does not apply.
    """
    heads = arguments.get('num_heads')
    return heads if heads and (arguments.get('embed_dim') or width) == width else None


def gelu(arguments: Arguments, source: str, gated: bool = False) -> str:
    """Return our name of the GELU; 'erf', which has no effect, for gated MLPs with SiLU.

    Raises:
      UserError: if the activation is not supported.
    """
    name = arguments.get('act_layer')
    if gated and (name in _SILUS or arguments.get('class') == 'Eva'):
        return 'erf'
    if name not in _GELUS or gated:
        raise UserError(f'{source}: act_layer {name!r} is not supported')
    return _GELUS[name]


def norm(arguments: Arguments, source: str) -> tuple[str, float]:
    """Return our name of the norm, and its epsilon.

    Raises:
      UserError: if it is neither a layer norm nor an RMS norm.
    """
    name = arguments.get('norm_layer') or 'LayerNorm'
    if not (match := _NORM.fullmatch(str(name))):
        raise UserError(f'{source}: norm_layer {name!r} is not supported')
    return match[1].lower(), float(match[2] or _NORM_EPS)


def norm_place(arguments: Arguments) -> dict[str, str]:
    """Return the field `norm_place` for norms after the layers."""
    is_post = arguments.get('block_fn') == _RES_POST or arguments.get('use_post_norm')
    return {'norm_place': 'res_post'} if is_post else {}


def naflex(flat: Flat, arguments: Arguments, source: str) -> tuple[Flat, list[Size]]:
    """Reshape the arrays of a NaFlexViT to a ViT's; also return the image size of its positions.

    Raises:
      UserError: if patches are not square, or positions are rotary.
    """
    if arguments.get('rope_type') not in (None, '', 'none'):
        raise UserError(f'{source}: a NaFlexViT with rotary positions is not supported')
    if (
        arguments.get('pos_embed_align_corners')
        and arguments.get('pos_embed_interp_mode') != 'bilinear'
    ):
        raise UserError(
            f'{source}: pos_embed_align_corners is only supported for bilinear positions'
        )
    kernel, table = flat['embeds.proj.weight'], flat.get('embeds.pos_embed')
    if kernel.ndim == 2:  # for flattened patches [P P C]
        channels = arguments.get('in_chans') or 3
        side = math.isqrt(kernel.shape[1] // channels)
        if side * side * channels != kernel.shape[1]:
            raise UserError(f'{source}: embeds.proj.weight cannot have shape {kernel.shape}')
        kernel = kernel.reshape(-1, side, side, channels).transpose(0, 3, 1, 2)
    changed, sizes = {'embeds.proj.weight': kernel}, []
    tables = [flat.get(f'embeds.{name}') for name in TABLES]
    if all(table is not None and table.ndim == 3 for table in tables):
        sides = zip(tables, kernel.shape[2:], strict=True)
        rows, columns = (table.shape[1] * side for table, side in sides if table is not None)
        sizes = [(rows, columns)]
    if table is not None and table.ndim == 4:
        _, rows, columns, width = table.shape
        changed['embeds.pos_embed'] = table.reshape(1, rows * columns, width)
        sizes = [(rows * kernel.shape[2], columns * kernel.shape[3])]
    return flat | changed, sizes


def naflex_positions(arguments: Arguments) -> str:
    """Return the interpolation of a NaFlexViT's positions, see `ops.resize.grid`."""
    antialiased = arguments.get('pos_embed_antialias', True)
    ending = resize.CROPPED if arguments.get('pos_embed_ar_preserving') else ''
    if arguments.get('pos_embed') == 'factorized':
        return f'linear{ending}'
    if arguments.get('pos_embed_align_corners'):
        return f'bilinear{ending}'
    if arguments.get('pos_embed_interp_mode') == 'bilinear':
        return ('linear_antialiased' if antialiased else 'linear') + ending
    return ('antialiased' if antialiased else 'bicubic') + ending


def final_norm(arguments: Arguments) -> dict[str, bool]:
    """Return the field `final_norm` for models without a norm after the blocks or the pooling."""
    no_norm = False in (arguments.get('final_norm'), arguments.get('use_post_transformer_norm'))
    return {'final_norm': False} if no_norm else {}


def positions(arguments: Arguments, source: str) -> str:
    """Return the field `positions`: rotary for EVA-02, PE and DINOv3, or 'none'.

    Raises:
      UserError: if the form of rotary positions is not supported.
    """
    if not arguments.get('use_rot_pos_emb'):
        return 'none'
    is_dinov3, half = (
        arguments.get('rope_type') == 'dinov3',
        bool(arguments.get('rope_rotate_half')),
    )
    offset, order = (
        arguments.get('rope_grid_offset', 0.0),
        arguments.get('rope_grid_indexing', 'ij'),
    )
    shape = arguments.get('ref_feat_shape') or 0
    sides = set(shape) if isinstance(shape, list | tuple) else {shape}
    if half != is_dinov3 or len(sides) != 1 or (is_dinov3 and (offset or order == 'xy')):
        raise UserError(f'{source}: this form of rotary positions is not supported')
    theta = float(arguments.get('rope_temperature', _THETA))
    if is_dinov3:
        rescale = float(arguments.get('rope_rescale_coords') or 1.0)
        return f'rope_dinov3({theta=}, {rescale=})'
    reference, order = sides.pop(), 'xy' if order == 'xy' else 'yx'
    return f'rope({theta=}, {reference=}, offset={float(offset)}, {order=})'


@functools.cache
def architectures() -> Mapping[str, Arguments]:
    """Load arguments by architecture; `class` is the name of the model's constructor."""
    table: dict[str, Arguments] = json.loads(TABLE.read_text())
    return table


# Alternative names of parts.
_SAME = (
    (r'(.*\.attn\.[qkv])_(bias)', r'\1.\2'),
    (r'(.*\.attn\.[qkv])_proj\.(weight|bias)', r'\1.\2'),
    (r'(.*\.mlp)\.fc1_g\.(weight|bias)', r'\1.gate.\2'),
    (r'(.*\.mlp)\.fc1_x\.(weight|bias)', r'\1.fc1.\2'),
)


def split_fused_arrays(flat: Flat, source: str) -> Flat:
    """Split fused projections and gates, and unify alternative names of parts.

    Raises:
      UserError: if an array cannot be split.
    """
    used = {n: array for n, array in flat.items() if not n.endswith('relative_position_index')}
    parts = torch_layout.split_fused(used, source)
    return _split_gates({_named(name): array for name, array in parts.items()})


def _named(name: str) -> str:
    for pattern, same in _SAME:
        name = re.sub(f'^{pattern}$', same, name)
    return name


def _split_gates(flat: Flat) -> Flat:
    """Split layers with twice as many outputs as the next one has inputs: gates come first."""
    parts = dict(flat)
    for name, second in flat.items():
        if not name.endswith('.mlp.fc2.weight') or second.ndim != 2:
            continue
        mlp = name.removesuffix('.fc2.weight')
        for leaf in ('weight', 'bias'):
            gate_and_value = flat.get(f'{mlp}.fc1.{leaf}')
            if gate_and_value is not None and len(gate_and_value) == 2 * second.shape[1]:
                parts[f'{mlp}.gate.{leaf}'], parts[f'{mlp}.fc1.{leaf}'] = np.split(
                    gate_and_value, 2
                )
    return parts


# Supported values of fields, as regular expressions.
_FIELDS = {
    **{'pool': 'cls|gap|patches|map|distilled', 'posemb': 'learn|sincos2d', 'positions': 'none'},
    **{'norm_place': 'pre', 'head_norm': 'none', 'mlp': 'mlp|swiglu'},
    'representation_size': 'None|0',
    **{'inner_norm': 'False', 'pool_heads': 'None', 'pool_mlp_dim': 'None'},
}
# Architectures by the layers of their ResNet.
_HYBRIDS = {
    (): 'vit_tiny_r_s16_p8_224',
    (2, 2, 2, 2): 'vit_base_r26_s32_224',
    (3, 4, 9): 'vit_base_r50_s16_224',
    (3, 4, 6, 3): 'vit_large_r50_s32_224',
}
_EPS, _CLIP_EPS = 1e-6, 1e-5
_POOLS = {'cls': 'token', 'distilled': 'token', 'gap': 'avg', 'patches': 'avg', 'map': 'map'}
_ACT_LAYERS = {'erf': 'gelu', 'tanh': 'gelu_tanh', 'quick': 'quick_gelu'}
_QKV = ('query', 'key', 'value')
FUSED = {'attn': 'qkv', 'attn_pool': 'kv'}  # projections that timm fuses


def write(trained: TrainedModel, table: names.Table) -> Written:
    """Write the files of timm's VisionTransformer.

    Args:
      trained: Model to write.
      table: Rows (timm's name, our name).

    Raises:
      UserError: if timm has no such model, or the image size is unknown.
    """
    model = fields(trained.model) | {'name': trained.settings.model.name}
    architecture = _architecture(model)
    flat = names.flatten(trained.params, model['no_bias'])
    stride, first = trained.model.stride, trained.model.positioned_tokens
    size = trained.image_size or square(flat, stride, first)
    if model['posemb'] == 'sincos2d':
        flat['pos_embed'] = fixed_positions(size, stride, model['width'], first)
    channels = trained.channels
    image_settings, notes = image_keys(trained.transforms, size)
    pool, classes = _POOLS[model['pool']], model['num_classes'] or 0
    config = {
        'architecture': architecture,
        'num_classes': classes,
        'num_features': model['width'],
        'global_pool': pool,
        'model_args': {
            **{'img_size': list(size), 'in_chans': channels, 'num_classes': classes},
            **_arguments(model, pool),
        },
        'pretrained_cfg': {
            **{'num_classes': classes, 'input_size': [channels, *size], 'fixed_input_size': True},
            **normalization.keys(trained, channels),
            **image_settings,
        },
    }
    if trained.class_names:
        config['label_names'] = list(trained.class_names)
    arrays = torch_layout.write(_tokens(flat, model, first), table)
    if not model.get('layers', True):  # for timm, a root without stages is not a stem
        arrays = {name.replace('.stem.', '.'): array for name, array in arrays.items()}
    return Written(
        torch_layout.join_fused(_join_gates(arrays), FUSED), config, (*_notes(model), *notes)
    )


def image_keys(transforms: str, size: Size) -> tuple[dict[str, Any], tuple[str, ...]]:
    """Return the keys of `pretrained_cfg` for images of `size`, and notes on differences."""
    recipe, notes = preprocessing.parse_recipe(transforms), []
    if recipe and recipe.output_size and recipe.output_size != size:
        notes.append(
            f'timm makes images of {size[1]} x {size[0]} pixels, for which the positions are; the '
            f'transforms make {recipe.output_size[1]} x {recipe.output_size[0]}'
        )
        transforms = preprocessing.change_size(transforms, size)
    keys = preprocessing.timm_keys(transforms, size)
    if not keys:
        if re.search('resize|crop', transforms):
            notes.append(f'timm cannot express these transforms: {transforms}')
        return {}, tuple(notes)
    files = {'pretrained_cfg': keys | {'input_size': [3, *size], 'mean': [0.5]}}
    recipe = preprocessing.read_recipe(files, None)
    return keys, (*notes, *preprocessing.differences(transforms, recipe.text if recipe else ''))


def _architecture(model: Fields) -> str:
    """Choose an architecture with the model's parts that arguments cannot change.

    Raises:
      UserError: if there is none.
    """
    lacking = misfits(model, _FIELDS)
    if model['qk_norm'] not in ('none', model['norm']):
        lacking.append(f'qk_norm {model["qk_norm"]!r} with norm {model["norm"]!r}')
    if model['name'] == 'hybrid' and model['layers'] not in _HYBRIDS:
        lacking.append(f'layers {model["layers"]}')
    kinds = {
        'pool': model['pool'] == 'distilled',
        'mlp': model['mlp'] != 'mlp',
        'layers': model['name'] == 'hybrid',
    }
    special = [f'{key} {model[key]!r}' for key, is_special in kinds.items() if is_special]
    if len(special) > 1:
        lacking.append(' and '.join(special))
    if lacking:
        raise UserError(f'timm has no ViT with {", ".join(lacking)}; write an .npz file instead')
    if model['name'] == 'hybrid':
        return _HYBRIDS[model['layers']]
    if model['pool'] == 'distilled':
        return 'deit_base_distilled_patch16_224'
    if model['mlp'] == 'swiglu':
        return 'vit_giant_patch14_reg4_dinov2'
    is_clip = model['norm'] == 'layer' and model['norm_eps'] == _CLIP_EPS
    return 'vit_base_patch16_clip_224' if is_clip else 'vit_base_patch16_224'


def _arguments(model: Fields, pool: str) -> dict[str, Any]:
    """Return all arguments of the constructor that distinguish architectures."""
    hidden = model['mlp_dim'] * (2 if model['mlp'] == 'swiglu' else 1)
    ratio = hidden / model['width']
    if int(ratio * model['width']) != hidden:  # rounding error
        ratio = (hidden + 0.5) / model['width']
    return {
        **{key: model[key] for key in ('patch_size', 'depth', 'num_heads')},
        'embed_dim': model['width'],
        'mlp_ratio': ratio,
        'global_pool': pool,
        'class_token': model['pool'] in ('cls', 'patches', 'distilled'),
        'reg_tokens': model['registers'],
        'no_embed_class': _prefix(model) == 'none',
        'qkv_bias': not set(_QKV) <= set(model['no_bias'].split('|')),
        'pre_norm': model['norm_pre'],
        'fc_norm': model['fc_norm'],
        'final_norm': model['final_norm'],
        'qk_norm': model['qk_norm'] != 'none',
        'init_values': model['layer_scale'],
        **({'norm_layer': 'rmsnorm'} if model['norm'] == 'rms' else {}),
        **({'act_layer': _ACT_LAYERS[model['gelu']]} if model['mlp'] == 'mlp' else {}),
    }


def _tokens(flat: Flat, model: Fields, first: int) -> Flat:
    """Convert arrays to timm's positions and biases; patches before a norm have no biases there.

    `first` is the number of rows of `pos_embed` before the patches.
    """
    absent = set(filter(None, model['no_bias'].split('|')))
    keep = set(_QKV) if absent.issuperset(_QKV) else set()
    if model['norm_pre']:
        keep, flat = keep | {'patch_embed'}, without_patch_bias(flat, first)
    flat = equivalent.move_positions(flat, model['posemb_prefix'], _prefix(model))
    return equivalent.with_biases(flat, absent - keep)


def _prefix(model: Fields) -> str:
    """Return timm's `posemb_prefix`: all tokens before the patches have positions, or none."""
    if model['pool'] == 'distilled':
        return 'class'
    is_fit = model['posemb_prefix'] == 'all' or not model['registers']
    return model['posemb_prefix'] if is_fit else 'none'


def _join_gates(arrays: Flat) -> Flat:
    """Join gates and values of MLPs."""
    joined: Flat = {}
    for name, array in arrays.items():
        if (gate := name.replace('.mlp.fc1.', '.mlp.gate.')) != name and gate in arrays:
            joined[name] = np.concatenate([arrays[gate], array])
        elif '.mlp.gate.' not in name:
            joined[name] = array
    return joined


def _notes(model: Fields) -> tuple[str, ...]:
    """Note epsilons that differ in timm."""
    notes = []
    is_own = model['norm_eps'] in (_EPS, _CLIP_EPS) and model['norm'] == 'layer'
    if not is_own and model['norm_eps'] != _EPS:
        notes.append(
            f"timm's norms add {_EPS} to the variance, this model's add {model['norm_eps']}"
        )
    if model.get('epsilons') == 'authors':
        notes.append("timm's ResNet adds other epsilons to variances than the authors'")
    return tuple(notes)
