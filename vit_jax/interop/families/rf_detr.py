"""RF-DETR: Roboflow's and transformers' files, which have the same names.

A config.json says what shapes do not determine; without one it follows from the published models.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import numpy as np

from vit_jax.errors import UserError
from vit_jax.interop import names, normalization, preprocessing, torch_layout
from vit_jax.interop.families import (
    _transformers,
    transformers_dinov2,
    transformers_lw_detr,
)
from vit_jax.interop.families._rf_detr import (
    is_in_vit,
    map_numbers,
    require_detector,
    resizing,
    sizes,
    sizes_config,
)
from vit_jax.interop.files import Flat
from vit_jax.interop.trained import (
    GIVEN_SIZE,
    TrainedModel,
    Written,
    class_names_config,
    fields,
)
from vit_jax.models import vit
from vit_jax.models.rf_detr import BACKBONE, Model
from vit_jax.nn.options import PoolFields, regroup

POSITIONS = 'antialiased'
_SOURCE = 'RF-DETR'
_TASK, _MASK_TASK = 'detect_groups', 'segment_groups'
_VIT = 'backbone.0.encoder.encoder.'
_PROJECTOR = 'backbone.0.projector.stages.0.'
_MASKS = 'segmentation_head.'
_FUSED = {'self_attn': 'in_proj'}


def _convolutions(theirs: str, ours: str) -> names.Table:
    """Return the rows of a pair of convolutions and their norms."""
    parts = (('conv', 'conv'), ('bn', 'norm'))
    return tuple((f'{theirs}cv{i}.{a}', f'{ours}/{b}{i}') for i in (1, 2) for a, b in parts)


_BLOCK = (
    *((f'self_attn.{name[0]}', f'attention/{name}') for name in ('query', 'key', 'value')),
    ('self_attn.out_proj', 'attention/out'),
    ('norm1', 'attention_norm'),
    ('cross_attn.sampling_offsets', 'deformable/offsets'),
    ('cross_attn.attention_weights', 'deformable/scores'),
    ('cross_attn.value_proj', 'deformable/values'),
    ('cross_attn.output_proj', 'deformable/out'),
    ('norm2', 'cross_norm'),
    *((f'linear{i}', f'mlp/fc{i}') for i in (1, 2)),
    ('norm3', 'mlp_norm'),
)
_MASK_BLOCK = (('dwconv', 'depthwise'), ('norm', 'norm'), ('pwconv1', 'dense'))
_DETECTOR: names.Table = (
    *_convolutions(f'{_PROJECTOR}0.m.{{0}}.', 'projector/block_{0}'),
    *_convolutions(f'{_PROJECTOR}0.', 'projector/outer'),
    (f'{_PROJECTOR}1', 'projector/norm'),
    ('query_feat.weight', 'query_embed'),
    ('refpoint_embed.weight', 'query_boxes'),
    ('transformer.enc_output.{0}', 'proposals_{0}/proj'),
    ('transformer.enc_output_norm.{0}', 'proposals_{0}/norm'),
    ('transformer.enc_out_bbox_embed.{0}.layers.{0}', 'proposals_{0}/bbox_embed/layer_{0}'),
    ('transformer.enc_out_class_embed.{0}', 'class_embed/group_{0}'),
    *((f'transformer.decoder.layers.{{0}}.{a}', f'decoder/block_{{0}}/{b}') for a, b in _BLOCK),
    ('transformer.decoder.norm', 'decoder/norm'),
    ('transformer.decoder.ref_point_head.layers.{0}', 'decoder/positions/layer_{0}'),
    ('bbox_embed.layers.{0}', 'bbox_embed/layer_{0}'),
    ('class_embed', 'class_embed'),
    *((f'{_MASKS}blocks.{{0}}.{a}', f'mask_head/block_{{0}}/{b}') for a, b in _MASK_BLOCK),
    (f'{_MASKS}spatial_features_proj', 'mask_head/map'),
    (f'{_MASKS}query_features_block.norm_in', 'mask_head/query/norm'),
    (f'{_MASKS}query_features_block.layers.0', 'mask_head/query/fc1'),
    (f'{_MASKS}query_features_block.layers.2', 'mask_head/query/fc2'),
    (f'{_MASKS}query_features_proj', 'mask_head/query/out'),
    (f'{_MASKS}bias', 'mask_head/bias'),
)
# Fields of our model by keys of config.json, and transformers' defaults.
_KEYS = {
    **{'decoder_heads': 'decoder_self_attention_heads', 'dropout': 'dropout'},
    **{'cross_heads': 'decoder_cross_attention_heads', 'projector_eps': 'layer_norm_eps'},
}
_DEFAULTS = {
    **{'decoder_self_attention_heads': 8, 'decoder_cross_attention_heads': 16},
    **{'dropout': 0.1, 'layer_norm_eps': 1e-5, 'mask_downsample_ratio': 4},
}
# Values of config.json that the model has.
_REQUIRED = {
    **{'activation_function': 'silu', 'decoder_activation_function': 'relu'},
    **{'hidden_expansion': 0.5, 'num_feature_levels': 1, 'attention_bias': True},
    'segmentation_head_activation_function': 'gelu',
}
_COCO = 91  # outputs of the published models, one for each category id


def matches(flat: Mapping[str, np.ndarray]) -> bool:
    """Return whether these are the names of such a model."""
    return {'refpoint_embed.weight', 'transformer.enc_output.0.weight'} <= flat.keys()


def read(flat: Flat, extra: Mapping[str, Any]) -> TrainedModel:
    """Read an RF-DETR, with or without masks.

    Blocks of the ViT after the last map, whose outputs nothing reads, are left out.

    Raises:
      UserError: if parameters are unknown, missing or have the wrong shape, or contradict the
        config.
    """
    notes: tuple[str, ...] = ()
    config = {**_DEFAULTS, **extra}
    if not config.get('backbone_config'):
        config |= _published(flat)
        notes = ('no config.json: windows, maps and heads are assumed to be the published ones',)
    for key, value in _REQUIRED.items():
        if config.get(key, value) != value:
            raise UserError(f'{_SOURCE}: {key} {config[key]!r} is not supported (only {value!r})')
    backbone = config['backbone_config']
    maps = map_numbers(backbone, _SOURCE)
    trained = _read_vit(flat, backbone, extra, maps[-1])
    detector = {name: x for name, x in flat.items() if not name.startswith(_VIT)}
    arrays = torch_layout.read(
        torch_layout.split_fused(detector, _SOURCE),
        _DETECTOR,
        config[_KEYS['decoder_heads']],
        _SOURCE,
    )
    model = {
        **{key: value for key, value in trained.model_config.items() if key not in _LACKING},
        **{field: config[key] for field, key in _KEYS.items()},
        **sizes(arrays, config, _SOURCE),
        **{'name': 'rf_detr', 'maps': maps, 'windows': int(backbone.get('num_windows', 4))},
        'final_norm': bool(backbone.get('apply_layernorm', True)),
    }
    params = trained.params | names.nest(arrays)
    if not model['final_norm']:
        params['encoder'] = {n: x for n, x in params['encoder'].items() if n != 'norm'}
    require_detector(params, model, _SOURCE, _DETECTOR)
    task = {'name': _MASK_TASK if model['masks']['stride'] else _TASK, **_normalization(trained)}
    size = trained.image_size
    imported = TrainedModel.from_file(
        params,
        model,
        size,
        _SOURCE,
        task=task,
        transforms=resizing(size, model, extra.get(normalization.PREPROCESSOR) or {}),
        notes=notes,
    )
    by_id = model['num_classes'] == _COCO and not extra.get('id2label')
    return dataclasses.replace(imported, class_ids=tuple(range(_COCO)) if by_id else ())


def _normalization(trained: TrainedModel) -> dict[str, Any]:
    """Return the mean and standard deviation of the task, if it has them."""
    return {key: trained.task_config[key] for key in ('mean', 'std') if key in trained.task_config}


def _published(flat: Flat) -> dict[str, Any]:
    """Return the config of the published model with parameters of these shapes."""
    kernel = flat.get(f'{_VIT}embeddings.patch_embeddings.projection.weight')
    table = flat.get(f'{_VIT}embeddings.position_embeddings')
    if kernel is None or kernel.ndim != 4 or table is None or table.ndim != 3:
        raise UserError(f'{_SOURCE}: the embeddings of its ViT are missing in the file')
    width, side, grid = len(kernel), kernel.shape[-1], round((table.shape[1] - 1) ** 0.5)
    base = side == 14
    windows = 4 if base else 1 if (side, grid) == (12, 26) else 2
    hidden = flat['transformer.enc_output.0.weight'].shape[0]
    backbone = {
        **{'num_attention_heads': width // 64, 'num_windows': windows, 'image_size': side * grid},
        'out_indices': (2, 5, 8, 11) if base else (3, 6, 9, 12),
        'num_hidden_layers': 12,
    }
    return {
        **{'backbone_config': backbone, 'layer_norm_eps': 1e-6, 'dropout': 0.0},
        **{_KEYS['decoder_heads']: hidden // 32, _KEYS['cross_heads']: hidden // 16},
    }


def _read_vit(
    flat: Flat, backbone: Mapping[str, Any], extra: Mapping[str, Any], depth: int
) -> TrainedModel:
    """Read the ViT with `depth` blocks."""
    total = int(backbone.get('num_hidden_layers', 12))
    unread = tuple(f'{_VIT}encoder.layer.{i}.' for i in range(depth, total))
    used = {
        name.removeprefix(_VIT): array
        for name, array in flat.items()
        if name.startswith(_VIT) and not name.startswith(unread)
    }
    kept = (normalization.PREPROCESSOR, normalization.GIVEN_NORMALIZATION, GIVEN_SIZE)
    config = {
        **{key: extra[key] for key in kept if key in extra},
        **{key: value for key, value in backbone.items() if key != 'model_type'},
        **{'model_type': 'dinov2', 'num_hidden_layers': depth},
    }
    return transformers_dinov2.read(used, normalization.with_imagenet_default(config))


# Fields of a ViT that an RF-DETR lacks.
_LACKING = (
    *('name', 'num_classes', 'pool', 'pool_heads', 'pool_mlp_dim', 'fc_norm', 'head_norm'),
    *('representation_size', 'head_bias', 'scan', 'dropout'),
)


def write(trained: TrainedModel) -> Written:
    """Write the files of transformers' RF-DETR, whose arrays the authors' code reads too.

    Raises:
      UserError: if transformers has no such model, or the image size is unknown.
    """
    module = trained.model
    if not module.class_token:
        return transformers_lw_detr.write(trained, _preprocessor(trained))
    neck = module.neck.norm, module.neck.scales
    if module.global_blocks not in (None, module.map_layers) or neck != ('layer', (1.0,)):
        raise UserError(
            "transformers' RF-DETR has no global_blocks, neck.norm is 'layer', and "
            'neck.scales=(1.0,)'
        )
    encoder, detector = (
        {name: x for name, x in trained.params.items() if is_in_vit(name) == of_vit}
        for of_vit in (True, False)
    )
    if not module.block.final_norm:  # files have one, which nothing reads
        ones = np.ones(module.width, np.float32)
        norm = {'norm': {'scale': ones, 'bias': np.zeros_like(ones)}}
        encoder['encoder'] = {**encoder['encoder'], **norm}
    of_vit = dataclasses.replace(trained, params=encoder, class_names=())
    task = {'name': 'classify', **_normalization(trained)}
    of_vit = of_vit.with_groups(model=_vit_config(module), task=task)
    written = _transformers.write(of_vit, [_FORM])
    arrays = torch_layout.write(names.flatten(detector), _DETECTOR)
    return Written(
        {
            **{f'{_VIT}{name}': x for name, x in written.arrays.items()},
            **torch_layout.join_fused(arrays, _FUSED),
        },
        _config(module, written.config or {})
        | class_names_config(trained.class_names, module.num_classes),
        written.notes,
        (written.preprocessor or {}) | _preprocessor(trained),
    )


_FORM = dataclasses.replace(
    transformers_dinov2.FORMS[0],
    name='RfDetrDinov2Backbone',
    model_type='rf_detr_dinov2',
    fields={},
)


def _vit_config(module: Model) -> dict[str, Any]:
    """Describe the ViT: keywords of `config.model`."""
    vit_fields = {name: getattr(module, name) for name in BACKBONE if name != 'windows'}
    block = dataclasses.replace(module.block, final_norm=True)
    vit_fields |= {'block': block, 'pool': PoolFields('cls')}
    return {'name': 'vit', **regroup(vit.Model, vit_fields)}


def _config(module: Model, backbone: Mapping[str, Any]) -> dict[str, Any]:
    """Build config.json."""
    values, layers, masks = fields(module), list(module.map_layers), module.masks
    task = 'InstanceSegmentation' if masks.stride else 'ObjectDetection'
    of_masks = {'mask_downsample_ratio': masks.stride, 'intermediate_size': masks.mlp_dim}
    return {
        'model_type': 'rf_detr',
        'architectures': [f'RfDetrFor{task}'],
        'backbone_config': {
            **backbone,
            'num_windows': module.windows,
            'out_indices': layers,
            'out_features': [f'stage{i}' for i in layers],
            'apply_layernorm': module.block.final_norm,
        },
        **{key: values[field] for field, key in _KEYS.items()},
        **_REQUIRED,
        **(of_masks if masks.stride else {}),
        **sizes_config(module),
    }


def _preprocessor(trained: TrainedModel) -> dict[str, Any]:
    """Build preprocessor_config.json, which resizes whole images to a square."""
    size = trained.image_size
    if size is None:
        return {}
    return {
        **preprocessing.preprocessor(trained, trained.channels, size),
        **preprocessing.transformers_keys(trained.transforms),
        **{'image_processor_type': 'RfDetrImageProcessor', 'format': 'coco_detection'},
    }


WRITERS = {('rf_detr', 'transformers'): write}
