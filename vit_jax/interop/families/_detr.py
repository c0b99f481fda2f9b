"""Files of a DETR for transformers: names of the hub, config.json, preprocessor_config.json."""

from __future__ import annotations

import dataclasses
import re
from typing import Any

import numpy as np
from flax.traverse_util import flatten_dict

from vit_jax.data.transforms import parse, pillow
from vit_jax.errors import UserError
from vit_jax.interop import labels, names, normalization
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

# Rows of the two code bases' modules, ours first.
_RESNET = 'model.backbone.conv_encoder.model'
_BOTTLENECK = f'{_RESNET}.encoder.stages.{{0}}.layers.{{0}}'
_BLOCK = (
    ('attention/out', 'self_attn.out_proj'),
    ('attention', 'self_attn'),
    ('attention_norm', 'self_attn_layer_norm'),
    ('cross/out', 'encoder_attn.out_proj'),
    ('cross', 'encoder_attn'),
    ('cross_norm', 'encoder_attn_layer_norm'),
    ('mlp', ''),
    ('mlp_norm', 'final_layer_norm'),
)
_ROWS: names.Table = (
    ('backbone/root/conv', f'{_RESNET}.embedder.embedder.convolution'),
    ('backbone/root/norm', f'{_RESNET}.embedder.embedder.normalization'),
    *(
        (f'backbone/stage_{{0}}/block_{{0}}/{ours}', f'{_BOTTLENECK}.{theirs}')
        for ours, theirs in (
            ('proj_norm', 'shortcut.normalization'),
            ('proj', 'shortcut.convolution'),
            ('conv{1}', 'layer.{0}.convolution'),
            ('norm{1}', 'layer.{0}.normalization'),
        )
    ),
    *(
        (f'{stack}/block_{{0}}/{ours}', f'model.{stack}.layers.{{0}}.{theirs}'.rstrip('.'))
        for stack in ('encoder', 'decoder')
        for ours, theirs in _BLOCK
    ),
    ('decoder/norm', 'model.decoder.layernorm'),
    ('input_proj', 'model.input_projection'),
    ('query_embed', 'model.query_position_embeddings.weight'),
    ('class_embed', 'class_labels_classifier'),
    ('bbox_embed/layer_{0}', 'bbox_predictor.layers.{0}'),
    ('mask_head/conv_{0}', 'mask_head.lay{1}'),
    ('mask_head/norm_{0}', 'mask_head.gn{1}'),
    ('mask_head/adapter_{0}', 'mask_head.adapter{1}'),
    ('mask_head/out', 'mask_head.out_lay'),
)
_TABLE = tuple((theirs, ours) for ours, theirs in _ROWS)


def transformers(imported: TrainedModel) -> Written:
    """Files of a DetrForObjectDetection, or of a DetrForSegmentation.

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
    unknown = (
        (model['backbone_norm'] != 'frozen', f'{model["backbone_norm"]} norm in its ResNet'),
        (model['norm'] != 'post', f'{model["norm"]}-norm blocks'),
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
    # The mask head reads all stages, the detector the last one.
    read = [f'stage{i + 1}' for i in range(0 if panoptic else stages - 1, stages)]
    return {
        'model_type': 'detr',
        'architectures': ['DetrForSegmentation' if panoptic else 'DetrForObjectDetection'],
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
        'activation_function': 'relu',
        'dilation': False,
        **{
            f'{stack}_{key}': value
            for stack, depth in (('encoder', 'depth'), ('decoder', 'decoder_depth'))
            for key, value in (
                ('layers', model[depth]),
                ('attention_heads', model['num_heads']),
                ('ffn_dim', model['mlp_dim']),
            )
        },
        **{f'{place}dropout': model['dropout'] for place in ('', 'attention_', 'activation_')},
    }


def _arrays(params: dict[str, Any]) -> Flat:
    """Arrays by their names and in their layouts."""
    written: Flat = {}
    for name, leaf in flatten_dict(params, sep='/').items():
        array = np.asarray(leaf, np.float32)
        module, _, kind = name.rpartition('/')
        if letters := re.fullmatch('(.*)/(qkv|q|kv|qk)', module):
            for i, letter in enumerate(letters[2]):
                written[f'{_projection(letters[1], letter)}.{_leaf(kind)}'] = _folded(array, i)
        elif name == 'query_embed':
            written[_theirs(name)] = array
        elif module.startswith('backbone/') and kind in ('scale', 'bias'):
            written |= _unfolded(_theirs(module), kind, array)
        else:
            written[f'{_theirs(module)}.{_leaf(kind)}'] = _layout(module, kind, array)
    return {name: np.ascontiguousarray(array) for name, array in written.items()}


def _projection(parent: str, letter: str) -> str:
    if parent == 'bbox_attention':
        return f'bbox_attention.{letter}_linear'
    return f'{_theirs(parent)}.{letter}_proj'


def _theirs(name: str) -> str:
    found = names.theirs(name, _TABLE)
    if found is None:
        raise UserError(f'{name}: not a parameter of a DETR')
    return found.replace('/', '.')


def _leaf(kind: str) -> str:
    return 'bias' if kind == 'bias' else 'weight'


def _folded(array: np.ndarray, place: int) -> np.ndarray:
    """One of the projections [D n H K] or [n H K], as [H K D] or [H K] without an axis of heads."""
    one = np.take(array, place, axis=array.ndim - 3)
    return one.reshape(len(one), -1).T if array.ndim == 4 else one.reshape(-1)


def _unfolded(name: str, kind: str, array: np.ndarray) -> Flat:
    """A factor or a summand as a batch norm with mean 0 and deviation 1."""
    if kind == 'scale':
        return {
            f'{name}.weight': array,
            f'{name}.running_var': np.full_like(array, np.float32(1) - np.float32(BN_EPS)),
        }
    return {f'{name}.bias': array, f'{name}.running_mean': np.zeros_like(array)}


def _layout(module: str, kind: str, array: np.ndarray) -> np.ndarray:
    if kind != 'kernel':
        return array
    if array.ndim == 4:
        return array.transpose(3, 2, 0, 1)
    flat = array.reshape(-1, array.shape[-1]).T
    return flat[..., None, None] if module == 'input_proj' else flat


def _resizing(transforms: str) -> dict[str, Any] | None:
    """The resizing of images in transformers' terms; None if they are not resized."""
    found = parse.arguments_of(transforms, 'resize_small')
    if found is None:
        return None
    longest = found['max'] or ANY_LENGTH
    return {
        'size': {'shortest_edge': found['size'], 'longest_edge': longest},
        'resample': pillow.METHODS[found['method']].value,
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
