"""Instance segmentation by a detector with several groups of queries in training.

RF-DETR, Robinson et al., 2025, arXiv:2511.09554: the task `detect_groups`, with masks that are
compared at sampled points as in Mask2Former (arXiv:2112.01527).
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from vit_jax.array_types import Float, Int
from vit_jax.errors import UserError
from vit_jax.ops import masks as mask_ops
from vit_jax.ops.terms import Term
from vit_jax.tasks import detect_groups
from vit_jax.tasks._mask_points import Sampling, mask_costs, mask_losses, prediction_keys
from vit_jax.tasks.base import Apply, Batch, Sums
from vit_jax.tasks.detect import Targets, make_targets
from vit_jax.tasks.segment import image_sizes
from vit_jax.tasks.segment_panoptic import require_segments


@dataclasses.dataclass(frozen=True)
class Task(detect_groups.Task):
    """Predict boxes, classes and masks of objects.

    Attributes:
      cells_per_point: Mask logits for each point where masks are compared; there are at least as
        many points as rows of a mask.
      oversample: Number of random points, relative to the number of uncertain points to choose.
      importance: Share of the loss's points that are chosen by uncertainty.
      mask_cost, dice_cost: Weights of binary cross entropy and dice loss in the cost of matching.
      mask_weight, dice_weight: Their weights in the loss.

    For the other attributes see the task `detect_groups`.
    """

    cells_per_point: int = 16
    oversample: float = 3.0
    importance: float = 0.75
    mask_cost: float = 5.0
    dice_cost: float = 5.0
    mask_weight: float = 5.0
    dice_weight: float = 5.0

    rngs = ('dropout', 'points')

    def __post_init__(self) -> None:
        self.require('cells_per_point', self.cells_per_point >= 1, 'at least 1')
        self.require('oversample', self.oversample >= 1, 'at least 1')
        self.require('importance', 0 <= self.importance <= 1, 'in [0, 1]')
        super().__post_init__()

    def outputs(self, apply: Apply, batch: Batch) -> dict[str, Any]:
        """Compute the model's outputs, and `keys`, uint32 [B 2]: key data of random points."""
        keys = apply(len(batch['image']), method='example_keys')
        return {**self._detect(apply, batch), 'keys': jax.random.key_data(keys)}

    def _detect(self, apply: Apply, batch: Batch) -> dict[str, Any]:
        """Compute the model's outputs; raise UserError if it has no masks."""
        outputs = super().outputs(apply, batch)
        if 'mask_maps' not in outputs:
            raise UserError(
                'the task segment_groups needs a model with masks: set config.model.masks.stride, '
                'such as 4'
            )
        return outputs

    def loss(self, outputs: dict, batch: Batch) -> dict[str, Term]:
        """The terms of detection, and of each stage the binary cross entropy `mask` and the `dice`
        loss of matched objects, averaged over objects.

        Padding counts as outside of all objects, as in the authors' code.
        """
        targets = make_targets(batch)
        places, sums = self.match_masks(outputs, targets, require_segments(batch))
        blocks = self.blocks(outputs)
        count = blocks.groups * targets.real.sum()
        terms = self.set_terms(outputs, targets, places)
        for prefix, part in blocks.stages.items():
            for name, x in sums.items():
                weight = getattr(self, f'{name}_weight')
                terms[f'{prefix}{name}'] = Term(x[:, part].sum(), count, weight)
        return terms

    def evaluate(self, apply: Apply, batch: Batch) -> Sums:
        """Terms of `loss` for the last block, and `loss` as in detection."""
        outputs, targets = self.outputs(apply, batch), make_targets(batch)
        places, sums = self.match_masks(outputs, targets, require_segments(batch))
        examples, blocks = self.mask(batch), self.blocks(outputs)
        sums = {name: (x.T * examples).T for name, x in sums.items()}
        means = self.set_means(outputs, targets, places, examples)
        per_image = self.mask_weight * sums['mask'] + self.dice_weight * sums['dice']
        per_image = per_image.sum(1) / targets.real.sum(-1).clip(1)
        loss, count = means['loss']
        final = blocks.stages['']
        return {
            **means,
            'loss': (loss + per_image.sum() / blocks.groups, count),
            **{name: (x[:, final].sum(), means['box'][1]) for name, x in sums.items()},
        }

    def predict(self, apply: Apply, batch: Batch) -> dict[str, Array]:
        """Predict K pairs of a query and a class as in detection, with the masks of all queries.

        Returns:
          scores, labels, boxes: see `detect`; queries: int32 [B K], rows of `masks`.
          masks: [B Q h w], logits of the pixels of the padded image.
          frame, size: int32 [B 2], height and width in pixels of the padded and of the original
            image.
        """
        outputs, size = self._detect(apply, batch), image_sizes(batch)
        frame = jnp.array(batch['image'].shape[1:3], jnp.int32)
        return {
            **self.to_predictions(outputs),
            'masks': outputs['masks'],
            'frame': jnp.broadcast_to(frame, size.shape),
            'size': size,
        }

    def match_masks(
        self, outputs: dict, targets: Targets, segments: Int[Array, 'B H W']
    ) -> tuple[Int[Array, 'B L N'], dict[str, Float[Array, 'B L']]]:
        """Match objects with queries in each block, and sum the losses of the matched masks.

        All groups of a stage are compared at the same points in the cost.

        Returns:
          The query of each object, -1 for none; and `mask` and `dice` summed over the objects.
        """
        queries, maps = outputs['mask_queries'], outputs['mask_maps']
        (batch, stages, height, width, _), groups = maps.shape, outputs['first_logits'].shape[1]
        count = max(height, height * width // self.cells_per_point)
        keys = prediction_keys(outputs['keys'], stages)

        draw = jax.vmap(jax.vmap(lambda key: jax.random.uniform(key, (count, 2))))
        costs = self._costs(queries, maps, segments, draw(keys[:, :, 0]), targets)
        costs = costs.reshape(*costs.shape[:3], groups, -1).swapaxes(2, 3)
        costs = jax.lax.stop_gradient(costs.reshape(batch, -1, *costs.shape[3:]))
        places = self.match(outputs, targets, costs)

        def losses(stage: tuple[Array, Array, Array, Array]) -> dict[str, Array]:
            return self._losses(*stage, segments, count)

        # One stage at a time, since each takes a lot of memory.
        places_of = places.reshape(batch, stages, groups, -1)
        queries = queries.reshape(batch, stages, groups, -1, queries.shape[-1])
        each = jax.tree.map(lambda x: x.swapaxes(0, 1), (queries, maps, places_of, keys[:, :, 1]))
        sums = jax.lax.map(losses, each)  # [S B G]
        return places, {k: x.swapaxes(0, 1).reshape(batch, -1) for k, x in sums.items()}

    def _costs(
        self,
        queries: Float[Array, 'B S Q K'],
        maps: Float[Array, 'B S h w K'],
        segments: Int[Array, 'B H W'],
        points: Float[Array, 'B S P 2'],
        targets: Targets,
    ) -> Float[Array, 'B S N Q']:
        """Compute the cost of the masks of each object and query of all groups."""
        numbers = jnp.arange(1, targets.labels.shape[1] + 1)
        truth = jax.vmap(sample_nearest)(segments, points)[:, :, None] == numbers[:, None]
        at = mask_ops.sample(jnp.moveaxis(maps, -1, -3), points)
        sampled = jnp.einsum('bsqk,bskp->bsqp', queries, at, preferred_element_type=jnp.float32)
        counts = jnp.ones(points.shape[:-1])
        entropy, dice = mask_costs(sampled, truth.astype(jnp.float32), counts)
        return self.mask_cost * entropy + self.dice_cost * dice

    def _losses(
        self,
        queries: Float[Array, 'B G Q K'],
        maps: Float[Array, 'B h w K'],
        places: Int[Array, 'B G N'],
        keys: Array,
        segments: Int[Array, 'B H W'],
        count: int,
    ) -> dict[str, Float[Array, 'B G']]:
        """Sum the losses of the matched masks of a stage."""
        batch, groups, objects = places.shape
        matched = jnp.take_along_axis(queries, places.clip(0)[..., None], axis=2)
        masks = mask_ops.from_features(matched.reshape(batch, groups * objects, -1), maps)
        masks = masks.reshape(batch * groups, objects, *masks.shape[2:])
        rows = jnp.where(places >= 0, jnp.arange(objects), -1).reshape(-1, objects)
        keys = jax.vmap(lambda key: jax.random.split(key, groups))(keys).reshape(-1)
        truth = jnp.repeat(segments, groups, axis=0)
        sampling = Sampling(count, self.oversample, self.importance)
        sums = mask_losses(masks, rows, keys, truth, _sample_mask, sampling)
        return {name: x.reshape(batch, groups) for name, x in sums.items()}


def _sample_mask(
    segments: Int[Array, 'H W'], points: Float[Array, 'P 2'], number: Int[Array, '']
) -> tuple[Float[Array, ' P'], Float[Array, ' P']]:
    inside = (sample_nearest(segments, points) == number).astype(jnp.float32)
    return inside, jnp.ones_like(inside)


def sample_nearest(
    segments: Int[Array, 'H W'], points: Float[Array, '*B P 2']
) -> Int[Array, '*B P']:
    """Return the number of the segment at each point."""
    size = jnp.array(segments.shape[::-1])
    x, y = jnp.moveaxis(jnp.minimum((points * size).astype(jnp.int32), size - 1), -1, 0)
    return segments[y, x]
