"""Semantic segmentation by a class for every pixel."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import jax.numpy as jnp
import optax
from jax import Array

from vit_jax.array_types import Float, Int
from vit_jax.ops import masks as mask_ops
from vit_jax.ops import sequences, sliding
from vit_jax.ops.sequences import Normalization
from vit_jax.ops.terms import Term
from vit_jax.tasks import base
from vit_jax.tasks.base import Apply, Batch, Sums
from vit_jax.tasks.detect import pixel_mask
from vit_jax.tasks.segment import image_sizes, require_segments

NONE = -1  # pixels without a class


@dataclasses.dataclass(frozen=True)
class Task(base.Task):
    """Classify pixels by the logits of a model; batches have segments as for the task `segment`.

    Attributes:
      frame: Height and width in pixels of the largest image to predict in windows, see the task
        `segment`.
      mean, std: Normalization of each channel of images in [0, 1].
    """

    frame: tuple[int, int] | None = None
    mean: tuple[float, ...] = (0.485, 0.456, 0.406)
    std: tuple[float, ...] = (0.229, 0.224, 0.225)

    rngs = ('dropout',)
    headline = ('loss', 'accuracy')

    def __post_init__(self) -> None:
        self.require('std', min(self.std) > 0, 'positive')

    @property
    def normalization(self) -> Normalization:
        return self.mean, self.std

    def inputs(self, batch: Batch) -> tuple[Float[Array, 'B H W C']]:
        """Return normalized images, or windows of the transform `sliding_windows`."""
        image = batch['image'].reshape(-1, *batch['image'].shape[-3:])
        return (sequences.standardize(image, self.mean, self.std),)

    def loss(self, outputs: dict, batch: Batch) -> dict[str, Term]:
        """Cross entropy and `accuracy`, means over the pixels with a class."""
        return {
            name: Term(values.sum(), count.sum(), float(name == 'loss'))
            for name, (values, count) in self._sums(outputs, batch).items()
        }

    def evaluate(self, apply: Apply, batch: Batch) -> Sums:
        """Sums and counts of `loss`, without padding of the batch."""
        examples, sums = self.mask(batch), self._sums(self.outputs(apply, batch), batch)
        return {
            name: ((values * examples).sum(), (count * examples).sum())
            for name, (values, count) in sums.items()
        }

    def predict(self, apply: Apply, batch: Batch) -> dict[str, Array]:
        """Return `segmentation` and `size` as the task `segment` of kind 'semantic'."""
        image = batch['image']
        scores = resize(apply(*self.inputs(batch))['logits'], image.shape[-3:-1])
        scores = jnp.moveaxis(scores, -1, 1)
        if image.ndim == 5:
            scores = scores.reshape(*image.shape[:2], *scores.shape[1:])
            return sliding.segmentation(scores, batch, self.frame)
        classes = scores.argmax(1).astype(jnp.int32)
        is_finite = jnp.isfinite(scores).all(1)
        classes = jnp.where(is_finite, classes, sliding.NOT_FINITE)
        return {'segmentation': classes, 'size': image_sizes(batch)}

    def _sums(self, outputs: dict, batch: Batch) -> dict[str, tuple[Array, Array]]:
        """Sum each image's losses, and count its correct pixels, with the numbers of pixels."""
        classes = pixel_classes(batch)
        logits = resize(outputs['logits'], classes.shape[1:]).astype(jnp.float32)
        valid = classes != NONE
        truth = jnp.where(valid, classes, 0)
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, truth)
        right = logits.argmax(-1) == truth
        count = valid.sum((1, 2)).astype(jnp.float32)
        values = {'loss': losses, 'accuracy': right}
        return {n: (jnp.where(valid, x, 0).sum((1, 2)), count) for n, x in values.items()}


def pixel_classes(batch: Batch) -> Int[Array, 'B H W']:
    """Return the class of each pixel, NONE outside of segments and in padding.

    Raises:
      UserError: if the batch has no numbered and padded segments.
    """
    require_segments(batch)
    segments = jnp.where(pixel_mask(batch), batch['segments'], 0)
    labels = jnp.where(batch['object_mask'], batch['labels'], NONE)
    rows = jnp.arange(len(segments))[:, None, None]
    return jnp.where(segments > 0, labels[rows, jnp.maximum(segments - 1, 0)], NONE)


def resize(logits: Float[Array, 'B h w C'], size: Sequence[int]) -> Float[Array, 'B H W C']:
    """Interpolate logits bilinearly at the pixels of an image."""
    if logits.shape[1:3] == tuple(size):
        return logits
    planes = mask_ops.resize_bilinear(jnp.moveaxis(logits, -1, 1), size)
    return jnp.moveaxis(planes, 1, -1)
