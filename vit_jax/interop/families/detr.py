"""DETR: safetensors with the names of its authors, or with those of transformers.

Transformers has two namings: of version 4 and the files on the hub, and of version 5. A ResNet
alone is read as well, with the names of torchvision and timm, for `config.init.select='backbone'`.
Batch norms become `FrozenNorm`s.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
from flax.traverse_util import unflatten_dict

from vit_jax.errors import UserError
from vit_jax.interop import names, normalization
from vit_jax.interop.families import _detr
from vit_jax.interop.families._detr_names import TABLE
from vit_jax.interop.files import Flat
from vit_jax.interop.trained import GIVEN_SIZE, TrainedModel

# Keys that `extra` may have without a config.json.
_NO_CONFIG = (normalization.GIVEN, GIVEN_SIZE, normalization.PREPROCESSOR)
_HEADS = 8  # of all released models; shapes do not determine it
_SHORT, _LONG = 800, 1333  # sides of the authors' images
# COCO's panoptic models have a class for each id of a category, of which those of stuff are above.
_COCO_PANOPTIC, _STUFF = 250, tuple(range(91, 250))


def matches(flat: Mapping[str, np.ndarray]) -> bool:
    """Whether these are the names of a DETR, or of a ResNet with bottlenecks."""
    heads = ('class_labels_classifier.weight', 'class_embed.weight')
    detr = any(f'{prefix}{head}' in flat for prefix in ('', 'detr.') for head in heads)
    return detr or {'conv1.weight', 'bn1.running_mean', 'layer1.0.conv3.weight'} <= flat.keys()


def read(flat: Flat, extra: Mapping[str, Any]) -> TrainedModel:
    """A detector, a panoptic model, or the backbone of one.

    Args:
      flat: see `files.read_arrays`.
      extra: the parsed config.json, or empty.

    Raises:
      UserError: if parameters are unknown, absent or of the wrong shape.
    """
    source = 'DETR'
    notes = []
    # A ResNet's head is of classification, the prefix `detr.` of panoptic models.
    used = {
        name.removeprefix('detr.'): array
        for name, array in flat.items()
        if not (name.startswith('fc.') or name.endswith('num_batches_tracked'))
    }
    named = names.rename(used, TABLE, source)
    heads = int(extra.get('encoder_attention_heads', _HEADS))
    params = _converted(named, heads)
    panoptic = 'mask_head/out/kernel' in params
    model: dict[str, Any] = {'name': 'detr_panoptic' if panoptic else 'detr', **_backbone(params)}
    if 'query_embed' in params:
        model |= _transformer(params, heads)
    else:
        notes.append("a ResNet alone: take it by config.init.select='backbone'")
    model['dilate'] = bool(extra.get('dilation', False))
    if 'dropout' in extra:
        model['dropout'] = float(extra['dropout'])
    if 'query_embed' in params and not extra.keys() - {*_NO_CONFIG}:
        notes.append('without a config.json, its last stage is taken as not dilated (no DC5)')
    size, transforms = _images(extra.get(normalization.PREPROCESSOR) or {})
    return TrainedModel.of_file(
        params=unflatten_dict(params, sep='/'),
        model=model,
        image_size=size,
        source=source,
        task={**_task(model), **_normalization(extra)},
        transforms=transforms,
        notes=tuple(notes),
    )


def _images(preprocessor: Mapping[str, Any]) -> tuple[tuple[int, int], str]:
    """The size of images and their transforms, by default the authors'."""
    size = preprocessor.get('size', {})
    if not isinstance(size, Mapping):  # of older files: the shorter side alone
        size = {'shortest_edge': size, 'longest_edge': preprocessor.get('max_size', _LONG)}
    short, long = int(size.get('shortest_edge', _SHORT)), int(size.get('longest_edge', _LONG))
    if long >= _detr.ANY_LENGTH:
        return (short, short), f'resize_small({short})'
    return (short, long), f'resize_small({short}, max={long})'


def _task(model: Mapping[str, Any]) -> dict[str, Any]:
    if model['name'] == 'detr':
        return {'name': 'detect'}
    stuff = _STUFF if model['num_classes'] == _COCO_PANOPTIC else ()
    return {'name': 'segment_panoptic', 'stuff': stuff}


