"""timm's BiTs, `resnetv2_*_bit`: safetensors and config.json; for other names see `bit`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from vit_jax.interop import normalization
from vit_jax.interop.families import _timm, bit
from vit_jax.interop.trained import TrainedModel, Written

# timm's BiTs: blocks per stage, and width factor.
_ARCHITECTURES = {
    *(((3, 4, 6, 3), width) for width in (1, 3)),
    *(((3, 4, 23, 3), width) for width in (1, 3)),
    *(((3, 8, 36, 3), width) for width in (2, 4)),
}


def matches(flat: Mapping[str, Any]) -> bool:
    """Return whether these are the names of timm's BiT."""
    return bit.TIMM_NORM in flat


def read(flat: Mapping[str, np.ndarray], extra: Mapping[str, Any]) -> TrainedModel:
    """Read timm's ResNetV2 if it is a BiT; see `bit.read`."""
    return bit.read(flat, extra)


def write(trained: TrainedModel) -> Written:
    """Write the files of timm's ResNetV2.

    Raises:
      UserError: if a parameter is not part of a BiT.
    """
    arrays = bit.write_torch(trained.params, bit.TIMM)
    if (head := 'head.fc.weight') in arrays:  # a convolution in timm
        arrays[head] = arrays[head][..., None, None]
    model = trained.model_config
    size = trained.image_size or trained.prepared_size or bit.SIZE
    layers, width = tuple(model['layers']), model.get('width_factor', 1)
    channels, classes = arrays['stem.conv.weight'].shape[1], model.get('num_classes') or 0
    preparation, notes = _timm.image_keys(trained.transforms, size)
    # The first number counts convolutions: three per block, the root and the head.
    name = f'resnetv2_{3 * sum(layers) + 2}x{width}_bit'
    if (layers, width) not in _ARCHITECTURES:
        blocks = ', '.join(map(str, layers))
        notes = (*notes, f'timm has no {name}: create its ResNetV2 with blocks {blocks} by hand')
    config = {
        'architecture': name,
        'num_classes': classes,
        'num_features': 64 * width * 2 ** (len(layers) + 1),
        'global_pool': 'avg',
        'model_args': {'num_classes': classes, 'in_chans': channels},
        'pretrained_cfg': {
            **{'num_classes': classes, 'input_size': [channels, *size]},
            **normalization.keys(trained, channels),
            **preparation,
        },
    }
    if trained.class_names:
        config['label_names'] = list(trained.class_names)
    return Written(arrays, config, (*bit.losses(trained), *notes))


WRITERS = {('bit_resnet', 'timm'): write}
