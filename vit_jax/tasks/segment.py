"""Segmentation by mask classification: each segment is matched with one query.

The losses of Mask2Former (Cheng et al., 2022, arXiv:2112.01527, section 3.3) for EoMT (Kerssies et
al., 2025, arXiv:2503.19108, section 3.3 and appendix A).
"""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from vit_jax.array_types import Bool, Float, Int
from vit_jax.errors import UserError, check_choice
from vit_jax.ops import masks as mask_ops
from vit_jax.ops import sequences, sliding
from vit_jax.ops.boxes import match
from vit_jax.ops.panoptic import VOID
from vit_jax.ops.sequences import Normalization
from vit_jax.ops.terms import Term
from vit_jax.tasks import base
from vit_jax.tasks._mask_points import Sampling, mask_costs, mask_losses, prediction_keys
from vit_jax.tasks.base import Apply, Batch, Sums
from vit_jax.tasks.detect import class_sums, pixel_mask

KINDS = ('panoptic', 'instance', 'semantic')


class Targets(NamedTuple):
    """Segments of a batch.

    Attributes:
      labels: Class indices; arbitrary in rows without a segment.
      real: True for rows with a segment to find.
      segments: 1 + row of the segment that a pixel belongs to; 0 for none, VOID for unknown.
      counts: True for pixels that count in the loss; None if all do.
    """

    labels: Int[Array, 'B N']
    real: Bool[Array, 'B N']
    segments: Int[Array, 'B H W']
    counts: Bool[Array, 'B H W'] | None


