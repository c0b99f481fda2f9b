"""DETR of transformers: safetensors and config.json. For the authors' names see `authors_detr`.

Both sets of names are read: of transformers 4, which files on the hub have, and of version 5. A
single ResNet, with torchvision's and timm's names, is read for `config.init.select='backbone'`.
Batch norms become `FrozenNorm`s. A Table Transformer is a DETR with pre-norm blocks.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import numpy as np
from flax.traverse_util import unflatten_dict

from vit_jax.interop import names, normalization, preprocessing, torch_layout
from vit_jax.interop.families import _detr
from vit_jax.interop.families._detr import TABLE
from vit_jax.interop.files import Flat
from vit_jax.interop.trained import GIVEN_SIZE, TrainedModel, read_class_names

# Possible keys of `extra` without a config.json.
_NO_CONFIG = (normalization.GIVEN_NORMALIZATION, GIVEN_SIZE, normalization.PREPROCESSOR)
_SHORT, _LONG = 800, 1333  # sides of the authors' images
# COCO's models have a class for each category id; stuff classes come last.
_COCO, _COCO_PANOPTIC, _STUFF = 91, 250, tuple(range(91, 250))


def matches(flat: Mapping[str, np.ndarray]) -> bool:
    """Return whether these are names of transformers' DETR, or of a ResNet with bottlenecks."""
    detr = any(f'{prefix}class_labels_classifier.weight' in flat for prefix in ('', 'detr.'))
    return detr or {'conv1.weight', 'bn1.running_mean', 'layer1.0.conv3.weight'} <= flat.keys()


def read(flat: Flat, extra: Mapping[str, Any]) -> TrainedModel:
    """Read a detector, a panoptic model, or the backbone of one, with any names.

    Raises:
      UserError: if parameters are unknown, missing or have the wrong shape, or config.json
        describes a different model.
    """
    source = 'DETR'
    _detr.require_detr(extra, flat)
    notes = []
    # Drops the classifier of a ResNet, and the prefix `detr.` of panoptic models.
    used = {
        name.removeprefix('detr.'): array
        for name, array in flat.items()
        if not (name.startswith('fc.') or name.endswith('num_batches_tracked'))
    }
    heads = _detr.heads(extra)
    parts = torch_layout.split_fused(used, source)
    params = names.join(_fold_batch_norms(_read(parts, heads, source)))
    panoptic = 'mask_head/out/kernel' in params
    model: dict[str, Any] = {'name': 'detr_panoptic' if panoptic else 'detr', **_backbone(params)}
    if 'query_embed' in params:
        model |= _transformer(params, heads)
    else:
        notes.append("only a ResNet: use it with config.init.select='backbone'")
    model |= _detr.keywords(extra, any('.embedder.embedder.' in name for name in used))
    if 'query_embed' in params and not extra.keys() - {*_NO_CONFIG}:
        notes.append('no config.json: the last stage is assumed not to be dilated (no DC5)')
    size, transforms = _images(extra.get(normalization.PREPROCESSOR) or {})
    trained = TrainedModel.from_file(
        params=unflatten_dict(params, sep='/'),
        model=model,
        image_size=size,
        source=source,
        task={**_task(model), **_normalization(extra, params)},
        transforms=transforms,
        notes=tuple(notes),
    )
    count = model.get('num_classes', 0)
    by_id = count in (_COCO, _COCO_PANOPTIC) and not read_class_names(extra, count)
    return dataclasses.replace(trained, class_ids=tuple(range(count)) if by_id else ())


def _read(parts: Flat, heads: tuple[int, int], source: str) -> Flat:
    """Convert arrays to our layouts; the decoder may have a different number of heads."""
    decoder = {n: a for n, a in parts.items() if n.startswith(('model.decoder', 'transformer.dec'))}
    other_arrays = {name: array for name, array in parts.items() if name not in decoder}
    return {
        **torch_layout.read(other_arrays, TABLE, heads[0], source),
        **torch_layout.read(decoder, TABLE, heads[1], source),
    }


