"""Detection as set prediction: each object is matched with one query, other queries predict none.

Carion et al., 2020, arXiv:2005.12872, sections 3.1 and A.2.
"""

from __future__ import annotations

import abc
import dataclasses
from typing import ClassVar, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from vit_jax.array_types import Bool, Float, Int
from vit_jax.errors import UserError
from vit_jax.ops import boxes as box_ops
from vit_jax.ops import sequences
from vit_jax.ops.boxes import match
from vit_jax.ops.sequences import Normalization
from vit_jax.ops.terms import Term
from vit_jax.tasks import base
from vit_jax.tasks.base import Apply, Batch, Sums


class Targets(NamedTuple):
    """Objects of a batch.

    Attributes:
      labels: Class indices; arbitrary in rows without an object.
      boxes: Centered (x, y, w, h), relative to the sides of the image without padding.
      real: True for rows with an object to find.
    """

    labels: Int[Array, 'B N']
    boxes: Float[Array, 'B N 4']
    real: Bool[Array, 'B N']


class Blocks(NamedTuple):
    """Predictions to match with objects, each block on its own.

    Attributes:
      logits: Logits of the classes of Q queries in each of L blocks.
      boxes: Centered (x, y, w, h), relative to the sides of the image without padding.
      stages: Blocks of each stage by the prefix of its terms: '' for the final predictions.
    """

    logits: Float[Array, 'B L Q C']
    boxes: Float[Array, 'B L Q 4']
    stages: dict[str, slice]

    @property
    def groups(self) -> int:
        """Number of blocks with final predictions."""
        final = self.stages['']
        return final.stop - final.start


