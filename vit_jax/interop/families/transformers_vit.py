"""ViTs of transformers: safetensors with the names of its versions 4 and 5, and config.json.

Names of version 4 are written: version 5 writes and reads them too. Positions beyond a square, GELU
and epsilons come from config.json; without it they are the defaults of transformers.ViTConfig.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from vit_jax.errors import UserError
from vit_jax.interop import labels, names, normalization, torch_layout
from vit_jax.interop.families import _vit
from vit_jax.interop.files import Flat
from vit_jax.interop.trained import GIVEN_SIZE, TrainedModel, Written
from vit_jax.nn.positions import sincos2d

POSITIONS = 'bicubic'
_NORM_EPS = 1e-12
# ViTConfig.hidden_act
_GELUS = {'gelu': 'erf', 'gelu_new': 'tanh', 'gelu_pytorch_tanh': 'tanh', 'gelu_fast': 'tanh'}
_WRITTEN_GELUS = {'erf': 'gelu', 'tanh': 'gelu_pytorch_tanh'}
_PREFIX = 'vit.'
_TYPES = ('vit', 'vit_mae')
_UNUSED = ('embeddings.mask_token',)  # of pretraining


def _block(theirs: str, *rows: tuple[str, str]) -> names.Table:
    return tuple((f'{theirs}.{{0}}.{a}', f'encoder/block_{{0}}/{b}') for a, b in rows)


# Without the prefix of all parts but the classifier in a model with a head.
TABLE: names.Table = (
    ('embeddings.cls_token', 'cls_token'),
    ('embeddings.position_embeddings', 'pos_embed'),
    ('embeddings.patch_embeddings.projection', 'patch_embed'),
    *_block(
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
    *_block(
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


def matches(flat: Mapping[str, np.ndarray]) -> bool:
    """Whether these are the names of such a model, and not also those of a decoder."""
    stem = 'embeddings.patch_embeddings.projection.weight'
    token = 'embeddings.cls_token'
    known = any(p + stem in flat and p + token in flat for p in ('', _PREFIX))
    return known and 'decoder.decoder_pred.weight' not in flat


def read(flat: Flat, extra: Mapping[str, Any]) -> TrainedModel:
    """A ViTModel, whose pooler is our `pre_logits`, a ViTForImageClassification or a ViTMAEModel.

    Raises:
      UserError: if parameters are unknown, absent or of the wrong shape, or do not fit the config.
    """
    source = 'transformers ViT'
    if extra.get('model_type', 'vit') not in _TYPES:
        raise UserError(f'{source}: config.json is of a {extra["model_type"]!r}, not of a vit')
    used = {name: array for name, array in flat.items() if _is_used(name, flat)}

    def translate(name: str) -> str | None:
        return torch_layout.ours(name.removeprefix(_PREFIX), TABLE)

    in_file = names.renamed(used, translate, source)

    def label(name: str) -> str:
        return in_file.get(name) or torch_layout.theirs(name, TABLE)

    heads = extra.get('num_attention_heads') or _vit.published_heads(
        {name: used[theirs].shape for name, theirs in in_file.items()}, source
    )
    stripped = {name.removeprefix(_PREFIX): array for name, array in used.items()}
    imported = _vit.assemble(
        torch_layout.read(stripped, TABLE, heads, source),
        source,
        label,
        gelu=_gelu(extra, source),
        norm_eps=float(extra.get('layer_norm_eps', _NORM_EPS)),
        image_size=_image_size(extra),
        hints=[extra[GIVEN_SIZE]] if GIVEN_SIZE in extra else [],
    )
    _require_config(imported, extra)
    return normalization.folded(imported, extra, normalization.UNKNOWN)


def write(trained: TrainedModel) -> Written:
    """Files of a ViTForImageClassification, or without a head of a ViTModel.

    Raises:
      UserError: if transformers has no such ViT, or neither the model nor a `pos_embed` of a square
        has the size of the images.
    """
    model = trained.model_config
    _require_class(model)
    flat = names.flattened(trained.params)
    size = trained.image_size or square(flat, model['patch_size'])
    if model['posemb'] == 'sincos2d':
        flat['pos_embed'] = _fixed_positions(size, model)
    arrays, channels = torch_layout.write(flat, TABLE), flat['patch_embed/kernel'].shape[2]
    config = _config(model, size, trained.class_names) | {'num_channels': channels}
    if model['num_classes']:
        arrays = {n if n.startswith('classifier') else _PREFIX + n: a for n, a in arrays.items()}
    return Written(arrays, config, preprocessor=normalization.preprocessor(channels, size))


def _is_used(name: str, flat: Flat) -> bool:
    """Whether the model uses a parameter: a classifier does not use the pooler."""
    name = name.removeprefix(_PREFIX)
    return name not in _UNUSED and not (name.startswith('pooler.') and 'classifier.weight' in flat)


def _gelu(config: Mapping[str, Any], source: str) -> str:
    name = config.get('hidden_act', 'gelu')
    if name not in _GELUS:
        raise UserError(
            f'{source}: hidden_act {name!r} is not supported (only {", ".join(_GELUS)})'
        )
    if config.get('pooler_act', 'tanh') != 'tanh':
        raise UserError(
            f'{source}: pooler_act {config["pooler_act"]!r} is not supported (only tanh)'
        )
    return _GELUS[name]


def _image_size(config: Mapping[str, Any]) -> tuple[int, int] | None:
    size = config.get('image_size')
    if size is None:
        return None
    height, width = size if isinstance(size, list | tuple) else (size, size)
    return int(height), int(width)


def _require_config(imported: TrainedModel, config: Mapping[str, Any]) -> None:
    """Raise UserError if config.json belongs to another file."""
    model = imported.model_config
    for key, field in (('num_hidden_layers', 'depth'), ('patch_size', 'patch_size')):
        if config.get(key, model[field]) != model[field]:
            raise UserError(
                f'{imported.source}: {key} is {config[key]}, the file has {model[field]}; '
                'config.json is of another model'
            )
    if imported.image_size is not None:
        height, width = imported.image_size
        rows = imported.params['pos_embed'].shape[1] - 1
        if (height // model['patch_size']) * (width // model['patch_size']) != rows:
            raise UserError(
                f'{imported.source}: image_size is {height}x{width}, '
                f'but pos_embed has rows for {rows} patches'
            )


def _require_class(model: Mapping[str, Any]) -> None:
    unsupported = {
        f'a {model["name"]}': model['name'] != 'vit',
        f'pool {model["pool"]!r}': model['pool'] != 'cls',
        'a norm before its head': model.get('head_norm', 'none') != 'none',
        'both a head and a representation_size': model['num_classes']
        and model['representation_size'],
    }
    for what, is_true in unsupported.items():
        if is_true:
            raise UserError(f'transformers has no ViT with {what}; write an .npz file instead')


def square(flat: Flat, patch_size: int) -> tuple[int, int]:
    """The size of square images with as many patches as there are positions.

    Raises:
      UserError: if they form no square.
    """
    side = _vit.square_side(flat['pos_embed'].shape[1] - 1) if 'pos_embed' in flat else None
    if side is None:
        raise UserError('the image size does not follow from pos_embed; give it')
    return side * patch_size, side * patch_size


def _fixed_positions(size: tuple[int, int], model: Mapping[str, Any]) -> np.ndarray:
    """The table that transformers keeps as a parameter, [1 1+N D]; zero for the class token."""
    height, width = (side // model['patch_size'] for side in size)
    return np.pad(sincos2d(height, width, model['width']), ((1, 0), (0, 0)))[None]


def _config(
    model: Mapping[str, Any], size: tuple[int, int], class_names: Sequence[str]
) -> dict[str, Any]:
    config = {
        'model_type': 'vit',
        'architectures': ['ViTForImageClassification' if model['num_classes'] else 'ViTModel'],
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
