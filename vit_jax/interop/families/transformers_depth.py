"""Depth Anything and DPT of transformers, for depth: safetensors and config.json.

DepthAnythingForDepthEstimation with a DINOv2, and DPTForDepthEstimation with a ViT or a DINOv2.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping
from typing import Any

import numpy as np

from vit_jax.errors import UserError
from vit_jax.interop import names, preprocessing, torch_layout
from vit_jax.interop.families import _transformers, transformers_dinov2, transformers_tips_dpt
from vit_jax.interop.families._dpt import (
    HEADLESS,
    IS_HEAD,
    read_maps,
    require_heads,
    transpose_kernel,
)
from vit_jax.interop.files import Flat
from vit_jax.interop.normalization import PREPROCESSOR
from vit_jax.interop.trained import TrainedModel, Written, fields
from vit_jax.models import vit
from vit_jax.models.dpt import BACKBONE, DEPTH, FUSION, Model
from vit_jax.nn.options import PoolFields, regroup

_SOURCE = 'transformers DPT'
METERS, INVERSE = 'meters', 'inverse'  # of the task `depth`
_ANYTHING, _DPT = 'depth_anything', 'dpt'
_KIND = _transformers.Kind(
    _SOURCE,
    (_DPT,),
    _transformers.VIT_TABLE,
    defaults={'layer_norm_eps': 1e-12, 'num_attention_heads': 12},
)
_NECK: names.Table = (
    ('neck.reassemble_stage.readout_projects.{0}.0', 'reassemble_{0}/readout'),
    ('neck.reassemble_stage.layers.{0}.projection', 'reassemble_{0}/projection'),
    ('neck.reassemble_stage.layers.{0}.resize', 'reassemble_{0}/resize'),
    ('neck.convs.{0}', 'neck_{0}'),
    (
        'neck.fusion_stage.layers.{0}.residual_layer{1}.convolution{1}',
        'fusion_{0}/unit{1}/conv{1}',
    ),
    ('neck.fusion_stage.layers.{0}.projection', 'fusion_{0}/projection'),
)
_LAYERS = ('conv1', 'conv2', 'values')
_HEADS: dict[str, names.Table] = {
    _ANYTHING: (*_NECK, ('head.conv3', 'decoder/values'), ('head.conv{1}', 'decoder/conv{1}')),
    _DPT: (*_NECK, *((f'head.head.{2 * i}', f'decoder/{name}') for i, name in enumerate(_LAYERS))),
}
# The deepest map is not added to anything, but files have layers for that.
_UNUSED = 'neck.fusion_stage.layers.0.residual_layer1.'
_RESIDUAL_BIAS = re.compile(r'\.residual_layer\d\.convolution\d\.bias$')


def matches(flat: Mapping[str, np.ndarray]) -> bool:
    """Return whether these are the names of such a model."""
    return {'neck.convs.0.weight', 'neck.fusion_stage.layers.0.projection.weight'} <= flat.keys()


def read(flat: Flat, extra: Mapping[str, Any]) -> TrainedModel:
    """Read a DepthAnythingForDepthEstimation or a DPTForDepthEstimation.

    The depth of a DPT with a ViT is taken for inverse and relative, like dpt-large's; with a DINOv2
    for meters, like those of dpt-dinov2-*-nyu and kitti.

    Raises:
      UserError: if it is another model with such a neck, parameters are unknown, missing or have
        the wrong shape, or contradict the config.
    """
    kind = _ANYTHING if 'head.conv1.weight' in flat else _DPT
    _require_depth(flat, extra, kind)
    table = _HEADS[kind]
    neck = {n: x for n, x in flat.items() if n.startswith(('neck.', 'head.'))}
    trained = _read_backbone({n: x for n, x in flat.items() if n not in neck}, extra)
    fields = _fields(trained, extra, kind, flat)
    heads = _read_heads(neck, table, fields)
    params = {**trained.params, **names.nest(heads)}
    if not fields['final_norm']:
        params['encoder'] = {n: x for n, x in params['encoder'].items() if n != 'norm'}
    require_heads(params, fields, table, _SOURCE)
    is_metric = extra.get('depth_estimation_type') == 'metric' or (
        kind == _DPT and 'backbone_config' in extra
    )
    task = {k: v for k, v in trained.task_config.items() if k in ('mean', 'std')}
    task |= {'name': 'depth', 'output': METERS if is_metric else INVERSE}
    if fields['max_depth']:
        task['deepest'] = fields['max_depth']
    notes = trained.notes
    if kind == _DPT:
        notes += (f'config.json does not say what it predicts: assumed to be {task["output"]}',)
    if (extra.get(PREPROCESSOR) or {}).get('keep_aspect_ratio'):
        notes += (
            'its processor keeps the aspect ratio of images; this model resizes them to one size: '
            'give the image size that suits yours',
        )
    imported = TrainedModel.from_file(
        params, fields, trained.image_size, _SOURCE, task=task, notes=notes
    )
    return dataclasses.replace(imported, positions=trained.positions)


def _require_depth(flat: Flat, extra: Mapping[str, Any], kind: str) -> None:
    """Raise UserError for models with such a neck that are not read."""
    reason = ''
    if any('.backbone.bit.' in name or name.startswith('dpt.embeddings.backbone') for name in flat):
        reason = 'a hybrid with a ResNet'
    elif 'neck.reassemble_stage.layers.0.projection.weight' not in flat:
        reason = 'a DPT on a hierarchical backbone'
    elif kind == _DPT and 'head.head.4.bias' not in flat:
        reason = 'not a model of depth'
    elif any('.batch_norm' in name for name in flat):
        reason = 'a DPT with batch norms'
    elif any(name.startswith('head.projection.') for name in flat):
        reason = 'a DPT with add_projection'
    elif extra.get('head_in_index', -1) != -1:
        reason = f'a model with head_in_index {extra["head_in_index"]}'
    if reason:
        raise UserError(
            f'{_SOURCE}: this is {reason}; read are DepthAnythingForDepthEstimation, and '
            'DPTForDepthEstimation with a plain ViT or DINOv2'
        )


def _read_backbone(flat: Flat, extra: Mapping[str, Any]) -> TrainedModel:
    """Read the ViT, without its prefix."""
    if not any(name.startswith('backbone.') for name in flat):
        plain = {name.removeprefix('dpt.'): x for name, x in flat.items()}
        trained = _transformers.read(_KIND, plain, extra)
        return dataclasses.replace(trained, positions='linear')
    config = extra.get('backbone_config') or {}
    plain = {name.removeprefix('backbone.'): x for name, x in flat.items()}
    if config.get('model_type', 'dinov2') not in ('dinov2', 'dinov2_with_registers'):
        raise UserError(
            f'{_SOURCE}: a backbone of type {config["model_type"]!r} is not supported (only dinov2)'
        )
    other_keys = {key: value for key, value in extra.items() if key not in _CONFIG}
    return transformers_dinov2.read(plain, {**other_keys, **config})


# Keys of the whole model that would be mistaken for the backbone's.
_CONFIG = ('model_type', 'architectures', 'patch_size', 'image_size', 'hidden_size')


def _fields(
    trained: TrainedModel, extra: Mapping[str, Any], kind: str, flat: Flat
) -> dict[str, Any]:
    """Return the model's fields.

    Raises:
      UserError: if config.json is missing, or has values that are not supported.
    """
    if not {'fusion_hidden_size', 'neck_hidden_sizes', 'reassemble_factors'} <= extra.keys():
        raise UserError(f'{_SOURCE}: put its config.json next to the file')
    of_vit = {key: x for key, x in trained.model_config.items() if key not in HEADLESS}
    backbone = extra.get('backbone_config')
    is_anything = kind == _ANYTHING
    metric = extra.get('depth_estimation_type', 'relative') == 'metric'
    largest = extra.get('max_depth') or 1
    if is_anything and not metric and largest != 1:
        raise UserError(f'{_SOURCE}: max_depth {largest} of relative depth is not supported')
    if not is_anything and _transformers.gelu(extra, _SOURCE) != of_vit['gelu']:
        raise UserError(f'{_SOURCE}: hidden_act differs from the backbone')
    return {
        **of_vit,
        'name': 'dpt',
        'class_token': 'cls_token' in trained.params,
        'maps': read_maps(extra, backbone, _SOURCE),
        'readout': 'ignore' if is_anything else extra.get('readout_type', 'project'),
        'fusion_width': int(extra['fusion_hidden_size']),
        'head_width': len(flat['head.conv2.bias' if is_anything else 'head.head.2.bias']),
        'fits_image': is_anything,
        'max_depth': float(largest) if is_anything and metric else None,
        'final_norm': bool(backbone is not None and backbone.get('apply_layernorm', True)),
        'no_bias': '|'.join(filter(None, (of_vit.get('no_bias', ''), _without_biases(flat)))),
    }


def _without_biases(flat: Flat) -> str:
    """Return FUSION if the residual layers have no biases; else an empty text."""
    has_biases = any(_RESIDUAL_BIAS.search(name) for name in flat if not name.startswith(_UNUSED))
    return '' if has_biases else FUSION


def _read_heads(flat: Flat, table: names.Table, fields: Mapping[str, Any]) -> Flat:
    """Convert the neck and the head to our layouts."""
    used = {name: x for name, x in flat.items() if not name.startswith(_UNUSED)}
    heads = torch_layout.read(used, table, 1, _SOURCE)
    return {
        name: transpose_kernel(name, x, [factor for _, factor, _ in fields['maps']])
        for name, x in heads.items()
    }


def write(trained: TrainedModel) -> Written:
    """Write the files of a DepthAnythingForDepthEstimation, or of a DPTForDepthEstimation if maps
    are always doubled.

    Those without `head_width` become a TIPSv2 with a DPT.

    Raises:
      UserError: if transformers has no such model, or the image size is unknown.
    """
    model = fields(trained.model)
    if not model['head_width']:
        return transformers_tips_dpt.write(trained)
    kind = _ANYTHING if model['fits_image'] else _DPT
    _require_class(model, kind)
    heads = {name: x for name, x in trained.params.items() if IS_HEAD.match(name)}
    params = {name: x for name, x in trained.params.items() if name not in heads}
    if not model['final_norm']:  # files have one, which nothing reads
        norm = {'scale': np.ones(model['width'], np.float32)}
        norm['bias'] = np.zeros_like(norm['scale'])
        params['encoder'] = {**params['encoder'], 'norm': norm}
    with_dinov2 = kind == _ANYTHING or model['final_norm'] or model['layer_scale'] is not None
    backbone = dataclasses.replace(trained, params=params, class_names=())
    backbone = backbone.with_groups(
        model=_backbone_config(trained.model), task=_classify(trained.task_config)
    )
    form = transformers_dinov2.FORMS[0] if with_dinov2 else _PLAIN
    written = _transformers.write(backbone, [form])
    prefix = 'backbone.' if with_dinov2 else 'dpt.'
    arrays = names.flatten(heads)
    arrays = {name: transpose_kernel(name, x, trained.model.factors) for name, x in arrays.items()}
    if kind == _ANYTHING:
        arrays = _with_biases(arrays)
    metric = model['max_depth'] is not None or (kind == _DPT and with_dinov2)
    notes = written.notes
    if trained.task_config.get('output', METERS) != (METERS if metric else INVERSE):
        notes += ('what the depth measures is lost: the files cannot store it',)
    return written._replace(
        arrays={
            **{prefix + name: x for name, x in written.arrays.items()},
            **torch_layout.write(arrays, _HEADS[kind]),
            **_unused(model['fusion_width'], kind == _ANYTHING or not _lacks_biases(model)),
        },
        config=_config(model, kind, written.config or {}, with_dinov2),
        notes=notes,
        preprocessor=_preprocessor(trained, written, model['patch_size']),
    )


_PLAIN = _transformers.Form(_KIND, 'DPTForDepthEstimation')


def _require_class(model: Mapping[str, Any], kind: str) -> None:
    """Raise UserError if the class of transformers has no such neck or head."""
    largest = model['max_depth']
    lacking = {'output': model['output'] != DEPTH, 'bins': bool(model['bins'])}
    if kind == _ANYTHING:
        lacking |= {
            'readout': model['readout'] != 'ignore',
            'max_depth': largest is not None and largest % 1 != 0,
            'head_width': not model['head_width'],
        }
    else:
        lacking |= {
            'head_width': model['head_width'] != 32,
            'max_depth': largest is not None,
            'readout_gelu': model['readout_gelu'] not in (None, model['gelu']),
        }
    if listed := ', '.join(
        f'{key} {model[key]!r}' for key, is_lacking in lacking.items() if is_lacking
    ):
        raise UserError(f'transformers has no such model: its {kind} has no {listed}')


def _backbone_config(module: Model) -> dict[str, Any]:
    """Describe the ViT: keywords of `config.model`."""
    vit_fields = {name: getattr(module.backbone_module(), name) for name in BACKBONE}
    block = dataclasses.replace(module.block, final_norm=True)
    pool = PoolFields('cls' if module.class_token else 'gap')
    return {'name': 'vit', **regroup(vit.Model, vit_fields | {'block': block, 'pool': pool})}


def _classify(task: Mapping[str, Any]) -> dict[str, Any]:
    """Return a task that prepares images in the same way."""
    kept = {key: task[key] for key in ('value_range', 'mean', 'std') if key in task}
    return {'name': 'classify', **kept}


def _lacks_biases(model: Mapping[str, Any]) -> bool:
    return FUSION in model['no_bias'].split('|')


def _with_biases(flat: Flat) -> Flat:
    """Add absent biases of residual layers, which are zero."""
    kernels = {name: x for name, x in flat.items() if re.search(r'/unit\d/conv\d/kernel$', name)}
    biases = {name.replace('kernel', 'bias'): x[0, 0, 0] * 0 for name, x in kernels.items()}
    return biases | flat


def _unused(width: int, biased: bool) -> Flat:
    """Return the parameters of the layers that nothing reads."""
    arrays: Flat = {}
    for i in (1, 2):
        arrays[f'{_UNUSED}convolution{i}.weight'] = np.zeros((width, width, 3, 3), np.float32)
        if biased:
            arrays[f'{_UNUSED}convolution{i}.bias'] = np.zeros(width, np.float32)
    return arrays


def _config(
    model: Mapping[str, Any], kind: str, backbone: Mapping[str, Any], with_dinov2: bool
) -> dict[str, Any]:
    """Build config.json."""
    config: dict[str, Any] = {
        'model_type': kind,
        'reassemble_factors': [factor for _, factor, _ in model['maps']],
        'neck_hidden_sizes': [channels for _, _, channels in model['maps']],
        'fusion_hidden_size': model['fusion_width'],
        'head_in_index': -1,
    }
    layers = [layer for layer, _, _ in model['maps']]
    if with_dinov2:
        config['backbone_config'] = {
            **backbone,
            'out_indices': layers,
            'out_features': [f'stage{i}' for i in layers],
            'apply_layernorm': model['final_norm'],
            'reshape_hidden_states': False,
        }
    if kind == _ANYTHING:
        return {
            **config,
            'architectures': ['DepthAnythingForDepthEstimation'],
            'patch_size': model['patch_size'],
            'reassemble_hidden_size': model['width'],
            'head_hidden_size': model['head_width'],
            'depth_estimation_type': 'relative' if model['max_depth'] is None else 'metric',
            'max_depth': int(model['max_depth'] or 1),
        }
    shared = {'hidden_act': backbone['hidden_act']} if with_dinov2 else backbone
    return {
        **shared,
        **config,
        'architectures': ['DPTForDepthEstimation'],
        'is_hybrid': False,
        'readout_type': model['readout'],
        'add_projection': False,
        'use_batch_norm_in_fusion_residual': False,
        'use_bias_in_fusion_residual': not _lacks_biases(model),
        **({} if with_dinov2 else {'backbone_out_indices': [i - 1 for i in layers]}),
    }


def _preprocessor(trained: TrainedModel, written: Written, patch_size: int) -> dict[str, Any]:
    """Build preprocessor_config.json; whole images are resized by the class of DPT."""
    keys = preprocessing.transformers_keys(trained.transforms)
    processor = {**(written.preprocessor or {}), **keys}
    if processor['image_processor_type'] != 'ViTImageProcessor':
        return processor
    return {
        **processor,
        'image_processor_type': 'DPTImageProcessor',
        'keep_aspect_ratio': False,
        'ensure_multiple_of': patch_size,
    }


WRITERS = {('dpt', 'transformers'): write}
