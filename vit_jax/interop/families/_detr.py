"""Files of a DETR for transformers: names of the hub, config.json, preprocessor_config.json."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np

from vit_jax.data.transforms import parse, pillow
from vit_jax.errors import UserError
from vit_jax.interop import labels, names, normalization, torch_layout
from vit_jax.interop.families._detr_names import TABLE
from vit_jax.interop.files import Flat
from vit_jax.interop.trained import TrainedModel, Written
from vit_jax.models.detr import Model

BN_EPS = 1e-5
_NORM_EPS = 1e-5
_MASK_STRIDE = 4
ANY_LENGTH = 1_000_000  # pixels: transformers needs a limit of the longer side
_PANOPTIC = 'detr_panoptic'
# The defaults of the task, of ImageNet.
_NORMALIZATION = {'mean': (0.485, 0.456, 0.406), 'std': (0.229, 0.224, 0.225)}
_DEFAULTS = {field.name: field.default for field in dataclasses.fields(Model)}


def transformers(imported: TrainedModel) -> Written:
    """Files of a DetrForObjectDetection, of a TableTransformerForObjectDetection, whose blocks are
    pre-norm, or of a DetrForSegmentation.

    Raises:
      UserError: if transformers has no such DETR.
    """
    model = {**_DEFAULTS, **imported.model_config}
    _require_theirs(model)
    panoptic = model['name'] == _PANOPTIC
    channels = imported.params['backbone']['root']['conv']['kernel'].shape[2]
    arrays, resizing = _arrays(imported.params), _resizing(imported.transforms)
    notes = []
    if resizing is None:
        notes.append('no resize_small(...) makes its images: preprocessor_config.json keeps theirs')
    elif resizing.pop('rounding') != 'down':
        notes.append(
            'transformers rounds the longer side of images down, this model to the nearest'
        )
    if panoptic:
        arrays = {
            name if name.startswith(('mask_head', 'bbox_attention')) else f'detr.{name}': array
            for name, array in arrays.items()
        }
        notes.append('which classes are stuff is left out: the files have no place for it')
    return Written(
        arrays,
        _config(model, channels) | labels.write(imported.class_names, model['num_classes']),
        tuple(notes),
        _preprocessor(imported.task_config, channels, resizing),
    )


def _require_theirs(model: dict[str, Any]) -> None:
    panoptic = model['name'] == _PANOPTIC
    unknown = (
        (model['backbone_norm'] != 'frozen', f'{model["backbone_norm"]} norm in its ResNet'),
        (panoptic and model['norm'] != 'post', f'{model["norm"]}-norm blocks and masks'),
        (model['dilate'], 'a dilated stage (DC5) but in the ResNets of timm'),
        (model['norm_eps'] != _NORM_EPS, f'norm_eps {model["norm_eps"]:g}'),
        (not model['num_classes'], 'no classes'),
        (
            model['name'] == _PANOPTIC and len(model['layers']) != 4,
            f'masks on a ResNet of {len(model["layers"])} stages, but of 4',
        ),
        (
            model.get('mask_stride', _MASK_STRIDE) != _MASK_STRIDE,
            f'masks at a stride of {model.get("mask_stride")} pixels, but of {_MASK_STRIDE}',
        ),
        (model.get('box_maps', False), 'masks that use the boxes'),
        (
            model['name'] == _PANOPTIC and (model['width'] + model['num_heads']) % 8,
            f'masks whose width {model["width"]} and heads {model["num_heads"]} together are no '
            'multiple of 8',
        ),
    )
    for is_so, what in unknown:
        if is_so:
            raise UserError(f'transformers has no DETR with {what}')


def _config(model: dict[str, Any], channels: int) -> dict[str, Any]:
    stages = len(model['layers'])
    sizes = [4 * model['backbone_width'] * 2**i for i in range(stages)]
    panoptic = model['name'] == _PANOPTIC
    model_type, kind = (
        ('table-transformer', 'TableTransformerForObjectDetection')
        if model['norm'] == 'pre'
        else ('detr', 'DetrForSegmentation' if panoptic else 'DetrForObjectDetection')
    )
    # The mask head reads all stages, the detector the last one.
    read = [f'stage{i + 1}' for i in range(0 if panoptic else stages - 1, stages)]
    return {
        'model_type': model_type,
        'architectures': [kind],
        'use_timm_backbone': False,
        'use_pretrained_backbone': False,
        'backbone': None,
        'backbone_config': {
            'model_type': 'resnet',
            'layer_type': 'bottleneck',
            'num_channels': channels,
            'embedding_size': model['backbone_width'],
            'hidden_sizes': sizes,
            'depths': list(model['layers']),
            'out_features': read,
        },
        'num_channels': channels,
        'num_queries': model['num_queries'],
        'd_model': model['width'],
        'activation_function': 'silu' if model['activation'] == 'swish' else model['activation'],
        'dilation': False,
        **{
            f'{stack}_{key}': value
            for stack, depth, heads, mlp_dim in (
                ('encoder', model['depth'], None, None),
                (
                    'decoder',
                    model['decoder_depth'],
                    model['decoder_heads'],
                    model['decoder_mlp_dim'],
                ),
            )
            for key, value in (
                ('layers', depth),
                ('attention_heads', heads or model['num_heads']),
                ('ffn_dim', mlp_dim or model['mlp_dim']),
            )
        },
        **{f'{place}dropout': model['dropout'] for place in ('', 'attention_', 'activation_')},
    }


def _arrays(params: dict[str, Any]) -> Flat:
    """Arrays by their names and in their layouts.

    A `FrozenNorm` becomes a batch norm with mean 0 and deviation 1.
    """
    arrays = torch_layout.write(names.flattened(params), TABLE)
    variance = np.float32(1) - np.float32(BN_EPS)
    for name in [name for name in arrays if name.endswith('normalization.bias')]:
        norm, zeros = name.removesuffix('.bias'), np.zeros_like(arrays[name])
        arrays |= {f'{norm}.running_mean': zeros, f'{norm}.running_var': zeros + variance}
    return arrays


def _resizing(transforms: str) -> dict[str, Any] | None:
    """The resizing of images in transformers' terms, and `rounding`, for which it has no key; None
    if they are not resized.
    """
    found = parse.arguments_of(transforms, 'resize_small')
    if found is None:
        return None
    longest = found['max'] or ANY_LENGTH
    return {
        'size': {'shortest_edge': found['size'], 'longest_edge': longest},
        'resample': pillow.METHODS[found['method']].value,
        'rounding': found['rounding'],
    }


def _preprocessor(
    task: dict[str, Any], channels: int, resizing: dict[str, Any] | None
) -> dict[str, Any]:
    own = {**_NORMALIZATION, **task}
    panoptic = task['name'] == 'segment_panoptic'
    return {
        **normalization.preprocessor(channels, (0, 0)),
        'image_processor_type': 'DetrImageProcessor',
        'format': 'coco_panoptic' if panoptic else 'coco_detection',
        'do_resize': resizing is not None,
        'size': {'shortest_edge': 800, 'longest_edge': 1333},
        **(resizing or {}),
        'do_pad': True,
        'image_mean': list(own['mean']),
        'image_std': list(own['std']),
    }
