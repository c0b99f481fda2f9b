"""Classes and boxes of spots: two losses, each with its own normalizer."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import optax

from vit_jax.ops import sequences
from vit_jax.ops.terms import Term
from vit_jax.tasks import base
from vit_jax.tasks.base import Apply, Batch, Sums


@dataclasses.dataclass(frozen=True)
class Task(base.Task):
    """Predict the spots of an image, in the order of the data.

    Attributes:
      none_weight: weight of an empty slot in the mean over slots.
      box_weight: weight of the box loss.
    """

    none_weight: float = 0.1
    box_weight: float = 5.0

    rngs = ('mask',)

    def inputs(self, batch: Batch) -> tuple[jax.Array, jax.Array]:
        return sequences.to_range(batch['image'], (-1.0, 1.0)), batch['pixel_mask']

    def loss(self, outputs: dict, batch: Batch) -> dict[str, Term]:
        """Cross entropy over weighted slots, and the L1 distance of boxes over actual spots."""
        classes, boxes = self._targets(outputs, batch)
        losses = optax.softmax_cross_entropy_with_integer_labels(outputs['classes'], classes)
        there = batch['object_mask']
        weights = jnp.where(there, 1.0, self.none_weight)
        distances = jnp.abs(outputs['boxes'] - boxes).sum(-1)
        return {
            'class': Term((losses * weights).sum(), weights.sum()),
            'box': Term((distances * there).sum(), there.sum(), self.box_weight),
            'right': Term((outputs['classes'].argmax(-1) == classes).sum(), classes.size, 0.0),
        }

    def evaluate(self, apply: Apply, batch: Batch) -> Sums:
        outputs = apply(*self.inputs(batch))
        classes, boxes = self._targets(outputs, batch)
        real = batch['mask'][:, None]
        there = batch['object_mask'] * real
        distances = jnp.abs(outputs['boxes'] - boxes).sum(-1)
        losses = optax.softmax_cross_entropy_with_integer_labels(outputs['classes'], classes)
        every = real.sum() * classes.shape[1]
        return {
            'loss': ((losses * real).sum(), every),
            'accuracy': (((outputs['classes'].argmax(-1) == classes) * real).sum(), every),
            'box_error': ((distances * there).sum(), there.sum()),
        }

    def predict(self, apply: Apply, batch: Batch) -> dict[str, jax.Array]:
        """Boxes in pixels [B slots 4] and class probabilities [B slots C + 1]."""
        outputs = apply(*self.inputs(batch))
        return {
            'boxes': outputs['boxes'] * self._sides(batch),
            'probs': jax.nn.softmax(outputs['classes']),
        }

    def _targets(self, outputs: dict, batch: Batch) -> tuple[jax.Array, jax.Array]:
        none = outputs['classes'].shape[-1] - 1
        classes = jnp.where(batch['object_mask'], batch['labels'], none)
        return classes, batch['boxes'] / self._sides(batch)

    def _sides(self, batch: Batch) -> jax.Array:
        height, width = batch['image'].shape[1:3]
        return jnp.array([width, height, width, height], jnp.float32)
