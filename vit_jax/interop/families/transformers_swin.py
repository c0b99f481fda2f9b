"""Swin and Swin v2 of transformers: safetensors and config.json.

Names of versions 4 and 5 are read; names of version 4 are written, which both versions read. GELU
and the image size, which shapes do not determine, come from config.json. Images are padded to
multiples of the patch size with zeros, the mean of normalized images.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from vit_jax.errors import UserError
from vit_jax.interop import names, normalization, preprocessing
from vit_jax.interop.families import _swin
from vit_jax.interop.files import Flat
from vit_jax.interop.trained import TrainedModel, Written, class_names_config

_SOURCE = 'transformers Swin'
_PREFIX, _PREFIX_V2 = 'swin.', 'swinv2.'
# Buffers, and parameters only for pretraining.
_UNUSED = ('relative_position_index', 'relative_coords_table', 'embeddings.mask_token')
# SwinConfig.hidden_act
_GELUS = {'gelu': 'erf', 'gelu_pytorch_tanh': 'tanh', 'gelu_new': 'tanh'}
_LAYER = 'encoder.layers.{0}'
_TABLE = 'relative_position_bias_table'


# Swin v2.
_MLP = 'attention.self.continuous_position_bias_mlp'
_V2 = (
    ('attention.self.logit_scale', _swin.SCALE),
    (f'{_MLP}.0', f'{_swin.BIAS}/fc1'),
    (f'{_MLP}.2', f'{_swin.BIAS}/fc2'),
)


def _block(*rows: tuple[str, str]) -> names.Table:
    return tuple((f'{_LAYER}.blocks.{{0}}.{a}', f'{_swin.BLOCK}/{b}') for a, b in rows)


# Without the prefix of all names except the classifier's, in models with a head.
TABLE: names.Table = (
    ('embeddings.patch_embeddings.projection', 'patch_embed'),
    ('embeddings.norm', 'embed_norm'),
    *_block(
        ('layernorm_before', 'norm1'),
        ('attention.self.query', 'attention/query'),
        ('attention.self.key', 'attention/key'),
        ('attention.self.value', 'attention/value'),
        *_V2,
        (f'attention.self.{_TABLE}', _swin.BIAS),
        ('attention.output.dense', 'attention/out'),
        ('layernorm_after', 'norm2'),
        ('intermediate.dense', 'mlp/fc1'),
        ('output.dense', 'mlp/fc2'),
        # Version 5:
        ('attention.q_proj', 'attention/query'),
        ('attention.k_proj', 'attention/key'),
        ('attention.v_proj', 'attention/value'),
        (f'attention.relative_position_bias.{_TABLE}', _swin.BIAS),
        ('attention.o_proj', 'attention/out'),
        ('mlp.fc1', 'mlp/fc1'),
        ('mlp.fc2', 'mlp/fc2'),
    ),
    (f'{_LAYER}.downsample.norm', 'stage_{0}/merge/norm'),
    (f'{_LAYER}.downsample.reduction', 'stage_{0}/merge/reduction'),
    ('layernorm', 'norm'),
    ('classifier', 'head'),
)


def matches(flat: Mapping[str, np.ndarray]) -> bool:
    """Return whether these are the names of such a model."""
    stem, block = 'embeddings.patch_embeddings.projection.weight', 'encoder.layers.0.blocks.0.'
    stems = [p for p in ('', _PREFIX, _PREFIX_V2) if p + stem in flat]
    return any(name.startswith(p + block) for p in stems for name in flat)


def read(flat: Flat, extra: Mapping[str, Any]) -> TrainedModel:
    """Read a SwinModel or a SwinForImageClassification, or the same of Swin v2.

    Raises:
      UserError: if parameters are unknown, missing or have the wrong shape, or contradict the
        config.
    """
    is_v2 = any(name.endswith('.logit_scale') for name in flat)
    _require_ours(extra, 'swinv2' if is_v2 else 'swin')
    used = {
        name.removeprefix(_PREFIX).removeprefix(_PREFIX_V2): array
        for name, array in flat.items()
        if not name.endswith(_UNUSED)
    }
    gelu = _GELUS[extra.get('hidden_act', 'gelu')]
    size = extra.get('image_size')
    image_size = (size, size) if isinstance(size, int) else size and (size[0], size[1])
    windows = _windows_v2(extra) if is_v2 else None
    imported = _swin.assemble(used, TABLE, _SOURCE, extra, gelu, image_size, windows)
    for key, field in (('window_size', 'window'), ('embed_dim', 'width')):
        if extra.get(key, imported.model_config[field]) != imported.model_config[field]:
            raise UserError(
                f'{_SOURCE}: {key} is {extra[key]}, but the file has '
                f'{imported.model_config[field]}; config.json describes a different model'
            )
    return normalization.with_normalization(imported, extra, normalization.UNKNOWN_NORMALIZATION)


def write(trained: TrainedModel) -> Written:
    """Write the files of a SwinForImageClassification or, without a head, of a SwinModel; for a
    Swin v2, of the same Swinv2 classes.

    If the image size is unknown, it is written as the size whose last feature map is one window.

    Raises:
      UserError: if transformers has no such Swin.
    """
    model = trained.model_config
    if model['norm_eps'] != _swin.NORM_EPS:
        raise UserError(f'transformers has no Swin with norm_eps {model["norm_eps"]:g}')
    arrays = _swin.to_pytorch(trained.params, TABLE)
    channels = arrays['embeddings.patch_embeddings.projection.weight'].shape[1]
    side = trained.model.stride * model['window']
    size = trained.image_size or (side, side)
    config = {**_config(model, size), 'num_channels': channels}
    if model['num_classes']:
        prefix = _PREFIX_V2 if model['name'] == 'swin_v2' else _PREFIX
        arrays = {n if n.startswith('classifier') else prefix + n: a for n, a in arrays.items()}
        config |= class_names_config(trained.class_names, model['num_classes'])
    preprocessor = preprocessing.preprocessor(trained, channels, size)
    return Written(arrays, config, tuple(_notes(model, size)), preprocessor)


def _config(model: Mapping[str, Any], size: tuple[int, int]) -> dict[str, Any]:
    """Return the keys of config.json for the architecture."""
    is_v2 = model['name'] == 'swin_v2'
    kind, task = 'Swinv2' if is_v2 else 'Swin', 'ForImageClassification'
    limiting = model.get('image_size') or size[0]  # limits the windows of a Swin v2
    height, width = size if limiting == size[0] else (limiting, limiting)
    pretrained = model.get('pretrained_windows') or (0,) * len(model['depths'])
    return {
        'model_type': kind.lower(),
        'architectures': [f'{kind}{task if model["num_classes"] else "Model"}'],
        'image_size': height if height == width else [height, width],
        'patch_size': model['patch_size'],
        'embed_dim': model['width'],
        'depths': list(model['depths']),
        'num_heads': list(model['num_heads']),
        'window_size': model['window'],
        'mlp_ratio': model['mlp_ratio'],
        'qkv_bias': model.get('qkv_bias', True),
        'hidden_act': next(act for act, gelu in _GELUS.items() if gelu == model['gelu']),
        'layer_norm_eps': _swin.NORM_EPS,
        **({'pretrained_window_sizes': list(pretrained)} if is_v2 else {}),
    }


def _notes(model: Mapping[str, Any], size: tuple[int, int]) -> Iterator[str]:
    """Note differences from transformers that its config cannot express."""
    if any(model.get('pad_value', ())):
        yield (
            'transformers pads images whose sides are not multiples of the patch size with zeros, '
            f'this model with pad_value {model["pad_value"]}'
        )
    if model.get('image_size', size) is None:
        yield (
            f'transformers limits windows to the feature maps of images of {size[0]} pixels, this '
            'model to those of its input'
        )


def _windows_v2(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of a Swin v2 from config.json, with the defaults of Swinv2Config.

    transformers limits windows to the height of a stage's feature map, also along its width.

    Raises:
      UserError: if there is no config.json.
    """
    if 'model_type' not in config:
        raise UserError(f'{_SOURCE} v2: unknown window size; put its config.json next to it')
    size = config.get('image_size', 224)
    return {
        'window': config.get('window_size', 7),
        'pretrained_windows': tuple(config.get('pretrained_window_sizes') or ()),
        'image_size': size if isinstance(size, int) else size[0],
    }


def _require_ours(config: Mapping[str, Any], kind: str) -> None:
    """Raise UserError for the config.json of an unsupported model."""
    expected = {
        'model_type': (kind,),
        'hidden_act': tuple(_GELUS),
        'layer_norm_eps': (_swin.NORM_EPS,),
        'use_absolute_embeddings': (False,),
    }
    for key, supported in expected.items():
        if config.get(key, supported[0]) not in supported:
            raise UserError(
                f'{_SOURCE}: config.json has {key}={config[key]!r}; only '
                f'{", ".join(map(str, supported))} is supported'
            )


WRITERS = {('swin', 'transformers'): write, ('swin_v2', 'transformers'): write}
