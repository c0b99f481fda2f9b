"""SigLIP 2 NaFlex of transformers: safetensors and config.json.

It is a `Siglip2Model` in transformers, which embeds patches by a matrix. (SigLIP 2 with a fixed
image size is a `SiglipModel`, see `transformers_siglip`.)
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import numpy as np

from vit_jax.data.transforms import parse
from vit_jax.errors import UserError
from vit_jax.interop import preprocessing
from vit_jax.interop.families import _vit, transformers_siglip
from vit_jax.interop.files import Flat
from vit_jax.interop.normalization import PREPROCESSOR
from vit_jax.interop.trained import TrainedModel, Written
from vit_jax.ops.sequences import side_and_channels

SOURCE = 'transformers SigLIP 2'
_PROCESSOR = 'Siglip2ImageProcessor'
_KERNEL = 'vision_model.embeddings.patch_embedding.weight'
_TABLE = 'vision_model.embeddings.position_embedding.weight'
PATCHES = 256  # default number of patches per image


def matches(flat: Mapping[str, np.ndarray]) -> bool:
    """Return whether the file has both towers, with a matrix for image patches."""
    return transformers_siglip.has_towers(flat) and flat[_KERNEL].ndim == 2


def read(flat: Flat, extra: Mapping[str, Any]) -> TrainedModel:
    """Read a Siglip2Model.

    Raises:
      UserError: if parameters are unknown, missing or have the wrong shape, or contradict the
        config.
    """
    if (kind := extra.get('model_type', 'siglip2')) != 'siglip2':
        raise UserError(f'{SOURCE}: config.json describes a {kind!r}, not a siglip2')
    width, values = flat[_KERNEL].shape
    side, channels = side_and_channels(values)
    kernel = flat[_KERNEL].reshape(width, side, side, channels).transpose(0, 3, 1, 2)
    grid = _vit.square_side(len(flat.get(_TABLE, ())))
    if grid is None:
        raise UserError(f'{SOURCE}: {_TABLE} is missing, or its positions do not form a square')
    config: dict[str, Any] = {**extra, 'model_type': 'siglip'}
    if extra.get('vision_config') is not None:
        config['vision_config'] = {**extra['vision_config'], 'image_size': grid * side}
    imported = transformers_siglip.read({**flat, _KERNEL: kernel}, config)
    processor = {'image_processor_type': _PROCESSOR, **(extra.get(PREPROCESSOR) or {})}
    max_patches, method = (
        processor.get('max_num_patches', PATCHES),
        preprocessing.config_resampling(processor),
    )
    if not isinstance(max_patches, int) or max_patches < 1:
        raise UserError(f'{SOURCE}: max_num_patches {max_patches!r} must be a positive integer')
    method_text = '' if method == 'bilinear' else f', {method!r}'
    return imported.with_groups(
        model={**imported.model_config, 'name': 'siglip_naflex', 'pos_grid': grid},
        data={
            **imported.config.data,
            'transforms': f'drop_alpha|fit_patches({side}, {max_patches}{method_text})',
        },
    )


def write(trained: TrainedModel) -> Written:
    """Write the files of a Siglip2Model.

    Raises:
      UserError: if transformers has no such model.
    """
    model = trained.model
    written = transformers_siglip.write(dataclasses.replace(trained, image_size=model.own_size))
    kernel = written.arrays[_KERNEL].transpose(0, 2, 3, 1)
    arrays = written.arrays | {_KERNEL: np.ascontiguousarray(kernel.reshape(len(kernel), -1))}
    config, preprocessor = dict(written.config or {}), dict(written.preprocessor or {})
    towers = {name: dict(config[name]) for name in ('text_config', 'vision_config')}
    for name, tower in towers.items():
        tower['model_type'] = f'siglip2_{name.removesuffix("_config")}_model'
    del towers['vision_config']['image_size'], preprocessor['size']
    towers['vision_config']['num_patches'] = model.pos_grid**2
    patch_args = parse.arguments_of(trained.transforms, 'fit_patches') or {}
    preprocessor |= {
        'image_processor_type': _PROCESSOR,
        'patch_size': model.patch_size,
        'max_num_patches': patch_args.get('most', PATCHES),
        'resample': preprocessing.METHODS.index(patch_args.get('method', 'bilinear')),
    }
    config |= {'model_type': 'siglip2', 'architectures': ['Siglip2Model'], **towers}
    return written._replace(arrays=arrays, config=config, preprocessor=preprocessor)


WRITERS = {('siglip_naflex', 'transformers'): write}
