"""Normalization of pixels by a checkpoint's mean and deviation, folded into its first layer.

Here images are in [-1, 1] for all models. Others subtract a mean from [0, 1] and divide by a
deviation, which config.json (timm) or preprocessor_config.json (transformers) contains.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Mapping
from typing import Any

import numpy as np

from vit_jax.errors import UserError, resolve
from vit_jax.interop.trained import TrainedModel

# Keys of the `extra` of `files.read_arrays`, beside those of config.json.
GIVEN, PREPROCESSOR = 'normalization given by the user', 'preprocessor_config.json'
UNKNOWN = (
    'the mean and deviation of its images are unknown '
    '(no preprocessor_config.json, no pretrained_cfg in config.json): taken as 0.5 and 0.5'
)
_OURS = (0.5, 0.5)
_PIXEL = 1 / 255


def given(mean: Any, std: Any) -> dict[str, Any]:
    """The entry of a user's `mean` and `std` in the `extra` of a family; none if both are None.

    Raises:
      UserError: if only one of them is given.
    """
    if (mean is None) != (std is None):
        raise UserError('mean and std are given together, or neither is')
    return {} if mean is None else {GIVEN: {'mean': mean, 'std': std}}


def folded(imported: TrainedModel, extra: Mapping[str, Any], unknown: str = '') -> TrainedModel:
    """The model for images in [-1, 1], whatever the normalization of its own.

    Args:
      imported: as it is in the file.
      extra: see `files.read_arrays`; `given` adds the user's values.
      unknown: a note for people if the normalization is unknown.

    Raises:
      UserError: if the mean or the deviation is invalid, or the user's cannot be folded.
    """
    found = of_images(extra)
    if found is None:
        return imported.with_notes(unknown) if unknown else imported
    mean, std = found
    if np.all(mean == _OURS[0]) and np.all(std == _OURS[1]):
        return imported
    embed = imported.params.get('patch_embed', {})
    if 'kernel' not in embed or not _embeds_pixels(imported.model_config):
        words = f'its images have mean {_words(mean)} and deviation {_words(std)} in [0, 1], which'
        if GIVEN in extra:
            raise UserError(f'{words} cannot be folded into a {imported.model_config["name"]}')
        return imported.with_notes(f'{words} is not accounted for: images here are in [-1, 1]')
    kernel, bias = embed['kernel'], embed['bias']
    for name, values in (('mean', mean), ('std', std)):
        if values.size not in (1, kernel.shape[2]) and np.ptp(values):
            raise UserError(f'{name} has {values.size} colors, the model takes {kernel.shape[2]}')
    mean, std = (v if v.size == kernel.shape[2] else v[:1] for v in (mean, std))
    # (x - mean) / std for x = (y + 1) / 2
    shift = np.sum(kernel * ((0.5 - mean) / std)[:, None], axis=(0, 1, 2))
    patch_embed = {
        'kernel': (kernel * (0.5 / std)[:, None]).astype(np.float32),
        'bias': (bias + shift).astype(np.float32),
    }
    params = imported.params | {'patch_embed': patch_embed}
    return _padded(dataclasses.replace(imported, params=params), mean)


def _padded(imported: TrainedModel, mean: np.ndarray) -> TrainedModel:
    """The model with padding of the mean, which is zero in other code bases, where it pads."""
    if not imported.model.pads_pixels:
        return imported
    value = tuple((2 * mean - 1).tolist())
    return imported.with_groups(model={**imported.model_config, 'pad_value': value})


def preprocessor(channels: int, size: tuple[int, int]) -> dict[str, Any]:
    """A preprocessor_config.json of transformers with this package's normalization."""
    return {
        'image_processor_type': 'ViTImageProcessor',
        'do_resize': True,
        'size': {'height': size[0], 'width': size[1]},
        'resample': 2,  # bilinear
        'do_rescale': True,
        'rescale_factor': _PIXEL,
        'do_normalize': True,
        'image_mean': [_OURS[0]] * channels,
        'image_std': [_OURS[1]] * channels,
    }


def _embeds_pixels(keywords: Mapping[str, Any]) -> bool:
    """Whether the first layer of a model embeds patches."""
    fields = {key: value for key, value in keywords.items() if key != 'name'}
    model = resolve('vit_jax.models', keywords['name'], 'Model')(**fields)
    return any(re.search(pattern, 'patch_embed/kernel') for pattern in model.layer_order()[:1])


def of_images(extra: Mapping[str, Any]) -> tuple[np.ndarray, np.ndarray] | None:
    """Mean and deviation of images in [0, 1], from the user or the files; None if unknown."""
    for source in (extra.get(GIVEN), extra.get('pretrained_cfg')):
        if isinstance(source, Mapping) and {'mean', 'std'} <= source.keys():
            return _numbers('mean', source['mean']), _numbers('std', source['std'])
    config = extra.get(PREPROCESSOR)
    if config is None:
        return None
    for key in ('do_flip_channel_order', 'rescale_offset'):
        if config.get(key):
            raise UserError(f'{PREPROCESSOR} has {key}, which is not supported: give mean and std')
    scale = 1.0
    if not config.get('do_rescale', True):
        scale = 255.0
    elif (factor := config.get('rescale_factor', _PIXEL)) != _PIXEL:
        scale = 255.0 * float(_numbers('rescale_factor', factor)[0])
    if not config.get('do_normalize', True):
        mean, std = np.zeros(1), np.ones(1)
    elif {'image_mean', 'image_std'} <= config.keys():
        mean = _numbers('image_mean', config['image_mean'])
        std = _numbers('image_std', config['image_std'])
    elif str(_kind(config)).startswith('ViT'):
        mean, std = np.full(1, _OURS[0]), np.full(1, _OURS[1])  # its defaults
    else:
        return None
    return mean / scale, std / scale


def _kind(config: Mapping[str, Any]) -> Any:
    return config.get('image_processor_type') or config.get('feature_extractor_type')


def _numbers(name: str, value: Any) -> np.ndarray:
    """Finite numbers [C], a single one as [1].

    Raises:
      UserError: if they are not finite numbers, or a deviation is not positive.
    """
    values = value if isinstance(value, list | tuple | np.ndarray) else [value]
    is_real = all(
        isinstance(v, int | float | np.number) and not isinstance(v, bool) and math.isfinite(v)
        for v in values
    )
    if not len(values) or not is_real:
        raise UserError(f'{name}={value!r} is not one finite number for each color')
    if name != 'mean' and name != 'image_mean' and min(values) <= 0:
        raise UserError(f'{name}={value!r} must be positive')
    return np.asarray(values, np.float64)


def _words(values: np.ndarray) -> str:
    return ', '.join(f'{value:.4g}' for value in values)