@dataclasses.dataclass(frozen=True)
class SetTask(base.Task):
    """Base class of tasks that match objects with predictions of boxes and classes.

    A subclass computes `class_costs` and `class_sums`, and converts outputs `to_predictions`.
    """

    class_cost: float = 1.0
    box_cost: float = 5.0
    giou_cost: float = 2.0
    class_weight: float = 1.0
    box_weight: float = 5.0
    giou_weight: float = 2.0
    mean: tuple[float, ...] = (0.485, 0.456, 0.406)
    std: tuple[float, ...] = (0.229, 0.224, 0.225)

    rngs: ClassVar[tuple[str, ...]] = ('dropout',)
    headline = ('loss', 'accuracy')
    least_weight: ClassVar[float] = 0.0  # minimum of the divisor of class losses

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            if field.name.endswith(('_cost', '_weight')):
                self.require(field.name, getattr(self, field.name) >= 0, 'at least 0')
        self.require('std', min(self.std) > 0, 'positive')

    @property
    def normalization(self) -> Normalization:
        return self.mean, self.std

    def inputs(self, batch: Batch) -> tuple[Float[Array, 'B H W C'], Bool[Array, 'B H W']]:
        """Return normalized images with zero padding, and the mask of their real pixels."""
        mask = pixel_mask(batch)
        images = sequences.standardize(batch['image'], self.mean, self.std)
        return images * mask[..., None], mask

    def loss(self, outputs: dict, batch: Batch) -> dict[str, Term]:
        """Class, box and GIoU losses of the decoder's last block, and of all earlier blocks.

        Box losses are divided by the number of objects, class losses by the `weight` of
        `class_sums`. Metrics are `accuracy`, over the classes of matched objects, and `unmatched`,
        the share of objects without a prediction.
        """
        targets = make_targets(batch)
        return self.set_terms(outputs, targets, self.match(outputs, targets))

    def set_terms(
        self, outputs: dict, targets: Targets, places: Int[Array, 'B L N']
    ) -> dict[str, Term]:
        """Compute the terms of `loss` for a given matching."""
        blocks = self.blocks(outputs)
        sums = {name: x.sum(0) for name, x in self._sums(blocks, targets, places).items()}
        final, groups = blocks.stages[''], blocks.groups
        weight, objects = groups * sums['weight'], groups * sums['objects']
        terms: dict[str, Term] = {}
        for prefix, chosen in blocks.stages.items():
            classes, boxes, gious = (sums[name][chosen].sum() for name in ('class', 'box', 'giou'))
            terms |= {
                f'{prefix}class': Term(classes, weight, self.class_weight, self.least_weight),
                f'{prefix}box': Term(boxes, objects, self.box_weight),
                f'{prefix}giou': Term(gious, objects, self.giou_weight),
            }
        return {
            **terms,
            'accuracy': Term(sums['correct'][final].sum(), objects, 0.0),
            'unmatched': Term(sums['unmatched'], sums['objects'], 0.0),
        }

    def evaluate(self, apply: Apply, batch: Batch) -> Sums:
        """Terms of `loss` for the last block, and `loss`: the mean over images, each normalized by
        its own objects, so that it does not depend on how images are batched.
        """
        outputs, targets = self.outputs(apply, batch), make_targets(batch)
        return self.set_means(outputs, targets, self.match(outputs, targets), self.mask(batch))

    def set_means(
        self,
        outputs: dict,
        targets: Targets,
        places: Int[Array, 'B L N'],
        examples: Float[Array, ' B'],
    ) -> Sums:
        """Compute `evaluate` for a given matching, over rows where `examples` is 1."""
        blocks = self.blocks(outputs)
        sums = self._sums(blocks, targets, places)
        sums = jax.tree.map(lambda x: (x.T * examples).T, sums)
        weight, objects = (jnp.where(n > 0, n, 1) for n in (sums['weight'], sums['objects']))
        per_image = (
            self.class_weight * sums['class'].sum(1) / weight
            + (self.box_weight * sums['box'].sum(1) + self.giou_weight * sums['giou'].sum(1))
            / objects
        )
        final, groups = blocks.stages[''], blocks.groups
        last = {name: sums[name][:, final].sum() for name in ('class', 'box', 'giou', 'correct')}
        count = groups * sums['objects'].sum()
        return {
            'loss': (per_image.sum() / groups, examples.sum()),
            'class': (last['class'], groups * sums['weight'].sum()),
            'box': (last['box'], count),
            'giou': (last['giou'], count),
            'accuracy': (last['correct'], count),
            'unmatched': (sums['unmatched'].sum(), sums['objects'].sum()),
        }

    def predict(self, apply: Apply, batch: Batch) -> dict[str, jax.Array]:
        """Predict K objects.

        Returns:
          scores: [B K], probability of the class.
          labels: int32 [B K].
          boxes: corners [B K 4], relative to the sides of the image without padding.
        """
        return self.to_predictions(self.outputs(apply, batch))

    @abc.abstractmethod
    def to_predictions(self, outputs: dict) -> dict[str, jax.Array]:
        """Convert the model's outputs to predictions, see `predict`."""

    @abc.abstractmethod
    def class_costs(
        self, logits: Float[Array, 'B L Q C'], labels: Int[Array, 'B L N']
    ) -> Float[Array, 'B L N Q']:
        """Compute the cost of the class of each object in each prediction."""

    @abc.abstractmethod
    def class_sums(
        self,
        logits: Float[Array, 'B L Q C'],
        targets: Targets,
        places: Int[Array, 'B L N'],
        iou: Float[Array, 'B L N'],
    ) -> dict[str, Float[Array, 'B *L']]:
        """Sum the loss `class` and `correct`, the number of objects with the correct class.

        Args:
          logits: Logits of each query.
          targets: Objects.
          places: Query index of each object, -1 for none.
          iou: IoU of each object and the box of its query; arbitrary for none.

        Returns:
          The sums in each block, and [B] `weight`, which divides `class` of a block.
        """

    def match(
        self, outputs: dict, targets: Targets, more: Float[Array, 'B L N Q'] | None = None
    ) -> Int[Array, 'B L N']:
        """Match objects with queries in each block, the last one last; -1 for none.

        Args:
          outputs: Outputs of the model.
          targets: Objects.
          more: Costs to add, such as masks'.
        """
        logits, boxes, _ = self.blocks(outputs)
        cost = self.cost(logits, boxes, targets)
        cost = cost if more is None else cost + more
        return match(cost, _each_block(targets.real, logits))

    def blocks(self, outputs: dict) -> Blocks:
        """Stack the predictions of all blocks of the decoder, the last one last."""
        logits, boxes = (
            jnp.concatenate([outputs[f'aux_{name}'], outputs[name][:, None]], axis=1)
            for name in ('logits', 'boxes')
        )
        last = logits.shape[1] - 1
        return Blocks(logits, boxes, {'': slice(last, last + 1), 'aux_': slice(0, last)})

    def _sums(
        self, blocks: Blocks, targets: Targets, places: Int[Array, 'B L N']
    ) -> dict[str, Float[Array, 'B *L']]:
        """Sum `class`, `box`, `giou` and `correct` over each image in each of L blocks, the last
        one last; also return the counts `weight`, `objects` and `unmatched`.
        """
        logits, boxes, _ = blocks
        matched, place = places >= 0, places.clip(0)
        predicted_boxes = jnp.take_along_axis(boxes, place[..., None], axis=-2)
        true_boxes = _each_block(targets.boxes, logits)
        distance = jnp.abs(predicted_boxes - true_boxes).sum(-1)
        corners = tuple(map(box_ops.to_corners, (predicted_boxes, true_boxes)))
        iou, giou = box_ops.iou(*corners), box_ops.giou(*corners)

        # The optimal matching has min(objects, queries) pairs, so counts only depend on the batch.
        objects = targets.real.sum(-1)
        num_matched = jnp.minimum(objects, logits.shape[-2])
        return {
            **self.class_sums(logits, targets, places, iou),
            'box': (distance * matched).sum(-1),
            'giou': ((1 - giou) * matched).sum(-1),
            'objects': objects.astype(jnp.float32),
            'unmatched': (objects - num_matched).astype(jnp.float32),
        }

    def cost(
        self, logits: Float[Array, 'B L Q C'], boxes: Float[Array, 'B L Q 4'], targets: Targets
    ) -> Float[Array, 'B L N Q']:
        """Compute the cost of matching objects with predictions, equation 1 and appendix A.2."""
        classes = self.class_costs(logits, _each_block(targets.labels, logits))
        true_boxes, predicted_boxes = (
            _each_block(targets.boxes, logits)[..., :, None, :],
            boxes[..., None, :, :],
        )
        distance = jnp.abs(true_boxes - predicted_boxes).sum(-1)
        giou = box_ops.giou(*map(box_ops.to_corners, (true_boxes, predicted_boxes)))
        return self.box_cost * distance + self.class_cost * classes - self.giou_cost * giou


