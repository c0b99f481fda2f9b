"""Mean and standard deviation of a checkpoint's images, in files and in the task.

They are given by the user, or read from the files next to the weights: timm's config.json or
transformers' preprocessor_config.json.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from vit_jax.errors import UserError
from vit_jax.interop.trained import TrainedModel, pixel_scale

# Keys of the `extra` of `files.read_arrays`, in addition to the keys of config.json.
GIVEN_NORMALIZATION, PREPROCESSOR = 'normalization given by the user', 'preprocessor_config.json'
UNKNOWN_NORMALIZATION = (
    'the mean and standard deviation of its images are unknown '
    '(no preprocessor_config.json, no pretrained_cfg in config.json): assumed to be 0.5 and 0.5'
)
IMAGENET = {'mean': [0.485, 0.456, 0.406], 'std': [0.229, 0.224, 0.225]}
_HALF = np.full(1, 0.5)
RANGE = _HALF, _HALF  # mean and standard deviation that map images from [0, 1] to [-1, 1]
PIXEL = 1 / 255


def with_normalization(
    imported: TrainedModel, extra: Mapping[str, Any], unknown: str = ''
) -> TrainedModel:
    """Set the mean and standard deviation of images in the model's task.

    Args:
      imported: Model from the file, for a task with the fields `mean` and `std`.
      extra: See `files.read_arrays`; the user's `mean` and `std` are under GIVEN_NORMALIZATION.
      unknown: Note to add if the normalization is unknown.

    Raises:
      UserError: if the mean or the standard deviation is invalid.
    """
    scale = mean_and_std(extra)
    if scale is None:
        return imported.with_notes(unknown) if unknown else imported
    if all(np.all(values == _HALF) for values in scale):
        return imported
    numbers = per_channel(scale, imported.channels)
    return imported.with_groups(task={**imported.task_config, **numbers})


def per_channel(
    normalization: tuple[np.ndarray, np.ndarray], channels: int
) -> dict[str, tuple[float, ...]]:
    """Return the task fields `mean` and `std`, one number per channel.

    Raises:
      UserError: if they have a different number of channels.
    """
    numbers = {}
    for name, values in zip(('mean', 'std'), normalization, strict=True):
        if values.size not in (1, channels) and np.ptp(values):
            raise UserError(f'{name} has {values.size} channels, but the model {channels}')
        values = values if values.size == channels else values[:1]
        numbers[name] = tuple(np.broadcast_to(values, channels).tolist())
    return numbers


def keys(trained: TrainedModel, channels: int) -> dict[str, list[float]]:
    """Return `mean` and `std` per channel of a model's images in [0, 1], for files.

    Raises:
      UserError: if the task has them for a different number of channels.
    """
    numbers = per_channel(pixel_scale(trained.task) or RANGE, channels)
    return {name: list(values) for name, values in numbers.items()}


def mean_and_std(extra: Mapping[str, Any]) -> tuple[np.ndarray, np.ndarray] | None:
    """Return mean and standard deviation of images in [0, 1], from user or files; None if unknown.

    Raises:
      UserError: if they are invalid, or the preprocessor does more than rescale and normalize.
    """
    for source in (extra.get(GIVEN_NORMALIZATION), extra.get('pretrained_cfg')):
        if isinstance(source, Mapping) and {'mean', 'std'} <= source.keys():
            return _numbers('mean', source['mean']), _numbers('std', source['std'])
    config = extra.get(PREPROCESSOR)
    if config is None:
        return None
    for key in ('do_flip_channel_order', 'rescale_offset'):
        if config.get(key):
            raise UserError(f'{PREPROCESSOR} has {key}, which is not supported: set mean and std')
    scale = 1.0
    if not config.get('do_rescale', True):
        scale = 255.0
    elif (factor := config.get('rescale_factor', PIXEL)) != PIXEL:
        scale = 255.0 * float(_numbers('rescale_factor', factor)[0])
    if not config.get('do_normalize', True):
        mean, std = np.zeros(1), np.ones(1)
    elif {'image_mean', 'image_std'} <= config.keys():
        mean = _numbers('image_mean', config['image_mean'])
        std = _numbers('image_std', config['image_std'])
    elif processor_type(config).startswith('ViT'):
        mean, std = RANGE  # its defaults
    else:
        return None
    return mean / scale, std / scale


def with_imagenet_default(extra: Mapping[str, Any]) -> dict[str, Any]:
    """Add the mean and standard deviation of ImageNet to `extra` if it has none."""
    defaults = {} if mean_and_std(extra) is not None else {GIVEN_NORMALIZATION: IMAGENET}
    return {**extra, **defaults}


def _numbers(name: str, value: Any) -> np.ndarray:
    """Convert to finite numbers [C], or [1] for a single number.

    Raises:
      UserError: if they are not finite numbers, or a standard deviation is not positive.
    """
    values = value if isinstance(value, list | tuple | np.ndarray) else [value]
    is_real = all(
        isinstance(v, int | float | np.number) and not isinstance(v, bool) and math.isfinite(v)
        for v in values
    )
    if not len(values) or not is_real:
        raise UserError(f'{name}={value!r} is not one finite number per channel')
    if name != 'mean' and name != 'image_mean' and min(values) <= 0:
        raise UserError(f'{name}={value!r} must be positive')
    return np.asarray(values, np.float64)


def processor_type(config: Mapping[str, Any]) -> str:
    """Return the type of a preprocessor, such as 'ViTImageProcessor'; empty if unknown."""
    return str(config.get('image_processor_type') or config.get('feature_extractor_type') or '')
