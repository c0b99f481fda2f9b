"""ViTs, DeiTs, MSN and I-JEPA of transformers: safetensors with the names of versions 4 and 5.

Names of version 4 are written: version 5 writes and reads them too. Positions beyond a square, GELU
and epsilons come from config.json; without it they are the defaults of transformers.ViTConfig.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from vit_jax.errors import UserError
from vit_jax.interop import labels, names, normalization, torch_layout
from vit_jax.interop.families import _transformers, _vit
from vit_jax.interop.files import Flat
from vit_jax.interop.trained import TrainedModel, Written
from vit_jax.nn.positions import sincos2d

POSITIONS = 'bicubic'
_WRITTEN_GELUS = {'erf': 'gelu', 'tanh': 'gelu_pytorch_tanh', 'quick': 'quick_gelu'}
_PREFIX = 'vit.'
# By pool: the beginning of the names of classes, and the prefix of parameters in those with a head.
_CLASSES = {'cls': ('ViT', _PREFIX), 'gap': ('IJepa', 'ijepa.')}
# Fields that have to be so, beside those that the parameters show.
_ONLY: dict[str, Any] = {
    **{'positions': 'none', 'norm': 'layer', 'norm_place': 'pre', 'no_bias': ''},
    **{'fc_norm': False, 'final_norm': True},
}


# Without the prefix of all parts but the classifier in a model with a head.
TABLE: names.Table = (
    ('embeddings.cls_token', 'cls_token'),
    ('embeddings.position_embeddings', 'pos_embed'),
    ('embeddings.patch_embeddings.projection', 'patch_embed'),
    *_transformers.blocks(
        'encoder.layer',
        ('layernorm_before', 'norm1'),
        ('attention.attention.query', 'attention/query'),
        ('attention.attention.key', 'attention/key'),
        ('attention.attention.value', 'attention/value'),
        ('attention.output.dense', 'attention/out'),
        ('layernorm_after', 'norm2'),
        ('intermediate.dense', 'mlp/fc1'),
        ('output.dense', 'mlp/fc2'),
    ),
    *_transformers.blocks(
        'layers',
        ('layernorm_before', 'norm1'),
        ('attention.q_proj', 'attention/query'),
        ('attention.k_proj', 'attention/key'),
        ('attention.v_proj', 'attention/value'),
        ('attention.o_proj', 'attention/out'),
        ('layernorm_after', 'norm2'),
        ('mlp.fc1', 'mlp/fc1'),
        ('mlp.fc2', 'mlp/fc2'),
    ),
    ('layernorm', 'encoder/norm'),
    ('pooler.dense', 'pre_logits'),
    ('classifier', 'head'),
)


_KINDS = (
    _transformers.Kind(
        'transformers ViT',
        ('vit', 'vit_mae'),
        TABLE,
        prefixes=(_PREFIX,),
        unused=('embeddings.mask_token',),  # of pretraining
        defaults={'layer_norm_eps': 1e-12},
    ),
    _transformers.Kind(
        'transformers MSN',
        ('vit_msn',),
        TABLE,
        prefixes=(_PREFIX,),
        unused=('embeddings.mask_token',),
        defaults={'layer_norm_eps': 1e-6, 'num_attention_heads': 12},
    ),
    _transformers.Kind(
        'transformers DeiT',
        ('deit',),
        (
            *TABLE,
            ('embeddings.distillation_token', 'register_tokens'),
            ('cls_classifier', 'head'),
            ('distillation_classifier', 'head/distillation'),
        ),
        prefixes=('deit.',),
        unused=('embeddings.mask_token',),
        defaults={'layer_norm_eps': 1e-12, 'num_attention_heads': 12},
    ),
    _transformers.Kind(
        'transformers I-JEPA',
        ('ijepa',),
        TABLE,
        prefixes=('ijepa.',),
        unused=('embeddings.mask_token', 'pooler.'),
        defaults={'layer_norm_eps': 1e-12, 'num_attention_heads': 12},
    ),
)
# Of all of them, to tell their names from others'.
_PLAIN = _transformers.Kind('', (), (), tuple(p for kind in _KINDS for p in kind.prefixes))
_EMBEDDING = 'embeddings.patch_embeddings.projection.weight'
_NORMS = ('encoder.layer.0.layernorm_before.weight', 'layers.0.layernorm_before.weight')
# Names of other families with the same names beside them.
_OTHERS = ('decoder.decoder_pred.weight', 'embeddings.detection_tokens', 'pooler.layernorm.weight')


def matches(flat: Mapping[str, np.ndarray]) -> bool:
    """Whether these are the names of such a model, and not also those of another one."""
    known = {_PLAIN.plain(name) for name in flat}
    is_vit = _EMBEDDING in known and not known.isdisjoint(_NORMS)
    lambdas = any(re.search(r'\.0\.(lambda_1|layer_scale1)', name) for name in known)
    return is_vit and not lambdas and known.isdisjoint(_OTHERS)


def read(flat: Flat, extra: Mapping[str, Any]) -> TrainedModel:
    """A ViTModel, whose pooler is our `pre_logits`, a ViTForImageClassification or a ViTMAEModel;
    or the same of DeiT, MSN or I-JEPA.

    The distillation token of a DeiT, with its position, becomes a register, unless it has a
    classifier of its own.

    Raises:
      UserError: if parameters are unknown, absent or of the wrong shape, or do not fit the config.
    """
    kind = _kind(flat, extra)
    used = kind.used(flat)
    if 'classifier.weight' in flat:  # which does not use the pooler
        used = {n: array for n, array in used.items() if not kind.plain(n).startswith('pooler.')}
    if 'distillation_classifier.weight' in flat:  # both tokens are read, then
        rows = ((a, b.replace('register_tokens', 'dist_token')) for a, b in kind.table)
        return _transformers.read(dataclasses.replace(kind, table=tuple(rows)), used, extra, rows=2)
    distilled = any(name.endswith('embeddings.distillation_token') for name in flat)
    return _transformers.read(kind, used, extra, rows=2 if distilled else 1)


def _kind(flat: Flat, extra: Mapping[str, Any]) -> _transformers.Kind:
    """That of config.json, or else of the prefix."""
    found = extra.get('model_type')
    by_type = (kind for kind in _KINDS if found in kind.types)
    by_name = (k for k in _KINDS if any(name.startswith(k.prefixes) for name in flat))
    return next(by_type, None) or next(by_name, _KINDS[0])


def write(trained: TrainedModel) -> Written:
    """Files of a ViTForImageClassification, or without a head of a ViTModel; with pool 'gap', which
    has no class token, of an IJepaForImageClassification or an IJepaModel.

    Raises:
      UserError: if transformers has no such ViT, or neither the model nor a `pos_embed` of a square
        has the size of the images.
    """
    model = trained.model_config
    _require_class(model)
    flat, first = names.flattened(trained.params), int(model['pool'] == 'cls')
    if unknown := [name for name in flat if names.theirs(name, TABLE) is None]:
        raise UserError(f"transformers' ViT has no part like {names.listed(unknown)}")
    size = trained.image_size or square(flat, model['patch_size'], first)
    if model['posemb'] == 'sincos2d':
        flat['pos_embed'] = _fixed_positions(size, model, first)
    arrays, channels = torch_layout.write(flat, TABLE), flat['patch_embed/kernel'].shape[2]
    config = _config(model, size, trained.class_names) | {'num_channels': channels}
    if model['num_classes']:
        prefix = _CLASSES[model['pool']][1]
        arrays = {n if n.startswith('classifier') else prefix + n: a for n, a in arrays.items()}
    return Written(arrays, config, preprocessor=normalization.preprocessor(channels, size))


def _require_class(model: Mapping[str, Any]) -> None:
    both = model['pool'] != 'cls' or model['num_classes']
    unsupported = {
        f'a {model["name"]}': model['name'] != 'vit',
        f'pool {model["pool"]!r}': model['pool'] not in _CLASSES,
        'a norm before its head': model.get('head_norm', 'none') != 'none',
        "posemb 'none'": model.get('posemb') == 'none',
        f'pool {model["pool"]!r} and a representation_size'
        if model['pool'] != 'cls'
        else 'both a head and a representation_size': both and model['representation_size'],
        **{
            f'{key} {model.get(key)!r}': model.get(key, only) != only for key, only in _ONLY.items()
        },
    }
    for what, is_true in unsupported.items():
        if is_true:
            raise UserError(f'transformers has no ViT with {what}; write an .npz file instead')


def square(flat: Flat, patch_size: int, first: int = 1) -> tuple[int, int]:
    """The size of square images with as many patches as there are positions after the first ones.

    Raises:
      UserError: if they form no square.
    """
    side = _vit.square_side(flat['pos_embed'].shape[1] - first) if 'pos_embed' in flat else None
    if side is None:
        raise UserError('the image size does not follow from pos_embed; give it')
    return side * patch_size, side * patch_size


def _fixed_positions(size: tuple[int, int], model: Mapping[str, Any], first: int) -> np.ndarray:
    """The table that transformers keeps as a parameter, [1 1+N D]; zero for the class token, if
    there is one.
    """
    height, width = (side // model['patch_size'] for side in size)
    return np.pad(sincos2d(height, width, model['width']), ((first, 0), (0, 0)))[None]


def _config(
    model: Mapping[str, Any], size: tuple[int, int], class_names: Sequence[str]
) -> dict[str, Any]:
    kind, prefix = _CLASSES[model['pool']]
    config = {
        'model_type': prefix.rstrip('.'),
        'architectures': [kind + ('ForImageClassification' if model['num_classes'] else 'Model')],
        **shape_config(model, size),
    }
    if model['representation_size']:
        config |= {'pooler_output_size': model['representation_size'], 'pooler_act': 'tanh'}
    if model['num_classes']:
        config |= labels.write(class_names, model['num_classes'])
    return config


def shape_config(model: Mapping[str, Any], size: tuple[int, int]) -> dict[str, Any]:
    """The fields of config.json for the blocks and the images' height and width."""
    return {
        'hidden_size': model['width'],
        'num_hidden_layers': model['depth'],
        'num_attention_heads': model['num_heads'],
        'intermediate_size': model['mlp_dim'],
        'hidden_act': _WRITTEN_GELUS[model['gelu']],
        'layer_norm_eps': model['norm_eps'],
        'image_size': size[0] if size[0] == size[1] else list(size),
        'patch_size': model['patch_size'],
        'qkv_bias': True,
    }


WRITERS = {('vit', 'transformers'): write}