@dataclasses.dataclass(frozen=True)
class Task(SetTask):
    """Predict boxes and classes of objects, or "no object", whose class is the last.

    Attributes:
      none_weight: Weight of predictions without an object in the mean over predictions.
      class_cost, box_cost, giou_cost: Weights of probability, L1 distance and GIoU in the cost of
        matching an object with a prediction.
      class_weight, box_weight, giou_weight: Weights of cross entropy, L1 distance and GIoU in the
        loss.
      mean, std: Normalization of each channel of images in [0, 1].
    """

    none_weight: float = 0.1

    def to_predictions(self, outputs: dict) -> dict[str, jax.Array]:
        """Take the most probable class of each query, excluding "no object", and its box."""
        probs = jax.nn.softmax(outputs['logits'])[..., :-1]
        return {
            'scores': probs.max(-1),
            'labels': probs.argmax(-1).astype(jnp.int32),
            'boxes': box_ops.to_corners(outputs['boxes']),
        }

    def class_costs(
        self, logits: Float[Array, 'B L Q C'], labels: Int[Array, 'B L N']
    ) -> Float[Array, 'B L N Q']:
        """The negative probability, not the logarithm, to be commensurate with other costs."""
        probs = jnp.take_along_axis(jax.nn.softmax(logits), labels[..., None, :], axis=-1)
        return -probs.swapaxes(-1, -2)

    def class_sums(
        self,
        logits: Float[Array, 'B L Q C'],
        targets: Targets,
        places: Int[Array, 'B L N'],
        iou: Float[Array, 'B L N'],
    ) -> dict[str, Float[Array, 'B *L']]:
        """Sum the cross entropy of queries; `weight` is the total weight of the predictions."""
        del iou
        labels, queries = _each_block(targets.labels, logits), logits.shape[-2]
        matched = jnp.minimum(targets.real.sum(-1), queries)
        return {
            **class_sums(logits, labels, places, self.none_weight),
            'weight': matched + self.none_weight * (queries - matched),
        }


