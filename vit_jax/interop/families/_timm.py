"""timm's ViTs: the arguments of an architecture, as config.json changes them, and files for timm.

The table beside this file has those arguments of each architecture that shapes do not determine.
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
from vit_jax.interop import adapt, names, preprocessing, torch_layout
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
# Arguments for parts that no model here has, and the values that leave a part out.
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
    """The arguments of the model in config.json: its `model_args`, else those of its architecture.

    Raises:
      UserError: if the architecture has a part that no model here has.
    """
    known = architectures().get(architecture(extra), {})
    kind = known.get('class', '')
    if kind in _REFUSED:
        raise UserError(
            f'{source}: no model here is like {extra["architecture"]!r}: {_REFUSED[kind]}'
        )
    said = {key: extra[key] for key in ('global_pool',) if key in extra}
    changed = extra.get('model_args') or {}
    found = {**_DEFAULTS.get(kind, {}), **known, **said, **changed}
    if 'num_heads' in changed:
        found['embed_dim'] = changed.get('embed_dim')
    for key, plain in _PLAIN.items():
        if key in found and found[key] not in plain:
            raise UserError(
                f'{source}: no model here is like {extra.get("architecture")!r}: its {key} is '
                + shorten(repr(found[key]), 60, placeholder=' ...')
            )
    return found


def architecture(extra: Mapping[str, Any]) -> str:
    """The name of the architecture without that of its weights; empty if there is none."""
    return str(extra.get('architecture') or '').partition('.')[0]


def num_heads(found: Arguments, width: int) -> int | None:
    """The number of heads; None if neither config.json nor the architecture determines it.

    Args:
      found: the arguments.
      width: that of the arrays. If the arguments are for another width, their number of heads does
        not apply.
    """
    heads = found.get('num_heads')
    return heads if heads and (found.get('embed_dim') or width) == width else None


def gelu(found: Arguments, source: str, gated: bool = False) -> str:
    """Our name of the GELU; 'erf', which has no effect, for gated MLPs with SiLU.

    Raises:
      UserError: if the activation is not supported.
    """
    name = found.get('act_layer')
    if gated and (name in _SILUS or found.get('class') == 'Eva'):
        return 'erf'
    if name not in _GELUS or gated:
        raise UserError(f'{source}: act_layer {name!r} is not supported')
    return _GELUS[name]


def norm(found: Arguments, source: str) -> tuple[str, float]:
    """Our name of the norm, and its epsilon.

    Raises:
      UserError: if it is neither a layer norm nor an RMS norm.
    """
    name = found.get('norm_layer') or 'LayerNorm'
    if not (match := _NORM.fullmatch(str(name))):
        raise UserError(f'{source}: norm_layer {name!r} is not supported')
    return match[1].lower(), float(match[2] or _NORM_EPS)


def norm_place(found: Arguments) -> dict[str, str]:
    """The field `norm_place`, for norms that come after the layers."""
    is_post = found.get('block_fn') == _RES_POST or found.get('use_post_norm')
    return {'norm_place': 'res_post'} if is_post else {}


def naflex(flat: Flat, found: Arguments, source: str) -> tuple[Flat, list[Size]]:
    """The arrays of a NaFlexViT in the shapes of a ViT's, and the images of its positions.

    Raises:
      UserError: if the patches are not squares, or it has rotary positions.
    """
    if found.get('rope_type') not in (None, '', 'none'):
        raise UserError(f'{source}: no model here is a NaFlexViT with rotary positions')
    if found.get('pos_embed_align_corners') and found.get('pos_embed_interp_mode') != 'bilinear':
        raise UserError(f'{source}: pos_embed_align_corners is supported for bilinear positions')
    kernel, table = flat['embeds.proj.weight'], flat.get('embeds.pos_embed')
    if kernel.ndim == 2:  # of patches [P P C] in a row
        channels = found.get('in_chans') or 3
        side = math.isqrt(kernel.shape[1] // channels)
        if side * side * channels != kernel.shape[1]:
            raise UserError(f'{source}: embeds.proj.weight cannot have shape {kernel.shape}')
        kernel = kernel.reshape(-1, side, side, channels).transpose(0, 3, 1, 2)
    changed, sizes = {'embeds.proj.weight': kernel}, []
    tables = [flat.get(f'embeds.{name}') for name in TABLES]
    if all(one is not None and one.ndim == 3 for one in tables):
        sides = zip(tables, kernel.shape[2:], strict=True)
        rows, columns = (one.shape[1] * side for one, side in sides if one is not None)
        sizes = [(rows, columns)]
    if table is not None and table.ndim == 4:
        _, rows, columns, width = table.shape
        changed['embeds.pos_embed'] = table.reshape(1, rows * columns, width)
        sizes = [(rows * kernel.shape[2], columns * kernel.shape[3])]
    return flat | changed, sizes


def naflex_positions(found: Arguments) -> str:
    """Interpolation of a NaFlexViT's positions, see `ops.resize.grid`."""
    antialiased = found.get('pos_embed_antialias', True)
    ending = resize.CROPPED if found.get('pos_embed_ar_preserving') else ''
    if found.get('pos_embed') == 'factorized':
        return f'linear{ending}'
    if found.get('pos_embed_align_corners'):
        return f'bilinear{ending}'
    if found.get('pos_embed_interp_mode') == 'bilinear':
        return ('linear_antialiased' if antialiased else 'linear') + ending
    return ('antialiased' if antialiased else 'bicubic') + ending


