"""LW-DETR of transformers: the decoder of RF-DETR on a ViT without class token.

Norms of its projector are batch norms, whose statistics are folded into their factors.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Mapping
from typing import Any

import numpy as np

from vit_jax.errors import UserError
from vit_jax.interop import names, normalization, torch_layout
from vit_jax.interop.families import _rf_detr, _transformers
from vit_jax.interop.files import Flat
from vit_jax.interop.trained import TrainedModel, Written, class_names_config
from vit_jax.models.rf_detr import Model
from vit_jax.nn.detection import SCALES, is_narrowed

POSITIONS = 'bicubic'
_SOURCE = 'transformers LW-DETR'
_VIT = 'model.backbone.backbone.'
_EPS = 1e-5

_BLOCKS: names.Table = _transformers.blocks(
    f'{_VIT}encoder.layer',
    *((f'attention.attention.{name}', f'attention/{name}') for name in ('query', 'key', 'value')),
    ('attention.output', 'attention/out'),
    *((f'gamma_{i}', f'layer_scale{i}') for i in (1, 2)),
    *((f'intermediate.fc{i}', f'mlp/fc{i}') for i in (1, 2)),
    *((f'layernorm_{place}', f'norm{i}') for i, place in ((1, 'before'), (2, 'after'))),
)
_ENCODER: names.Table = (
    (f'{_VIT}embeddings.projection', 'patch_embed'),
    (f'{_VIT}embeddings.position_embeddings', 'pos_embed'),
    *_BLOCKS,
)


def _convolutions(theirs: str, ours: str) -> names.Table:
    """Return the rows of a pair of convolutions and their norms."""
    return tuple(
        (f'{theirs}conv{i}.{part}', f'{ours}/{part}{i}')
        for i in (1, 2)
        for part in ('conv', 'norm')
    )


def _projector(number: int, width: int) -> names.Table:
    """Return the rows of the projector to a map, for a ViT of this width."""
    theirs = f'model.backbone.projector.scale_layers.{number}.'
    ours = f'projector_{number}' if number else 'projector'
    layers = f'{theirs}sampling_layers.{{0}}.layers.'
    return (
        *_convolutions(f'{theirs}projector_layer.bottlenecks.{{0}}.', f'{ours}/block_{{0}}'),
        *_convolutions(f'{theirs}projector_layer.', f'{ours}/outer'),
        (f'{theirs}layer_norm', f'{ours}/norm'),
        *((f'{layers}0.{part}', f'{ours}/rescale_{{0}}/{part}') for part in ('conv', 'norm')),
        (f'{layers}{int(is_narrowed(width))}', f'{ours}/rescale_{{0}}/enlarge'),
    )


_BLOCK = (
    *((f'self_attn.{name[0]}_proj', f'attention/{name}') for name in ('query', 'key', 'value')),
    ('self_attn.o_proj', 'attention/out'),
    ('self_attn_layer_norm', 'attention_norm'),
    ('cross_attn.sampling_offsets', 'deformable/offsets'),
    ('cross_attn.attention_weights', 'deformable/scores'),
    ('cross_attn.value_proj', 'deformable/values'),
    ('cross_attn.output_proj', 'deformable/out'),
    ('cross_attn_layer_norm', 'cross_norm'),
    *((f'mlp.fc{i}', f'mlp/fc{i}') for i in (1, 2)),
    ('layer_norm', 'mlp_norm'),
)
_DECODER: names.Table = (
    ('model.query_feat.weight', 'query_embed'),
    ('model.reference_point_embed.weight', 'query_boxes'),
    ('model.enc_output.{0}', 'proposals_{0}/proj'),
    ('model.enc_output_norm.{0}', 'proposals_{0}/norm'),
    ('model.enc_out_bbox_embed.{0}.layers.{0}', 'proposals_{0}/bbox_embed/layer_{0}'),
    ('model.enc_out_class_embed.{0}', 'class_embed/group_{0}'),
    *((f'model.decoder.layers.{{0}}.{a}', f'decoder/block_{{0}}/{b}') for a, b in _BLOCK),
    ('model.decoder.layernorm', 'decoder/norm'),
    ('model.decoder.ref_point_head.layers.{0}', 'decoder/positions/layer_{0}'),
    ('bbox_embed.layers.{0}', 'bbox_embed/layer_{0}'),
    ('class_embed', 'class_embed'),
)
_DEFAULTS = {
    **{'decoder_self_attention_heads': 8, 'decoder_cross_attention_heads': 16},
    **{'dropout': 0.0, 'batch_norm_eps': _EPS, 'projector_scale_factors': [1.0]},
}
_VIT_DEFAULTS = {
    **{'num_attention_heads': 12, 'layer_norm_eps': 1e-6, 'cae_init_values': 0.1},
    **{'num_windows': 16, 'window_block_indices': ()},
}
# Values of config.json that the model has.
_REQUIRED = {
    **{'activation_function': 'silu', 'decoder_activation_function': 'relu'},
    **{'hidden_expansion': 0.5, 'attention_bias': True},
}
_VIT_REQUIRED = {'hidden_act': 'gelu', 'qkv_bias': True, 'use_absolute_position_embeddings': True}


def matches(flat: Mapping[str, np.ndarray]) -> bool:
    """Return whether these are the names of such a model."""
    return 'model.reference_point_embed.weight' in flat


def read(flat: Flat, extra: Mapping[str, Any]) -> TrainedModel:
    """Read an LwDetrForObjectDetection, with one map, as the sizes T, S and M have, or several.

    Blocks of the ViT after the last map, whose outputs nothing reads, are left out.

    Raises:
      UserError: if parameters are unknown, missing or have the wrong shape, or contradict the
        config.
    """
    config = {**_DEFAULTS, **extra}
    backbone = {**_VIT_DEFAULTS, **(config.get('backbone_config') or {})}
    for found, required in ((config, _REQUIRED), (backbone, _VIT_REQUIRED)):
        for key, value in required.items():
            if (given := found.get(key, value)) != value:
                raise UserError(f'{_SOURCE}: {key} {given!r} is not supported (only {value!r})')
    scales, maps = _scales(config), _rf_detr.map_numbers(backbone, _SOURCE)
    unread = re.compile(rf'{re.escape(_VIT)}encoder\.layer\.(\d+)\.')
    used = {
        name: x
        for name, x in _fold_statistics(flat, float(config['batch_norm_eps'])).items()
        if not ((block := unread.match(name)) and int(block[1]) >= maps[-1])
    }
    encoder = {name: x for name, x in used.items() if name.startswith(_VIT)}
    of_vit = torch_layout.read(encoder, _ENCODER, backbone['num_attention_heads'], _SOURCE)
    of_encoder = _encoder_fields(of_vit, backbone, maps)
    heads = config['decoder_self_attention_heads']
    detector = {name: x for name, x in used.items() if name not in encoder}
    table = _detector(scales, of_encoder['width'])
    arrays = torch_layout.read(detector, table, heads, _SOURCE)
    positions = names.require(of_vit, 'pos_embed')
    of_vit['pos_embed'] = positions[:, 1:]  # the first is of a class token, which it lacks
    model = {
        **_rf_detr.sizes(arrays, config, _SOURCE, scales),
        **of_encoder,
        **{'decoder_heads': heads, 'cross_heads': config['decoder_cross_attention_heads']},
        **{'name': 'rf_detr', 'dropout': config['dropout'], 'projector_norm': 'frozen'},
    }
    params = names.nest(of_vit, 'key') | names.nest(arrays)
    _rf_detr.require_detector(params, model, _SOURCE, table)
    side = round((positions.shape[1] - 1) ** 0.5) * model['patch_size']
    extra = normalization.with_imagenet_default(extra)
    processor = extra.get(normalization.PREPROCESSOR) or {}
    imported = TrainedModel.from_file(
        params,
        model,
        (side, side),
        _SOURCE,
        task={'name': 'detect_groups'},
        transforms=_rf_detr.resizing((side, side), model, processor),
    )
    return normalization.with_normalization(imported, extra)


def _scales(config: Mapping[str, Any]) -> tuple[float, ...]:
    """Return the scales of the maps.

    Raises:
      UserError: if the model cannot have them.
    """
    scales = config['projector_scale_factors']
    if not (isinstance(scales, list) and scales and all(scale in SCALES for scale in scales)):
        raise UserError(
            f'{_SOURCE}: projector_scale_factors {scales!r} is not supported (only a list of '
            f'{SCALES})'
        )
    return tuple(map(float, scales))


def _detector(scales: tuple[float, ...], width: int) -> names.Table:
    """Return the rows of a detector with maps of these scales on a ViT of this width."""
    projectors = (_projector(number, width) for number in range(len(scales)))
    return (*itertools.chain.from_iterable(projectors), *_DECODER)


def _encoder_fields(
    arrays: Flat, backbone: Mapping[str, Any], maps: tuple[int, ...]
) -> dict[str, Any]:
    """Return the fields of the ViT."""
    kernel = names.require(arrays, 'patch_embed/kernel')
    windowed = set(backbone['window_block_indices'])
    return {
        **{'patch_size': kernel.shape[0], 'width': kernel.shape[-1], 'depth': maps[-1]},
        'mlp_dim': names.require(arrays, 'encoder/block_0/mlp/fc1/bias').size,
        'num_heads': backbone['num_attention_heads'],
        **{'no_bias': ('key',), 'gelu': 'erf', 'norm_eps': backbone['layer_norm_eps']},
        **{'layer_scale': backbone['cae_init_values'], 'final_norm': False},
        **{'maps': maps, 'windows': round(int(backbone['num_windows']) ** 0.5)},
        'global_blocks': tuple(i for i in range(maps[-1]) if i not in windowed),
        'class_token': False,
    }


def _fold_statistics(flat: Flat, eps: float) -> Flat:
    """Fold the statistics of batch norms into their factors and biases."""
    result = {n: x for n, x in flat.items() if not re.search('running_|num_batches', n)}
    for name, variance in flat.items():
        if not name.endswith('.running_var'):
            continue
        norm = name.removesuffix('.running_var')
        mean = names.require(flat, f'{norm}.running_mean')
        weight, bias = (names.require(flat, f'{norm}.{part}') for part in ('weight', 'bias'))
        scale = weight / np.sqrt(variance + np.float32(eps))
        result |= {f'{norm}.weight': scale, f'{norm}.bias': bias - mean * scale}
    return result


def write(trained: TrainedModel, preprocessor: Mapping[str, Any]) -> Written:
    """Write the files of an LwDetrForObjectDetection.

    Raises:
      UserError: if transformers has no such model, or the image size is unknown.
    """
    module = trained.model
    blocks = [module.block.gelu, module.block.final_norm, module.masks.stride, module.registers]
    given = (*blocks, module.neck.norm, module.no_bias)
    if given != ('erf', False, 0, 0, 'frozen', ('key',)) or module.block.layer_scale is None:
        raise UserError(
            f'{_SOURCE} has no such model: without class token it has frozen norms in the '
            "projector, no_bias=('key',), block.gelu='erf', block.layer_scale, no final norm, no "
            'registers and no masks'
        )
    if trained.image_size is None:
        raise UserError(f'{_SOURCE}: the image size is unknown: give --image-size')
    of_vit, detector = (
        {name: x for name, x in trained.params.items() if _rf_detr.is_in_vit(name) == inside}
        for inside in (True, False)
    )
    flat = names.flatten(of_vit, 'key') | names.flatten(detector)
    table = flat['pos_embed']
    flat['pos_embed'] = np.concatenate([np.zeros_like(table[:, :1]), table], axis=1)
    arrays = torch_layout.write(flat, _ENCODER + _detector(module.neck.scales, module.width))
    return Written(
        arrays | _unit_statistics(arrays),
        _config(module, trained.image_size)
        | class_names_config(trained.class_names, module.num_classes),
        (),
        {**preprocessor, 'image_processor_type': 'DeformableDetrImageProcessor'},
    )


def _unit_statistics(arrays: Flat) -> Flat:
    """Return statistics of batch norms that change nothing."""
    result: Flat = {}
    for name, bias in arrays.items():
        if re.search(r'(projector|sampling)_layers?\..*norm\.bias$', name):
            norm, zeros = name.removesuffix('.bias'), np.zeros_like(bias)
            result |= {f'{norm}.running_mean': zeros, f'{norm}.running_var': zeros + _UNIT}
            result[f'{norm}.num_batches_tracked'] = np.zeros((), np.int64)
    return result


_UNIT = np.float32(1) - np.float32(_EPS)


def _config(module: Model, size: tuple[int, int]) -> dict[str, Any]:
    """Build config.json."""
    whole = module.map_layers if module.global_blocks is None else module.global_blocks
    layers = list(module.map_layers)
    return {
        'model_type': 'lw_detr',
        'architectures': ['LwDetrForObjectDetection'],
        'backbone_config': {
            **{'model_type': 'lw_detr_vit', **_VIT_REQUIRED, 'hidden_size': module.width},
            **{'num_hidden_layers': module.depth, 'num_attention_heads': module.num_heads},
            **{'mlp_ratio': module.mlp_dim / module.width, 'patch_size': module.patch_size},
            **{'image_size': size[0], 'pretrain_image_size': size[0]},
            **{'num_windows': module.windows**2, 'layer_norm_eps': module.block.norm_eps},
            'window_block_indices': [i for i in range(module.depth) if i not in whole],
            **{'out_indices': layers, 'out_features': [f'stage{i}' for i in layers]},
            'cae_init_values': module.block.layer_scale,
        },
        **_REQUIRED,
        **_rf_detr.sizes_config(module),
        'projector_scale_factors': list(module.neck.scales),
        'num_feature_levels': len(module.neck.scales),
        **{'batch_norm_eps': _EPS, 'dropout': module.dropout},
    }