def _converted(named: Flat, heads: int) -> Flat:
    """Parameters by our names, in our layouts."""
    params: Flat = {}
    for name, array in named.items():
        module, _, leaf = name.rpartition('.')
        parent, _, last = module.rpartition('/')
        if name == 'query_embed':
            params[name] = array
        elif module.startswith('backbone/') and 'norm' in last:
            if leaf == 'weight':
                params |= _folded(named, module)
        elif parent == 'bbox_attention':
            if leaf == 'weight' and last == 'q':
                params |= _projections(named, parent, heads)
        elif parent.endswith(('/attention', '/cross')) and last != 'out':
            if leaf == 'weight' and last in ('q', 'packed'):
                params |= _projections(named, parent, heads)
        elif parent.endswith(('/attention', '/cross')) and leaf == 'weight':
            params[f'{module}/kernel'] = array.T.reshape(heads, -1, len(array))
        else:
            params[f'{module}/{_leaf(last, leaf)}'] = _layout(module, array)
    return params


def _leaf(module: str, leaf: str) -> str:
    if leaf != 'weight':
        return leaf
    return 'scale' if 'norm' in module else 'kernel'


def _layout(module: str, array: np.ndarray) -> np.ndarray:
    if array.ndim == 4 and module != 'input_proj':
        return array.transpose(2, 3, 1, 0)
    return array.reshape(array.shape[:2]).T if array.ndim > 1 else array


def _folded(named: Flat, module: str) -> Flat:
    """A batch norm as a factor and a summand for each channel."""
    gamma, beta, mean, var = (
        _get(named, f'{module}.{leaf}')
        for leaf in ('weight', 'bias', 'running_mean', 'running_var')
    )
    scale = gamma / np.sqrt(var + _detr.BN_EPS)
    return {f'{module}/scale': scale, f'{module}/bias': beta - mean * scale}


def _projections(named: Flat, parent: str, heads: int) -> Flat:
    """Queries, keys and values, fused or split, as the kernels of our attention."""
    groups, parts = _groups(parent), {}
    for leaf in ('weight', 'bias'):
        if f'{parent}/packed.{leaf}' in named:
            each = np.split(named[f'{parent}/packed.{leaf}'], 3)
        else:
            each = [_get(named, f'{parent}/{x}.{leaf}') for group in groups for x in group]
        # [D H K] or [H K]
        parts[leaf] = [a.T.reshape(*a.T.shape[:-1], heads, -1) for a in each]
    params = {}
    for group in groups:
        places = ['qkv'.index(letter) for letter in group]
        params[f'{parent}/{group}/kernel'] = np.stack([parts['weight'][i] for i in places], 1)
        params[f'{parent}/{group}/bias'] = np.stack([parts['bias'][i] for i in places])
    return params


def _groups(parent: str) -> tuple[str, ...]:
    """The letters of the projections that form one of our kernels."""
    if parent == 'bbox_attention':
        return ('qk',)
    return ('qkv',) if parent.endswith('/attention') else ('q', 'kv')


def _get(named: Flat, name: str) -> np.ndarray:
    if name not in named:
        raise UserError(f'DETR: {name} is absent; get the file again')
    return named[name]


def _backbone(params: Flat) -> dict[str, Any]:
    """Sizes of the ResNet."""
    stages = _count(params, r'backbone/stage_(\d+)/')
    layers = tuple(_count(params, rf'backbone/stage_{i}/block_(\d+)/') for i in range(stages))
    width = _get(params, 'backbone/root/conv/kernel').shape[-1]
    return {'layers': layers, 'backbone_width': width, 'backbone_norm': 'frozen'}


def _transformer(params: Flat, heads: int) -> dict[str, Any]:
    """Sizes of the transformer and its heads."""
    queries, width = params['query_embed'].shape
    return {
        'num_classes': _get(params, 'class_embed/bias').size - 1,
        'num_queries': queries,
        'width': width,
        'depth': _count(params, r'encoder/block_(\d+)/'),
        'decoder_depth': _count(params, r'decoder/block_(\d+)/'),
        'num_heads': heads,
        'mlp_dim': _get(params, 'encoder/block_0/mlp/fc1/bias').size,
        'norm': 'pre' if 'encoder/norm/scale' in params else 'post',
    }


def _count(params: Iterable[str], pattern: str) -> int:
    found = (re.match(pattern, name) for name in params)
    return 1 + max((int(match[1]) for match in found if match), default=-1)


def _normalization(extra: Mapping[str, Any]) -> dict[str, Any]:
    """The mean and deviation of the user or of preprocessor_config.json; empty without these.

    The task's defaults are the authors'.
    """
    if normalization.GIVEN in extra:
        given = extra[normalization.GIVEN]
        return {name: tuple(np.broadcast_to(given[name], 3).tolist()) for name in ('mean', 'std')}
    found = extra.get(normalization.PREPROCESSOR) or {}
    pairs = (('mean', 'image_mean'), ('std', 'image_std'))
    return {ours: tuple(map(float, found[theirs])) for ours, theirs in pairs if theirs in found}


WRITERS = {(name, 'transformers'): _detr.transformers for name in ('detr', 'detr_panoptic')}
