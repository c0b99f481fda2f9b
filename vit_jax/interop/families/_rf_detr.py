"""What files of RF-DETR and of LW-DETR have in common."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import numpy as np

from vit_jax.errors import UserError
from vit_jax.interop import names, preprocessing, torch_layout
from vit_jax.interop.files import Flat
from vit_jax.models.eomt import ENCODER
from vit_jax.models.rf_detr import Model
from vit_jax.tree_paths import require_fit


def resizing(
    size: tuple[int, int] | None, model: Mapping[str, Any], processor: Mapping[str, Any]
) -> str:
    """Return transforms of whole images to the size of the files, or else the smallest square that
    the windows tile and the positions fit; empty if the size is unknown.
    """
    sides = processor.get('size') or {}
    if isinstance(sides, Mapping) and {'height', 'width'} <= sides.keys():
        size = int(sides['height']), int(sides['width'])
    elif size is not None:
        step = model['patch_size'] * model['windows']
        size = -(-size[0] // step) * step, -(-size[1] // step) * step
    method = preprocessing.config_resampling(processor)
    return f'drop_alpha|resize({size}, {method!r})' if size else ''


def map_numbers(backbone: Mapping[str, Any], source: str) -> tuple[int, ...]:
    """Return the numbers of blocks after which the detector reads the tokens.

    Raises:
      UserError: if the config lacks them.
    """
    stages = [str(name).removeprefix('stage') for name in backbone.get('out_features') or ()]
    if not (layers := backbone.get('out_indices') or stages):
        raise UserError(f'{source}: out_indices of backbone_config are missing in config.json')
    return tuple(sorted(map(int, layers)))


def sizes(
    arrays: Flat, config: Mapping[str, Any], source: str, scales: tuple[float, ...] = (1.0,)
) -> dict[str, Any]:
    """Return the fields of the detector that follow from the shapes, in our layout, of a model with
    maps of these scales.

    Raises:
      UserError: if an array is missing, or the queries cannot be split into groups.
    """
    queries, width = names.require(arrays, 'query_embed').shape
    groups = names.count_blocks(arrays, r'proposals_(\d+)/')
    if queries % max(groups, 1):
        raise UserError(f'{source}: {queries} queries cannot be split into {groups} groups')
    scores = names.require(arrays, 'decoder/block_0/deformable/scores/bias').size
    masks = {'stride': 0}
    if any(name.startswith('mask_head/') for name in arrays):
        hidden = names.require(arrays, 'mask_head/query/fc1/bias').size
        masks = {'stride': int(config['mask_downsample_ratio']), 'mlp_dim': hidden}
    return {
        'masks': masks,
        'num_classes': names.require(arrays, 'class_embed/bias').size,
        'num_queries': queries // groups,
        'groups': groups,
        'decoder_width': width,
        'decoder_depth': names.count_blocks(arrays, r'decoder/block_(\d+)/'),
        'decoder_mlp_dim': names.require(arrays, 'decoder/block_0/mlp/fc1/bias').size,
        'points': max(scores // (config['decoder_cross_attention_heads'] * len(scales)), 1),
        'projector_blocks': names.count_blocks(arrays, r'projector/block_(\d+)/'),
        'projector_scales': scales,
    }


def require_detector(
    params: Mapping[str, Any], model: Mapping[str, Any], source: str, table: names.Table
) -> None:
    """Raise UserError if the detector does not fit the ViT."""
    keywords = {key: value for key, value in model.items() if key != 'name'}
    module = Model(**keywords | {'windows': 1})
    images = jax.ShapeDtypeStruct((1, module.patch_size, module.patch_size, 3), np.float32)
    shapes = jax.eval_shape(module.init, jax.random.key(0), images)['params']
    of_detector, given = (
        {name: x for name, x in tree.items() if not is_in_vit(name)} for tree in (shapes, params)
    )
    require_fit(
        names.flatten(given),
        names.empty_arrays(of_detector),
        f'{source}: incomplete model (shapes in our layout)',
        label=lambda name: torch_layout.to_theirs(name, table),
    )


def is_in_vit(name: str) -> bool:
    """Return whether a parameter of our model belongs to the ViT."""
    return name.partition('/')[0] in ENCODER


def sizes_config(module: Model) -> dict[str, Any]:
    """Build the entries of config.json for the sizes of the detector."""
    return {
        **{'decoder_self_attention_heads': module.decoder_heads, 'd_model': module.decoder_width},
        'decoder_cross_attention_heads': module.cross.heads,
        **{'decoder_n_points': module.cross.points, 'decoder_ffn_dim': module.decoder_mlp_dim},
        **{'decoder_layers': module.decoder_depth, 'c2f_num_blocks': module.neck.blocks},
        **{'num_queries': module.num_queries, 'group_detr': module.groups},
    }
