"""The arguments of timm's ViTs that the shapes of their parameters do not determine.

As a command it writes the table that the package reads timm's files by:

    python tests/helpers/timm_architectures.py > vit_jax/interop/families/timm_architectures.json

timm itself is asked: its functions are called with a constructor that only keeps the arguments.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib
import json
import sys
from typing import Any
from unittest import mock

MODULES = (
    *('vision_transformer', 'vision_transformer_hybrid', 'deit', 'beit', 'eva'),
    *('vision_transformer_relpos', 'vision_transformer_sam', 'naflexvit'),
)
# Of no use for reading: sizes, parts that have parameters of their own, initial values.
_SHAPES = (
    *(
        'img_size',
        'pos_embed_grid_size',
        'patch_size',
        'depth',
        'mlp_ratio',
        'class_token',
        'init_values',
    ),
    *('pre_norm', 'fc_norm', 'reg_tokens', 'num_reg_tokens', 'embed_norm_layer'),
    *('qkv_bias', 'qkv_fused', 'proj_bias', 'qk_norm', 'scale_attn_norm', 'scale_mlp_norm'),
    *('scale_mlp', 'scale_attn_inner', 'swiglu_align_to', 'use_abs_pos_emb', 'use_rel_pos_bias'),
    *('use_pre_transformer_norm', 'use_fc_norm', 'rel_pos_dim'),
    *(
        'attn_pool_mlp_ratio',
        'attn_only_layer_scale',
        'dynamic_img_size',
        'attn_type',
        'weight_init',
    ),
)
_BUILDER = (
    *('pretrained_cfg', 'pretrained_cfg_overlay', 'pretrained_filter_fn', 'pretrained_strict'),
    *('feature_cfg', 'kwargs_filter', 'cache_dir', 'pretrained_model_args', 'cfg', 'features_only'),
)


class _Built(Exception):
    """Ends a function of timm at its constructor."""


def table() -> dict[str, dict[str, Any]]:
    """Arguments by architecture; `class` is that of the model."""
    import timm

    rows = {
        name: _arguments(name) for module in MODULES for name in timm.list_models(module=module)
    }
    former = {
        alias: str(name).partition('.')[0] for alias, name in _registry()._deprecated_models.items()
    }
    return rows | {alias: rows[name] for alias, name in former.items() if name in rows}


def text() -> str:
    """The table as JSON, an architecture a line."""
    lines = (f'  {json.dumps(name)}: {json.dumps(row)}' for name, row in sorted(table().items()))
    return '{\n' + ',\n'.join(lines) + '\n}\n'


def _arguments(name: str) -> dict[str, Any]:
    create = _registry().model_entrypoint(name)
    builder = mock.Mock(side_effect=_keep)
    names = {'build_model_with_cfg': builder, '_resnetv2': mock.Mock(return_value=None)}
    module = sys.modules[create.__module__]
    known = {key: value for key, value in names.items() if hasattr(module, key)}
    with mock.patch.multiple(module, **known):
        try:
            create()
        except _Built as built:
            model, keywords = built.args
    if model.__name__ == 'NaFlexVit':
        keywords = _configured(keywords['cfg'])
    keywords = {k: _plain(v) for k, v in keywords.items() if k not in (*_SHAPES, *_BUILDER)}
    return {'class': model.__name__, **keywords}


def _configured(config: Any) -> dict[str, Any]:
    """The fields of a NaFlexViT's config that are not defaults, and those that are always read."""
    default = type(config)()
    always = ('embed_dim', 'num_heads', 'global_pool')
    return {
        field.name: value
        for field in dataclasses.fields(config)
        if (value := getattr(config, field.name)) != getattr(default, field.name)
        or field.name in always
    }


def _registry() -> Any:
    """Where timm keeps the former names of its models too, which it tells nobody otherwise."""
    return importlib.import_module('timm.models._registry')


def _keep(model: Any, *_: Any, **keywords: Any) -> None:
    raise _Built(model, keywords)


def _plain(value: Any) -> Any:
    """A class by its name, and with arguments as in 'LayerNorm(eps=1e-05)'."""
    if isinstance(value, functools.partial):
        words = {k: v for k, v in value.keywords.items() if k not in ('backbone', 'act_layer')}
        inside = ', '.join(f'{key}={word}' for key, word in words.items())
        return f'{value.func.__name__}({inside})' if inside else value.func.__name__
    return value.__name__ if isinstance(value, type) else value


if __name__ == '__main__':
    sys.stdout.write(text())
