"""The inputs that a model gets from a batch, for display."""

from __future__ import annotations

import jax
import numpy as np

from vit_jax.ops.sequences import joined
from vit_jax.tasks.base import Task

Batch = dict[str, np.ndarray]


def augmented(task: Task, batch: Batch) -> Batch:
    """A training batch after the task's augmentation on the device, such as mixup."""
    return jax.device_get(jax.jit(task.augment)(jax.random.key(0), batch))


def images(task: Task, batch: Batch) -> np.ndarray | None:
    """The images that the model gets from a batch, uint8 [B H W C]; None if it gets none.

    The task's normalization is inverted, as determined from black and white images. Images of
    sequences of patches are padded with white.
    """
    if 'patches' in batch:
        return _framed(list(map(joined, batch['patches'], batch['grid'])))
    if 'image' not in batch:
        return None
    pixels, first = batch['image'], jax.jit(lambda whole: task.inputs(whole)[0])
    got, low, high = (
        np.asarray(first({**batch, 'image': image}), np.float64)
        for image in (pixels, *(np.full(pixels.shape, byte, np.uint8) for byte in (0, 255)))
    )
    if got.shape != pixels.shape:  # the model takes no pixels
        return _bytes(pixels)
    scale = np.where(high == low, 1, high - low)
    return np.round(np.clip((got - low) / scale, 0, 1) * 255).astype(np.uint8)


def _framed(images: list[np.ndarray]) -> np.ndarray:
    """Images of several sizes in frames of the largest height and width."""
    shape = np.max([image.shape for image in images], axis=0)
    framed = np.full((len(images), *shape), 255, np.uint8)
    for frame, image in zip(framed, images, strict=True):
        frame[: image.shape[0], : image.shape[1]] = image
    return framed


def _bytes(pixels: np.ndarray) -> np.ndarray:
    if pixels.dtype == np.uint8:
        return pixels
    low, high = float(pixels.min()), float(pixels.max())
    return np.round((pixels - low) / max(high - low, 1e-12) * 255).astype(np.uint8)
