"""Detection with several groups of queries in training, each matched by itself.

Group DETR (Chen et al., 2022, arXiv:2207.13085) with the class loss of LW-DETR (Chen et al., 2024,
arXiv:2406.03459, section 3.2), for RF-DETR.
"""

from __future__ import annotations

import dataclasses
from typing import ClassVar

import jax
import jax.numpy as jnp
from jax import Array
from jax.nn import log_sigmoid

from vit_jax.array_types import Float, Int
from vit_jax.ops import boxes as box_ops
from vit_jax.ops import terms
from vit_jax.tasks import detect
from vit_jax.tasks.detect import Blocks, Targets

FOCAL_ALPHA, FOCAL_GAMMA = 0.25, 2  # of the cost
LEAST_TARGET = 0.01  # of a matched query's class


@dataclasses.dataclass(frozen=True)
class Task(detect.SetTask):
    """Predict boxes and classes of objects, by a sigmoid for each class.

    Attributes:
      alpha: Share of the probability in the geometric mean of probability and IoU that the class of
        a matched query learns.
      objects: Most predicted objects of an image, the pairs of a query and a class that score
        highest.
      class_cost, box_cost, giou_cost: Weights of focal loss, L1 distance and GIoU in the cost of
        matching an object with a prediction.
      class_weight, box_weight, giou_weight: Weights of class loss, L1 distance and GIoU in the
        loss.
      mean, std: Normalization of each channel of images in [0, 1].
    """

    class_cost: float = 2.0
    alpha: float = 0.25
    objects: int = 300

    least_weight: ClassVar[float] = 1.0

    def __post_init__(self) -> None:
        self.require('alpha', 0 <= self.alpha <= 1, 'in [0, 1]')
        self.require('objects', self.objects >= 1, 'at least 1')
        super().__post_init__()

    def blocks(self, outputs: dict) -> Blocks:
        """Stack the predictions of each group: of the first stage, of earlier blocks of the
        decoder, and of the last.
        """
        groups = outputs['first_logits'].shape[1]

        def stack(name: str) -> Array:
            decoded = jnp.concatenate([outputs[f'aux_{name}'], outputs[name][:, None]], axis=1)
            batch, depth, queries, size = decoded.shape
            decoded = decoded.reshape(batch, depth * groups, queries // groups, size)
            return jnp.concatenate([outputs[f'first_{name}'], decoded], axis=1)

        logits = stack('logits')
        last = logits.shape[1] - groups
        stages = {'': slice(last, last + groups), 'aux_': slice(groups, last)}
        return Blocks(logits, stack('boxes'), stages | {'first_': slice(0, groups)})

    def to_predictions(self, outputs: dict) -> dict[str, jax.Array]:
        """Take the pairs of a query and a class that score highest, in order, and the `queries`."""
        logits, boxes = outputs['logits'], box_ops.to_corners(outputs['boxes'])
        flat = logits.reshape(len(logits), -1)
        scores, pairs = jax.lax.top_k(jax.nn.sigmoid(flat), min(self.objects, flat.shape[1]))
        queries, labels = jnp.divmod(pairs, logits.shape[-1])
        return {
            'scores': scores,
            'labels': labels.astype(jnp.int32),
            'queries': queries.astype(jnp.int32),
            'boxes': jnp.take_along_axis(boxes, queries[..., None], axis=1),
        }

    def class_costs(
        self, logits: Float[Array, 'B L Q C'], labels: Int[Array, 'B L N']
    ) -> Float[Array, 'B L N Q']:
        """The focal loss of the object's class if it is positive, minus that if it is negative."""
        x = jnp.take_along_axis(logits, labels[..., None, :], axis=-1).swapaxes(-1, -2)
        probs = jax.nn.sigmoid(x)
        positive = FOCAL_ALPHA * (1 - probs) ** FOCAL_GAMMA * -log_sigmoid(x)
        return positive - (1 - FOCAL_ALPHA) * probs**FOCAL_GAMMA * -log_sigmoid(-x)

    def class_sums(
        self,
        logits: Float[Array, 'B L Q C'],
        targets: Targets,
        places: Int[Array, 'B L N'],
        iou: Float[Array, 'B L N'],
    ) -> dict[str, Float[Array, 'B *L']]:
        """Sum the IoU-aware binary cross entropy; `weight` is the number of objects.

        The class of a matched query learns t = p^alpha IoU^(1 - alpha), where p is its probability,
        all other classes and queries learn 0 with weight p^2.
        """
        matched, place = places >= 0, places.clip(0)
        labels = jnp.broadcast_to(targets.labels[:, None], places.shape)
        chosen = jnp.take_along_axis(logits, place[..., None], axis=-2)
        x = jnp.take_along_axis(chosen, labels[..., None], axis=-1)[..., 0]
        target = jax.nn.sigmoid(x) ** self.alpha * iou ** (1 - self.alpha)
        target = jax.lax.stop_gradient(target.clip(LEAST_TARGET))
        positive = -target * log_sigmoid(x) - (1 - target) * log_sigmoid(-x)
        change = jnp.where(matched, positive - _negative(x), 0)
        correct = jnp.where(matched, terms.hits(chosen, labels), 0)
        return {
            'class': _negative(logits).sum((-2, -1)) + change.sum(-1),
            'correct': correct.sum(-1),
            'weight': targets.real.sum(-1).astype(jnp.float32),
        }


def _negative(x: Float[Array, '*B']) -> Float[Array, '*B']:
    """Loss of a class that is not there."""
    return -(jax.nn.sigmoid(x) ** 2) * log_sigmoid(-x)