def class_sums(
    logits: Float[Array, '*B Q C'],
    labels: Int[Array, '*B N'],
    places: Int[Array, '*B N'],
    none_weight: float,
) -> dict[str, Float[Array, '*B']]:
    """Sum `class`, the weighted cross entropy of queries, and `correct`, the number of objects
    whose query has the correct class.

    Args:
      logits: Logits of each query; the last class is "no object".
      labels: Classes of the objects.
      places: Query index of each object, -1 for none.
      none_weight: Weight of a query without object.
    """
    matched, place = places >= 0, places.clip(0)
    queries, none = logits.shape[-2], logits.shape[-1] - 1
    # [*B N Q], true where query q is matched with object n.
    pairs = places[..., None] == jnp.arange(queries)
    classes = jnp.where(pairs.any(-2), (pairs * labels[..., None]).sum(-2), none)
    log_probs = jax.nn.log_softmax(logits)
    entropy = -jnp.take_along_axis(log_probs, classes[..., None], axis=-1)[..., 0]
    weights = jnp.where(classes == none, none_weight, 1.0)
    is_correct = jnp.take_along_axis(logits.argmax(-1), place, axis=-1) == labels
    is_finite = jnp.take_along_axis(jnp.isfinite(logits.max(-1)), place, axis=-1)
    correct = jnp.where(matched, jnp.where(is_finite, is_correct, jnp.nan), 0.0)
    return {'class': (entropy * weights).sum(-1), 'correct': correct.sum(-1)}


def _each_block(x: Array, logits: Float[Array, 'B L Q C']) -> Array:
    """Repeat an array for all blocks, [B ...] -> [B L ...]."""
    return jnp.broadcast_to(x[:, None], (*logits.shape[:2], *x.shape[1:]))


def pixel_mask(batch: Batch) -> Bool[Array, 'B H W']:
    """Return the batch's pixel mask: true for pixels of images, false for padding."""
    if 'pixel_mask' in batch:
        return batch['pixel_mask']
    return jnp.ones(batch['image'].shape[:3], bool)


def make_targets(batch: Batch) -> Targets:
    """Build the targets, without padding and crowds.

    Raises:
      UserError: if the batch has no padded boxes.
    """
    if missing := [name for name in ('boxes', 'labels', 'object_mask') if name not in batch]:
        raise UserError(
            f'detection needs {missing[0]!r}, but the data have {", ".join(batch)}: use a source '
            "with boxes, and end the transforms with 'pad_objects(100)'"
        )
    mask = pixel_mask(batch)
    sides = jnp.stack([mask[:, 0, :].sum(-1), mask[:, :, 0].sum(-1)] * 2, axis=-1)
    real = batch['object_mask']
    if 'crowd' in batch:
        real &= ~batch['crowd'].astype(bool)
    return Targets(
        batch['labels'], box_ops.to_centered(batch['boxes'] / sides[:, None].clip(1)), real
    )