def _images(preprocessor: Mapping[str, Any]) -> tuple[tuple[int, int], str]:
    """Return the size of images and their transforms, by default the authors'."""
    if not preprocessor.get('do_resize', True):
        return (_SHORT, _LONG), 'drop_alpha'
    size, method = preprocessor.get('size', {}), preprocessing.config_resampling(preprocessor)
    named = '' if method == 'bilinear' else f', {method!r}'
    if not isinstance(size, Mapping):  # old files only have the shorter side
        size = {'shortest_edge': size, 'longest_edge': preprocessor.get('max_size', _LONG)}
    if {'height', 'width'} <= size.keys():
        squashed = int(size['height']), int(size['width'])
        return squashed, f'drop_alpha|resize({squashed}{named})'
    short, long = int(size.get('shortest_edge', _SHORT)), int(size.get('longest_edge', _LONG))
    if long >= _detr.ANY_LENGTH:
        return (short, short), f"drop_alpha|resize_small({short}{named}, rounding='down')"
    limit = f"max={long}, rounding='down'"
    return (short, long), f'drop_alpha|resize_small({short}{named}, {limit})'


def _task(model: Mapping[str, Any]) -> dict[str, Any]:
    if model['name'] == 'detr':
        return {'name': 'detect'}
    stuff = _STUFF if model['num_classes'] == _COCO_PANOPTIC else ()
    return {'name': 'segment_panoptic', 'stuff': stuff}


def _fold_batch_norms(flat: Flat) -> Flat:
    """Convert batch norms to a scale and a shift per channel."""
    folded = {name: array for name, array in flat.items() if '.running_' not in name}
    for name in folded:
        if name.startswith('backbone/') and name.endswith('/scale'):
            norm = name.removesuffix('/scale')
            mean, var = (names.require(flat, f'{norm}.running_{x}') for x in ('mean', 'var'))
            scale = flat[name] / np.sqrt(var + _detr.BN_EPS)
            shift = names.require(flat, f'{norm}/bias') - mean * scale
            folded |= {name: scale, f'{norm}/bias': shift}
    return folded


def _backbone(params: Flat) -> dict[str, Any]:
    """Return the sizes of the ResNet."""
    layers = names.stage_depths(params, 'backbone/')
    width = names.require(params, 'backbone/root/conv/kernel').shape[-1]
    return {'layers': layers, 'backbone_width': width, 'backbone_norm': 'frozen'}


def _transformer(params: Flat, heads: tuple[int, int]) -> dict[str, Any]:
    """Return the sizes of the transformer and its heads; the decoder's only if they differ."""
    queries, width = params['query_embed'].shape
    hidden = [
        names.require(params, f'{stack}/block_0/mlp/fc1/bias').size
        for stack in ('encoder', 'decoder')
    ]
    return {
        'num_classes': names.require(params, 'class_embed/bias').size - 1,
        'num_queries': queries,
        'width': width,
        'depth': names.count_blocks(params, r'encoder/block_(\d+)/'),
        'decoder_depth': names.count_blocks(params, r'decoder/block_(\d+)/'),
        'num_heads': heads[0],
        'mlp_dim': hidden[0],
        **({'decoder_heads': heads[1]} if heads[1] != heads[0] else {}),
        **({'decoder_mlp_dim': hidden[1]} if hidden[1] != hidden[0] else {}),
        'norm': 'pre' if 'encoder/norm/scale' in params else 'post',
    }


def _normalization(extra: Mapping[str, Any], params: Flat) -> dict[str, Any]:
    """Return mean and standard deviation from the user or preprocessor_config.json.

    Empty if neither has them: the task's defaults are the authors' values.

    Raises:
      UserError: if they are not numbers, or have a different number of channels than the model.
    """
    scale = normalization.mean_and_std(extra)
    channels = names.require(params, 'backbone/root/conv/kernel').shape[2]
    return normalization.per_channel(scale, channels) if scale else {}


WRITERS = {(name, 'transformers'): _detr.transformers for name in ('detr', 'detr_panoptic')}