def final_norm(found: Arguments) -> dict[str, bool]:
    """The field `final_norm`, for models without a norm after the blocks or the pooling."""
    no_norm = False in (found.get('final_norm'), found.get('use_post_transformer_norm'))
    return {'final_norm': False} if no_norm else {}


def positions(found: Arguments, source: str) -> str:
    """The field `positions`: the rotary ones of EVA-02, PE and DINOv3, or 'none'.

    Raises:
      UserError: if rotary positions have a form that is not supported.
    """
    if not found.get('use_rot_pos_emb'):
        return 'none'
    is_dinov3, half = found.get('rope_type') == 'dinov3', bool(found.get('rope_rotate_half'))
    offset, order = found.get('rope_grid_offset', 0.0), found.get('rope_grid_indexing', 'ij')
    shape = found.get('ref_feat_shape') or 0
    sides = set(shape) if isinstance(shape, list | tuple) else {shape}
    if half != is_dinov3 or len(sides) != 1 or (is_dinov3 and (offset or order == 'xy')):
        raise UserError(f'{source}: rotary positions of this form are not supported')
    theta = float(found.get('rope_temperature', _THETA))
    if is_dinov3:
        rescale = float(found.get('rope_rescale_coords') or 1.0)
        return f'rope_dinov3({theta=}, {rescale=})'
    reference, order = sides.pop(), 'xy' if order == 'xy' else 'yx'
    return f'rope({theta=}, {reference=}, offset={float(offset)}, {order=})'


@functools.cache
def architectures() -> Mapping[str, Arguments]:
    """Arguments by architecture; `class` is the name of the model's constructor."""
    table: dict[str, Arguments] = json.loads(TABLE.read_text())
    return table


# Other names of the same parts.
_SAME = (
    (r'(.*\.attn\.[qkv])_(bias)', r'\1.\2'),
    (r'(.*\.attn\.[qkv])_proj\.(weight|bias)', r'\1.\2'),
    (r'(.*\.mlp)\.fc1_g\.(weight|bias)', r'\1.gate.\2'),
    (r'(.*\.mlp)\.fc1_x\.(weight|bias)', r'\1.fc1.\2'),
)


def plain(flat: Flat, source: str) -> Flat:
    """Split fused projections and gates, and rename parts that have several names.

    Raises:
      UserError: if an array cannot be split.
    """
    used = {n: array for n, array in flat.items() if not n.endswith('relative_position_index')}
    parts = torch_layout.parted(used, source)
    return _ungated({_named(name): array for name, array in parts.items()})


def _named(name: str) -> str:
    for pattern, same in _SAME:
        name = re.sub(f'^{pattern}$', same, name)
    return name


def _ungated(flat: Flat) -> Flat:
    """Split layers with twice as many outputs as the next one has inputs: gates come first."""
    parts = dict(flat)
    for name, second in flat.items():
        if not name.endswith('.mlp.fc2.weight') or second.ndim != 2:
            continue
        mlp = name.removesuffix('.fc2.weight')
        for leaf in ('weight', 'bias'):
            both = flat.get(f'{mlp}.fc1.{leaf}')
            if both is not None and len(both) == 2 * second.shape[1]:
                parts[f'{mlp}.gate.{leaf}'], parts[f'{mlp}.fc1.{leaf}'] = np.split(both, 2)
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
FUSED = {'attn': 'qkv', 'attn_pool': 'kv'}  # projections that timm keeps in one array


def write(trained: TrainedModel, table: names.Table) -> Written:
    """Make the files of timm's VisionTransformer.

    Args:
      trained: the model.
      table: timm's names, and ours.

    Raises:
      UserError: if timm has no such model, or the image size is unknown.
    """
    model = fields(trained.model) | {'name': trained.settings.model.name}
    architecture = _architecture(model)
    flat = names.flattened(trained.params, model['no_bias'])
    stride, first = trained.model.stride, trained.model.positioned_tokens
    size = trained.image_size or square(flat, stride, first)
    if model['posemb'] == 'sincos2d':
        flat['pos_embed'] = fixed_positions(size, stride, model['width'], first)
    channels = trained.channels
    told, notes = image_keys(trained.transforms, size)
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
            **preprocessing.normalization(trained, channels),
            **told,
        },
    }
    if trained.class_names:
        config['label_names'] = list(trained.class_names)
    arrays = torch_layout.write(_tokens(flat, model, first), table)
    if not model.get('layers', True):  # timm does not call a root alone a stem
        arrays = {name.replace('.stem.', '.'): array for name, array in arrays.items()}
    return Written(torch_layout.fused(_gated(arrays), FUSED), config, (*_notes(model), *notes))


