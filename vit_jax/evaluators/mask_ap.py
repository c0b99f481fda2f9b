"""COCO's average precision and recall of masks, computed by pycocotools; see `coco_ap`."""

from __future__ import annotations

from typing import Any

import numpy as np

from vit_jax.errors import UserError
from vit_jax.evaluators import base, coco_ap
from vit_jax.evaluators.base import Arrays, Dataset
from vit_jax.extras import needed_by
from vit_jax.ops import panoptic

EXTRA = coco_ap.EXTRA


class Evaluator(coco_ap.Evaluator):
    """COCO's twelve metrics for masks of things, 0 to 1.

    True objects come from the source, at the size of its images, before any transforms; transforms
    must not crop. Predicted masks may overlap. Predictions on a crowd are ignored; empty masks are
    dropped.

    Args:
      weighted: Whether to multiply the class score of a mask by the mean probability of its pixels,
        as in Mask2Former (arXiv:2112.01527) and EoMT.
    """

    predictions = ('masks', 'scores', 'labels', 'frame', 'size')
    kind = 'segm'
    needed = ('labels',)

    def __init__(self, weighted: bool = True):
        self._weighted = weighted
        super().__init__()

    def open(self, dataset: Dataset, fit: Dataset | None = None) -> None:
        """Index the objects; raise UserError without masks or things, or without pycocotools."""
        base.require_segments(dataset)
        self._stuff = frozenset(dataset.info.stuff)
        if len(self._stuff) == dataset.info.num_classes:
            raise UserError(
                f'{dataset.source.title}: all of its classes are stuff, with at most one segment '
                "per image; use evaluator='mean_iou'"
            )
        super().open(dataset)

    def objects(self, image: int, record: dict[str, Any]) -> list[dict[str, Any]]:
        labels = np.asarray(record['labels'])
        masks = record.get('masks')
        if masks is None:
            masks = panoptic.true_numbers(record) == np.arange(1, len(labels) + 1)[:, None, None]
        is_thing = ~np.isin(labels, list(self._stuff))
        shapes = [{'segmentation': encoded} for encoded in _encode(np.asarray(masks)[is_thing])]
        areas = record.get('areas', np.asarray(masks).sum((1, 2)))[is_thing]
        crowd = record.get('crowd', np.zeros(len(labels), bool))[is_thing]
        return coco_ap.in_coco_format(
            image, {'labels': labels[is_thing], 'crowd': crowd}, shapes, areas
        )

    def update(self, predictions: Arrays, batch: Arrays) -> None:
        """Add a batch; raise UserError if masks, scores or labels are not predicted."""
        self.add(predictions, batch, 'masks')

    def coco_predictions(
        self, image: int, prediction: Arrays, size: tuple[int, int]
    ) -> list[dict[str, Any]]:
        scores, labels = prediction['scores'], prediction['labels']
        queries = prediction.get('queries', np.arange(len(scores)))
        indices = np.flatnonzero((scores > 0) & ~np.isin(labels, list(self._stuff)))
        used, rows = np.unique(queries[indices], return_inverse=True)
        logits = panoptic.mask_logits(prediction, used, size)
        masks = logits > 0
        pixels = masks.sum((1, 2))
        weights = np.ones(len(used))
        if self._weighted:
            probabilities = np.where(masks, panoptic.sigmoid(logits), 0)
            weights = probabilities.sum((1, 2)) / np.maximum(pixels, 1)
        encoded = _encode(masks)
        return [
            {
                'image_id': image,
                'category_id': int(labels[row]),
                'score': float(scores[row] * weights[mask]),
                'segmentation': encoded[mask],
            }
            for row, mask in zip(indices.tolist(), rows.tolist(), strict=True)
            if pixels[mask]
        ]


def _encode(masks: np.ndarray) -> list[dict[str, Any]]:
    """Encode each mask by run lengths."""
    with needed_by("COCO's AP", EXTRA):
        from pycocotools import mask
    if not len(masks):
        return []
    return mask.encode(np.asfortranarray(masks.transpose(1, 2, 0).astype(np.uint8)))