@dataclasses.dataclass(frozen=True)
class Task(base.Task):
    """Predict masks and classes of segments.

    Attributes:
      kind: Output of `predict`: 'panoptic', 'instance' or 'semantic' segmentation.
      points: Number of points per image where masks are compared: 12,544 in the papers.
      oversample: Number of random points, relative to the number of uncertain points to choose.
      importance: Share of the loss's points that are chosen by uncertainty.
      none_weight: Weight of a query without segment in the mean over queries.
      class_weight, mask_weight, dice_weight: Weights of cross entropy, binary cross entropy of
        masks and dice loss, in the loss and in the cost of matching a segment with a query.
      anneal_start, anneal_end: Steps between which the probability of masked attention falls from
        1 to 0, for each of the model's last blocks; empty for no masked attention.
      anneal_power: Power of this polynomial schedule.
      count_void: Whether unlabeled pixels and padding count as outside of all masks, as in the
        authors' code; otherwise they have no loss.
      stuff: Classes with at most one segment per image, such as sky.
      instances: Maximum number of instances per image, pairs of a query and a class; 0 for the best
        class of each query.
      frame: Height and width in pixels of the largest image to predict in windows, see the
        transform
        `sliding_windows`: class scores are interpolated to the size of the file. By default, its
        pixels take the class of the nearest pixel of the resized image.
      mean, std: Normalization of each channel of images in [0, 1].
    """

    kind: str = 'panoptic'
    points: int = 12544
    oversample: float = 3.0
    importance: float = 0.75
    none_weight: float = 0.1
    class_weight: float = 2.0
    mask_weight: float = 5.0
    dice_weight: float = 5.0
    anneal_start: tuple[int, ...] = ()
    anneal_end: tuple[int, ...] = ()
    anneal_power: float = 0.9
    count_void: bool = True
    stuff: tuple[int, ...] = ()
    instances: int = 100
    frame: tuple[int, int] | None = None
    mean: tuple[float, ...] = (0.485, 0.456, 0.406)
    std: tuple[float, ...] = (0.229, 0.224, 0.225)

    rngs = ('dropout', 'mask', 'points')
    headline = ('loss', 'accuracy')
    inert = (*base.Task.inert, 'points', 'anneal_start', 'anneal_end', 'anneal_power')

    def __post_init__(self) -> None:
        check_choice('config.task.kind', self.kind, KINDS)
        for field in dataclasses.fields(self):
            if field.name.endswith('_weight'):
                self.require(field.name, getattr(self, field.name) >= 0, 'at least 0')
        self.require('points', self.points >= 1, 'at least 1')
        self.require('oversample', self.oversample >= 1, 'at least 1')
        self.require('importance', 0 <= self.importance <= 1, 'in [0, 1]')
        self.require('instances', self.instances >= 0, 'at least 0')
        self.require('anneal_power', self.anneal_power > 0, 'positive')
        self.require('std', min(self.std) > 0, 'positive')
        valid = len(self.anneal_start) == len(self.anneal_end) and all(
            0 <= a < b for a, b in zip(self.anneal_start, self.anneal_end, strict=True)
        )
        self.require('anneal_end', valid, f'as many steps as {self.anneal_start}, each later')

    @property
    def normalization(self) -> Normalization:
        return self.mean, self.std

    def inputs(self, batch: Batch) -> tuple[Float[Array, 'B H W C']]:
        """Return normalized images, or windows of the transform `sliding_windows`; padding is
        black.
        """
        image = batch['image'].reshape(-1, *batch['image'].shape[-3:])
        return (sequences.standardize(image, self.mean, self.std),)

    def outputs(self, apply: Apply, batch: Batch) -> dict[str, Any]:
        """Compute the model's outputs; in training also before each of the last blocks, with masked
        attention as scheduled.

        Returns:
          logits, masks, and in training aux_logits, aux_masks: see `models.eomt`.
          keys: uint32 [B 2], key data for each image's random points.
        """
        probs: dict[str, Any] = {}
        if apply.train:
            probs['mask_probs'] = self.mask_probs(apply.step)
        outputs = apply(*self.inputs(batch), **probs)
        keys = apply(len(batch['image']), method='example_keys')
        return {**outputs, 'keys': jax.random.key_data(keys)}

    def mask_probs(self, step: Int[Array, '']) -> Float[Array, '*L']:
        """Return the probability of masked attention in each of the last blocks at a step."""
        if not self.anneal_start:
            return jnp.zeros(())
        start, end = (jnp.array(x, jnp.float32) for x in (self.anneal_start, self.anneal_end))
        progress = (step - start) / (end - start)
        return (1 - progress.clip(0, 1)) ** self.anneal_power

    def loss(self, outputs: dict, batch: Batch) -> dict[str, Term]:
        """Class, mask and dice losses of the last prediction, and of all earlier predictions.

        Class losses are divided by the total weight of the queries, mask losses by the number of
        segments. Metrics are `accuracy`, over the classes of matched segments, and `unmatched`, the
        share of segments without a query.
        """
        sums = {
            name: x.sum(0) for name, x in self._sums(outputs, make_targets(self, batch)).items()
        }
        terms: dict[str, Term] = {}
        for prefix, part in (('', slice(-1, None)), ('aux_', slice(0, -1))):
            for name, over in (('class', 'weight'), ('mask', 'objects'), ('dice', 'objects')):
                if len(losses := sums[name][part]):
                    weight = getattr(self, f'{name}_weight')
                    terms[f'{prefix}{name}'] = Term(losses.sum(), sums[over], weight)
        return {
            **terms,
            'accuracy': Term(sums['correct'][-1], sums['objects'], 0.0),
            'unmatched': Term(sums['unmatched'], sums['objects'], 0.0),
        }

    def evaluate(self, apply: Apply, batch: Batch) -> Sums:
        """Terms of `loss` for the last prediction, and `loss`: the mean over images, each
        normalized by its own segments, so that it does not depend on how images are batched.
        """
        examples = self.mask(batch)
        sums = self._sums(self.outputs(apply, batch), make_targets(self, batch))
        sums = {name: (x.T * examples).T for name, x in sums.items()}
        last = {name: sums[name][:, -1] for name in ('class', 'mask', 'dice', 'correct')}
        weight, objects = (jnp.where(n > 0, n, 1) for n in (sums['weight'], sums['objects']))
        masks = self.mask_weight * last['mask'] + self.dice_weight * last['dice']
        loss = self.class_weight * last['class'] / weight + masks / objects
        count = sums['objects'].sum()
        return {
            'loss': (loss.sum(), examples.sum()),
            'class': (last['class'].sum(), sums['weight'].sum()),
            'mask': (last['mask'].sum(), count),
            'dice': (last['dice'].sum(), count),
            'accuracy': (last['correct'].sum(), count),
            'unmatched': (sums['unmatched'].sum(), count),
        }

    def predict(self, apply: Apply, batch: Batch) -> dict[str, Array]:
        """Return predictions of the task's `kind`.

        Returns, for panoptic and instance segmentation:
          scores: [B K], probability of the class. Panoptic: of each query, 0 where "no segment" is
            more probable. Instance: of the `instances` most probable pairs of query and class;
            multiply it by the mean probability within the mask.
          labels: int32 [B K].
          queries: int32 [B K], row of `masks`; only for instances.
          things: bool [B K], whether the class is a thing, not stuff; only for panoptic
            segmentation.
          masks: [B Q h w], mask logits of the padded image.
          frame, size: int32 [B 2], height and width in pixels of the padded and of the original
            image.
        Returns, for semantic segmentation:
          segmentation: int32 [B H W], class of each pixel of the padded image; for windows, of the
            original or the resized image, see `frame`.
          size: int32 [B 2], height and width in pixels of the image without padding.
        """
        if self.kind == 'semantic':
            return self._classes_of_pixels(apply, batch)
        outputs = apply(*self.inputs(batch))
        size = image_sizes(batch)
        frame = jnp.array(batch['image'].shape[1:3], jnp.int32)
        choose = self._best_classes if self.kind == 'panoptic' else self._instances
        return {
            **choose(jax.nn.softmax(outputs['logits'])),
            'masks': outputs['masks'],
            'frame': jnp.broadcast_to(frame, size.shape),
            'size': size,
        }

    def _classes_of_pixels(self, apply: Apply, batch: Batch) -> dict[str, Array]:
        image = batch['image']  # [B H W C], or windows [B n S S C] of the transform sliding_windows
        outputs = apply(*self.inputs(batch))
        scores = class_scores(outputs, image.shape[-3:-1])
        if image.ndim == 5:
            scores = scores.reshape(*image.shape[:2], *scores.shape[1:])
            return sliding.segmentation(scores, batch, self.frame)
        classes = jnp.where(
            jnp.isfinite(scores).all(1), scores.argmax(1).astype(jnp.int32), sliding.NOT_FINITE
        )
        return {'segmentation': classes, 'size': image_sizes(batch)}

    def _best_classes(self, probs: Float[Array, 'B Q C']) -> dict[str, Array]:
        labels = probs[..., :-1].argmax(-1).astype(jnp.int32)
        none = probs.argmax(-1) == probs.shape[-1] - 1
        return {
            'scores': jnp.where(none, 0, probs[..., :-1].max(-1)),
            'labels': labels,
            'things': ~jnp.isin(labels, jnp.array(self.stuff, jnp.int32)),
        }

    def _instances(self, probs: Float[Array, 'B Q C']) -> dict[str, Array]:
        probs = probs[..., :-1]
        batch, queries, classes = probs.shape
        if not self.instances:
            all_queries = jnp.broadcast_to(jnp.arange(queries, dtype=jnp.int32), (batch, queries))
            labels = probs.argmax(-1).astype(jnp.int32)
            return {'scores': probs.max(-1), 'labels': labels, 'queries': all_queries}
        pairs = probs.reshape(batch, -1)
        scores, best = jax.lax.top_k(pairs, min(self.instances, pairs.shape[-1]))
        best = best.astype(jnp.int32)
        return {'scores': scores, 'labels': best % classes, 'queries': best // classes}

    def match(
        self, outputs: dict, targets: Targets, points: Float[Array, 'B L P 2']
    ) -> Int[Array, 'B L N']:
        """Match segments with queries in each prediction, the last one last; -1 for none."""
        logits, masks = all_predictions(outputs)
        real = jnp.broadcast_to(targets.real[:, None], (*logits.shape[:2], targets.real.shape[1]))
        return match(self.cost(logits, masks, targets, points), real)

    def cost(
        self,
        logits: Float[Array, 'B L Q C'],
        masks: Float[Array, 'B L Q h w'],
        targets: Targets,
        points: Float[Array, 'B L P 2'],
    ) -> Float[Array, 'B L N Q']:
        """Compute the cost of matching segments with queries, comparing masks at `points`."""
        numbers = jnp.arange(1, targets.labels.shape[1] + 1)
        truth = jax.vmap(sample_segments, (0, 0, None))(targets.segments, points, numbers)
        counts = jax.vmap(sample_counts)(targets.counts, points)
        sampled = mask_ops.sample(masks, points)
        labels = jnp.broadcast_to(
            targets.labels[:, None, None], (*truth.shape[:2], 1, len(numbers))
        )
        probs = jnp.take_along_axis(jax.nn.softmax(logits), labels, axis=-1).swapaxes(-1, -2)
        entropy, dice = mask_costs(sampled, truth, counts)
        return self.mask_weight * entropy - self.class_weight * probs + self.dice_weight * dice

    def _sums(self, outputs: dict, targets: Targets) -> dict[str, Float[Array, 'B *L']]:
        """Sum `class`, `mask`, `dice` and `correct` over each image in each of L predictions, the
        last one last; also return the counts `weight`, `objects` and `unmatched`.
        """
        logits, masks = all_predictions(outputs)
        keys = prediction_keys(outputs['keys'], logits.shape[1])
        draw = jax.vmap(jax.vmap(lambda key: jax.random.uniform(key, (self.points, 2))))
        places = self.match(outputs, targets, draw(keys[:, :, 0]))
        labels = jnp.broadcast_to(targets.labels[:, None], places.shape)

        sampling = Sampling(self.points, self.oversample, self.importance)
        fields = targets.segments, targets.counts

        def losses(prediction: tuple[Array, Array, Array]) -> dict[str, Array]:
            return mask_losses(*prediction, fields, sample_truth, sampling)

        # One prediction at a time, since each takes a lot of memory.
        predictions = (masks, places, keys[:, :, 1])
        per_mask = jax.lax.map(losses, jax.tree.map(lambda x: x.swapaxes(0, 1), predictions))
        # The optimal matching has min(objects, queries) pairs, so counts only depend on the batch.
        queries, objects = logits.shape[-2], targets.real.sum(-1)
        num_matched = jnp.minimum(objects, queries)
        return {
            **class_sums(logits, labels, places, self.none_weight),
            **{name: x.swapaxes(0, 1) for name, x in per_mask.items()},
            'weight': num_matched + self.none_weight * (queries - num_matched),
            'objects': objects.astype(jnp.float32),
            'unmatched': (objects - num_matched).astype(jnp.float32),
        }


def make_targets(task: Task, batch: Batch) -> Targets:
    """Build the targets, without padding, crowds, and segments without pixels.

    Raises:
      UserError: if the batch has no numbered and padded segments.
    """
    require_segments(batch)
    segments, real = batch['segments'], batch['object_mask']
    if 'crowd' in batch:
        real &= ~batch['crowd'].astype(bool)

    def is_visible(segments: Array) -> Array:
        empty = jnp.zeros(real.shape[1] + 1, bool)
        return empty.at[jnp.maximum(segments, 0).reshape(-1)].set(True, mode='drop')[1:]

    real &= jax.vmap(is_visible)(segments)
    counts = None if task.count_void else (segments != VOID) & pixel_mask(batch)
    return Targets(batch['labels'], real, segments, counts)


def require_segments(batch: Batch) -> None:
    """Raise UserError if the batch has no numbered and padded segments."""
    if missing := [name for name in ('segments', 'labels', 'object_mask') if name not in batch]:
        raise UserError(
            f'segmentation needs {missing[0]!r}, but the data have {", ".join(batch)}: use a '
            "source with masks, and end the transforms with 'number_masks|pad_objects(100)'"
        )


def image_sizes(batch: Batch) -> Int[Array, 'B 2']:
    """Return height and width in pixels of the images without padding."""
    real = pixel_mask(batch)
    return jnp.stack([real[:, :, 0].sum(-1), real[:, 0].sum(-1)], -1).astype(jnp.int32)


def all_predictions(outputs: dict) -> tuple[Float[Array, 'B L Q C'], Float[Array, 'B L Q h w']]:
    """Stack logits and masks of all predictions, the last one last."""
    last = outputs['logits'][:, None], outputs['masks'][:, None]
    if 'aux_logits' not in outputs:
        return last
    logits = jnp.concatenate([outputs['aux_logits'], last[0]], axis=1)
    return logits, jnp.concatenate([outputs['aux_masks'], last[1]], axis=1)


def sample_truth(
    fields: tuple[Array, Array | None], points: Float[Array, 'P 2'], number: Int[Array, '']
) -> tuple[Float[Array, ' P'], Float[Array, ' P']]:
    """Sample the mask of a segment of one image, and whether its pixels count.

    Args:
      fields: `segments` and `counts` of `Targets`.
      points: Points to sample.
      number: Number of the segment.
    """
    segments, counts = fields
    return sample_segments(segments, points, number[None])[0], sample_counts(counts, points)


def sample_segments(
    segments: Int[Array, 'H W'], points: Float[Array, '*B P 2'], numbers: Int[Array, ' K']
) -> Float[Array, '*B K P']:
    """Interpolate masks of segments bilinearly, without materializing the masks.

    Args:
      segments: Number of the segment at each pixel.
      points: Points to sample, see `ops.masks.corners`.
      numbers: Numbers of the segments to sample.
    """
    at = mask_ops.corners(points, segments.shape)
    same = segments.reshape(-1)[at.pixel][..., None, :] == numbers[:, None]
    return (same * at.weight[..., None, :]).sum(0)


def sample_counts(
    counts: Bool[Array, 'H W'] | None, points: Float[Array, '*B P 2']
) -> Float[Array, '*B P']:
    """1 for points on pixels that count, else 0; all ones if `counts` is None."""
    if counts is None:
        return jnp.ones(points.shape[:-1])
    size = jnp.array(counts.shape[::-1])
    x, y = jnp.moveaxis(jnp.minimum((points * size).astype(jnp.int32), size - 1), -1, 0)
    return counts[y, x].astype(jnp.float32)


def class_scores(outputs: dict, size: tuple[int, int]) -> Float[Array, 'B C H W']:
    """Score each class in each pixel: sum over queries the class's probability times the mask's.

    See MaskFormer, Cheng et al., 2021, arXiv:2107.06278, section 3.4.

    Args:
      outputs: Model outputs.
      size: Height and width in pixels of the model's images.
    """
    classes = jax.nn.softmax(outputs['logits'])[..., :-1]
    inside = jax.nn.sigmoid(mask_ops.resize_bilinear(outputs['masks'], size))
    return jnp.einsum('bqc,bqhw->bchw', classes, inside)