def image_keys(transforms: str, size: Size) -> tuple[dict[str, Any], tuple[str, ...]]:
    """The keys of `pretrained_cfg` that make images of `size`, and notes on differences."""
    recipe, notes = preprocessing.parse_recipe(transforms), []
    if recipe and recipe.made and recipe.made != size:
        notes.append(
            f'timm makes images of {size[1]} x {size[0]} pixels, which the positions are for; here '
            f'they have {recipe.made[1]} x {recipe.made[0]}'
        )
        transforms = preprocessing.resized(transforms, size)
    told = preprocessing.timm_keys(transforms, size)
    if not told:
        if re.search('resize|crop', transforms):
            notes.append(f'timm cannot prepare images as here: {transforms}')
        return {}, tuple(notes)
    files = {'pretrained_cfg': told | {'input_size': [3, *size], 'mean': [0.5]}}
    return told, (*notes, *preprocessing.differences(transforms, files))


def _architecture(model: Fields) -> str:
    """The name of an architecture with those parts of the model that no argument can change.

    Raises:
      UserError: if there is none.
    """
    lacking = misfits(model, _FIELDS)
    if model['qk_norm'] not in ('none', model['norm']):
        lacking.append(f'qk_norm {model["qk_norm"]!r} beside norm {model["norm"]!r}')
    if model['name'] == 'hybrid' and model['layers'] not in _HYBRIDS:
        lacking.append(f'layers {model["layers"]}')
    kinds = {
        'pool': model['pool'] == 'distilled',
        'mlp': model['mlp'] != 'mlp',
        'layers': model['name'] == 'hybrid',
    }
    if len(special := [f'{key} {model[key]!r}' for key, is_so in kinds.items() if is_so]) > 1:
        lacking.append(' and '.join(special))
    if lacking:
        raise UserError(
            f'no ViT with {", ".join(lacking)} is written for timm; write an .npz file instead'
        )
    if model['name'] == 'hybrid':
        return _HYBRIDS[model['layers']]
    if model['pool'] == 'distilled':
        return 'deit_base_distilled_patch16_224'
    if model['mlp'] == 'swiglu':
        return 'vit_giant_patch14_reg4_dinov2'
    is_clip = model['norm'] == 'layer' and model['norm_eps'] == _CLIP_EPS
    return 'vit_base_patch16_clip_224' if is_clip else 'vit_base_patch16_224'


def _arguments(model: Fields, pool: str) -> dict[str, Any]:
    """The constructor's arguments: all those in which architectures differ."""
    hidden = model['mlp_dim'] * (2 if model['mlp'] == 'swiglu' else 1)
    ratio = hidden / model['width']
    if int(ratio * model['width']) != hidden:  # by rounding
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
    """Arrays with timm's positions and biases; patches before a norm have no biases there.

    `first` is the number of rows of `pos_embed` before those of the patches.
    """
    absent = set(filter(None, model['no_bias'].split('|')))
    kept = set(_QKV) if absent.issuperset(_QKV) else set()
    if model['norm_pre']:
        kept, flat = kept | {'patch_embed'}, without_patch_bias(flat, first)
    flat = adapt.move_positions(flat, model['posemb_prefix'], _prefix(model))
    return adapt.with_biases(flat, absent - kept)


def _prefix(model: Fields) -> str:
    """The `posemb_prefix` in timm: all tokens before the patches have positions, or none has."""
    if model['pool'] == 'distilled':
        return 'class'
    is_fit = model['posemb_prefix'] == 'all' or not model['registers']
    return model['posemb_prefix'] if is_fit else 'none'


def _gated(arrays: Flat) -> Flat:
    """Join the gates and the values of MLPs."""
    joined: Flat = {}
    for name, array in arrays.items():
        if (gate := name.replace('.mlp.fc1.', '.mlp.gate.')) != name and gate in arrays:
            joined[name] = np.concatenate([arrays[gate], array])
        elif '.mlp.gate.' not in name:
            joined[name] = array
    return joined


def _notes(model: Fields) -> tuple[str, ...]:
    """Notes on epsilons that differ in timm."""
    notes = []
    is_own = model['norm_eps'] in (_EPS, _CLIP_EPS) and model['norm'] == 'layer'
    if not is_own and model['norm_eps'] != _EPS:
        notes.append(
            f"timm's norms add {_EPS} to the variance, this model's add {model['norm_eps']}"
        )
    if model.get('epsilons') == 'authors':
        notes.append("timm's ResNet adds other epsilons to variances than the authors'")
    return tuple(notes)
