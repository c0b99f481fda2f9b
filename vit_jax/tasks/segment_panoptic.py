"""Panoptic segmentation with a detector: detection losses plus mask losses.

Carion et al., 2020, arXiv:2005.12872, section 4.4.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from vit_jax.array_types import Bool, Float, Int
from vit_jax.errors import UserError
from vit_jax.ops import masks as mask_ops
from vit_jax.ops.terms import Term
from vit_jax.tasks import detect
from vit_jax.tasks.base import Apply, Batch, Sums
from vit_jax.tasks.detect import make_targets, pixel_mask


@dataclasses.dataclass(frozen=True)
class Task(detect.Task):
    """Predict boxes, classes and masks of things and stuff.

    Attributes:
      mask_weight, dice_weight: Weights of focal and dice loss in the loss.
      stuff: The classes with at most one segment in an image, such as sky.

    For the other attributes see the task `detect`.
    """

    mask_weight: float = 1.0
    dice_weight: float = 1.0
    stuff: tuple[int, ...] = ()

    def loss(self, outputs: dict, batch: Batch) -> dict[str, Term]:
        """Detection terms, and the focal loss `mask` and the `dice` loss of matched objects in the
        decoder's last block, averaged over objects.

        Padding does not count. The authors' code counts it; without padding the losses agree.
        """
        targets, segments = make_targets(batch), require_segments(batch)
        places, real = self.match(outputs, targets), pixel_mask(batch)
        sums = mask_sums(outputs['masks'], places[:, -1], segments, real)
        count = targets.real.sum()
        return {
            **self.set_terms(outputs, targets, places),
            'mask': Term(sums['mask'].sum(), count, self.mask_weight),
            'dice': Term(sums['dice'].sum(), count, self.dice_weight),
        }

    def evaluate(self, apply: Apply, batch: Batch) -> Sums:
        """Terms of `loss` for the last block, and `loss` as in detection."""
        outputs, targets = self.outputs(apply, batch), make_targets(batch)
        places, real = self.match(outputs, targets), pixel_mask(batch)
        mask = self.mask(batch)
        means = self.set_means(outputs, targets, places, mask)
        sums = mask_sums(outputs['masks'], places[:, -1], require_segments(batch), real)
        sums = {name: x * mask for name, x in sums.items()}
        per_image = self.mask_weight * sums['mask'] + self.dice_weight * sums['dice']
        loss, examples = means['loss']
        count = means['box'][1]
        return {
            **means,
            'loss': (loss + (per_image / targets.real.sum(-1).clip(1)).sum(), examples),
            'mask': (sums['mask'].sum(), count),
            'dice': (sums['dice'].sum(), count),
        }

    def predict(self, apply: Apply, batch: Batch) -> dict[str, jax.Array]:
        """Return predictions that `vit_jax.ops.panoptic.merge_segments` turns into segments.

        Returns:
          scores: [B Q], the probability of the class; 0 where "no object" is more probable.
          labels: int32 [B Q].
          boxes: [B Q 4] by corners, shares of the sides of the real image.
          things: bool [B Q], whether the class is a thing, not stuff.
          masks: [B Q h w], logits of the pixels of the padded image.
          frame, size: int32 [B 2], height and width in pixels of the padded and of the real image.
        """
        outputs = self.outputs(apply, batch)
        detections = self.to_predictions(outputs)
        none = outputs['logits'].argmax(-1) == outputs['logits'].shape[-1] - 1
        mask = pixel_mask(batch)
        frame = jnp.broadcast_to(jnp.array(mask.shape[1:]), (len(mask), 2))
        return {
            **detections,
            'scores': jnp.where(none, 0, detections['scores']),
            'things': ~jnp.isin(detections['labels'], jnp.array(self.stuff, jnp.int32)),
            'masks': outputs['masks'],
            'frame': frame.astype(jnp.int32),
            'size': jnp.stack([mask[:, :, 0].sum(-1), mask[:, 0].sum(-1)], -1).astype(jnp.int32),
        }


def mask_sums(
    masks: Float[Array, 'B Q h w'],
    places: Int[Array, 'B N'],
    segments: Int[Array, 'B H W'],
    real: Bool[Array, 'B H W'],
) -> dict[str, Float[Array, ' B']]:
    """Sum the focal and dice losses of matched masks over each image.

    Args:
      masks: Mask logits of each query, at any size.
      places: Query index of each object, -1 for none.
      segments: See `require_segments`.
      real: False for padding.
    """
    matched = jnp.take_along_axis(masks, places.clip(0)[..., None, None], axis=1)
    logits = mask_ops.resize_bilinear(matched, segments.shape[1:])
    truth = mask_ops.from_segments(segments, places.shape[1])
    losses = {
        'mask': mask_ops.focal_loss(logits, truth, real[:, None]),
        'dice': mask_ops.dice_loss(logits, truth, real[:, None]),
    }
    return {name: (x * (places >= 0)).sum(-1) for name, x in losses.items()}


def require_segments(batch: dict[str, Any]) -> Int[Array, 'B H W']:
    """Return 1 + the row of the object that each pixel belongs to, 0 for none.

    Raises:
      UserError: if the batch has no segments.
    """
    if 'segments' not in batch:
        raise UserError(
            f"panoptic segmentation needs 'segments', the data have {', '.join(batch)}: take a "
            "source with masks, and let the transforms end in 'number_masks|pad_objects(100)'"
        )
    return batch['segments']
