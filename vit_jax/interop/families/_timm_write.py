"""ViTs and hybrids written for timm: safetensors and a config.json for `timm.create_model`.

One architecture of each kind is named there, and `model_args` change it into the model.
"""

from __future__ import annotations

import re
from typing import Any

import numpy as np

from vit_jax.errors import UserError
from vit_jax.interop import names, preprocessing, torch_layout
from vit_jax.interop.families import _vit
from vit_jax.interop.families._transformers_write import (
    Fields,
    fixed_positions,
    misfits,
    square,
    without_patch_bias,
)
from vit_jax.interop.files import Flat
from vit_jax.interop.trained import Size, TrainedModel, Written, fields

# The values, as patterns, that fields have to have.
_FIELDS = {
    **{'pool': 'cls|gap|patches|map|distilled', 'posemb': 'learn|sincos2d', 'positions': 'none'},
    **{'norm_place': 'pre', 'head_norm': 'none', 'no_bias': '', 'mlp': 'mlp|swiglu'},
    'representation_size': 'None|0',
}
# By the layers of their ResNet.
_HYBRIDS = {
    (): 'vit_tiny_r_s16_p8_224',
    (2, 2, 2, 2): 'vit_base_r26_s32_224',
    (3, 4, 9): 'vit_base_r50_s16_224',
    (3, 4, 6, 3): 'vit_large_r50_s32_224',
}
_EPS, _CLIP_EPS = 1e-6, 1e-5
_POOLS = {'cls': 'token', 'distilled': 'token', 'gap': 'avg', 'patches': 'avg', 'map': 'map'}
_GELUS = {'erf': 'gelu', 'tanh': 'gelu_tanh', 'quick': 'quick_gelu'}
# Projections that are one array there.
_FUSED = (('attn', 'qkv'), ('attn_pool', 'kv'))


def write(trained: TrainedModel, table: names.Table) -> Written:
    """The files of a VisionTransformer of timm.

    Args:
      trained: the model.
      table: names of timm, and ours.

    Raises:
      UserError: if timm has no such model, or the size of the images is unknown.
    """
    model = fields(trained.model) | {'name': trained.config.model.name}
    architecture = _architecture(model)
    flat = _vit.unscaled(names.flattened(trained.params), 'the model', lambda name: name)
    stride, first = trained.model.stride, trained.model.positioned_tokens
    size = trained.image_size or square(flat, stride, first)
    if model['posemb'] == 'sincos2d':
        flat['pos_embed'] = fixed_positions(size, stride, model['width'], first)
    channels = trained.channels
    told, notes = _images(trained.transforms, size)
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
            **{'mean': [0.5] * channels, 'std': [0.5] * channels},
            **told,
        },
    }
    if trained.class_names:
        config['label_names'] = list(trained.class_names)
    arrays = torch_layout.write(_tokens(flat, model), table)
    if not model.get('layers', True):  # a root alone, which is no stem there
        arrays = {name.replace('.stem.', '.'): array for name, array in arrays.items()}
    return Written(_fused(_gated(arrays)), config, (*_notes(model), *notes))


def _images(transforms: str, size: Size) -> tuple[dict[str, Any], tuple[str, ...]]:
    """The keys of `pretrained_cfg` that make images of `size`, and what is different there."""
    recipe, notes = preprocessing.recipe_of(transforms), []
    if recipe and recipe.made and recipe.made != size:
        notes.append(
            f'its images have {size[0]} x {size[1]} pixels there, as its positions are for, '
            f'{recipe.made[0]} x {recipe.made[1]} here'
        )
        transforms = preprocessing.resized(transforms, size)
    told = preprocessing.written_for_timm(transforms, size)
    if not told:
        if re.search('resize|crop', transforms):
            notes.append(f'timm cannot make its images, as is done here by {transforms}')
        return {}, tuple(notes)
    files = {'pretrained_cfg': told | {'input_size': [3, *size], 'mean': [0.5]}}
    return told, (*notes, *preprocessing.differences(transforms, files))


def _architecture(model: Fields) -> str:
    """The name of one that has the parts that no argument changes.

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
            f'no ViT is written for timm with {", ".join(lacking)}; write an .npz file instead'
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
    """Those of the constructor, all that an architecture may have otherwise."""
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
        'no_embed_class': bool(model['registers']),
        'pre_norm': model['norm_pre'],
        'fc_norm': model['fc_norm'],
        'final_norm': model['final_norm'],
        'qk_norm': model['qk_norm'] != 'none',
        'init_values': None,
        **({'norm_layer': 'rmsnorm'} if model['norm'] == 'rms' else {}),
        **({'act_layer': _GELUS[model['gelu']]} if model['mlp'] == 'mlp' else {}),
    }


def _tokens(flat: Flat, model: Fields) -> Flat:
    """Positions as timm keeps them: beside registers no token but the patches has one, and before
    a norm patches have no biases.
    """
    kept = without_patch_bias(flat) if model['norm_pre'] else dict(flat)
    if model['registers'] and 'cls_token' in kept:
        kept['cls_token'] = kept['cls_token'] + kept['pos_embed'][:, :1]
        kept['pos_embed'] = kept['pos_embed'][:, 1:]
    return kept


def _gated(arrays: Flat) -> Flat:
    """The gates and the values of an MLP in one layer."""
    joined: Flat = {}
    for name, array in arrays.items():
        if (gate := name.replace('.mlp.fc1.', '.mlp.gate.')) != name and gate in arrays:
            joined[name] = np.concatenate([arrays[gate], array])
        elif '.mlp.gate.' not in name:
            joined[name] = array
    return joined


def _fused(arrays: Flat) -> Flat:
    """The projections of attention in one layer."""
    joined: Flat = {}
    for name, array in arrays.items():
        for module, letters in _FUSED:
            if match := re.fullmatch(rf'((?:.*\.)?{module})\.([{letters}])\.(\w+)', name):
                parent, _, leaf = match.groups()
                parts = [arrays[f'{parent}.{letter}.{leaf}'] for letter in letters]
                joined[f'{parent}.{letters}.{leaf}'] = np.concatenate(parts)
                break
        else:
            joined[name] = array
    return joined


def _notes(model: Fields) -> tuple[str, ...]:
    """Numbers that timm has otherwise."""
    notes = []
    is_own = model['norm_eps'] in (_EPS, _CLIP_EPS) and model['norm'] == 'layer'
    if not is_own and model['norm_eps'] != _EPS:
        notes.append(f"timm's norms add {_EPS} to the variance, this model's {model['norm_eps']}")
    if model.get('epsilons') == 'authors':
        notes.append("timm's ResNet adds other numbers to variances than the authors'")
    return tuple(notes)
