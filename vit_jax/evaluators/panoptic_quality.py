"""Panoptic quality, PQ, with its factors segmentation quality (SQ) and recognition quality (RQ).

Kirillov et al., 2019, arXiv:1801.00868, section 4; details that the paper does not specify follow
https://cocodataset.org/#panoptic-eval.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np

from vit_jax.array_types import Bool, Float, Int
from vit_jax.errors import UserError
from vit_jax.evaluators import base
from vit_jax.evaluators.base import Arrays, Dataset
from vit_jax.ops import panoptic

NAMES = ('PQ', 'SQ', 'RQ')
KINDS = ('things', 'stuff')
NEEDED = ('masks', 'scores', 'labels', 'things', 'frame', 'size')


class Counts(NamedTuple):
    """Sums over images for each class.

    Attributes:
      iou: Sum over matched pairs of a predicted and a true segment.
      matched: Matched pairs (TP).
      wrong: Predicted segments without a match (FP).
      missed: True segments without a match (FN).
    """

    iou: Float[np.ndarray, ' C']
    matched: Int[np.ndarray, ' C']
    wrong: Int[np.ndarray, ' C']
    missed: Int[np.ndarray, ' C']


class Evaluator(base.Evaluator):
    """PQ, SQ and RQ, 0 to 1, means over the classes that occur; also for things and stuff
    separately if the data have both.

    Segments are compared at the size of the source's images, before any transforms; transforms must
    not crop. Means over no class are omitted.

    Args:
      threshold: Minimum probability of a segment.
      overlap: Minimum share of its pixels that a mask keeps when merging by
        `ops.panoptic.merge_by_overlap`, as in Mask2Former and EoMT; None to merge as in DETR.
    """

    headline = NAMES
    predictions = NEEDED

    def __init__(self, threshold: float = panoptic.THRESHOLD, overlap: float | None = None):
        for name, value in (('threshold', threshold), ('overlap', overlap)):
            if value is not None and not 0 <= value < 1:
                raise UserError(f'{name}={value}: must be in [0, 1)')
        self.threshold, self.overlap = threshold, overlap
        self._info: Any = None
        self.start()

    def open(self, dataset: Dataset, fit: Dataset | None = None) -> None:
        """Raise UserError if the images have no segments."""
        self._source, self._info = dataset.source, dataset.info
        base.require_segments(dataset)

    def start(self) -> None:
        self._counts: list[Counts] = []
        self._finite = True

    def update(self, predictions: Arrays, batch: Arrays) -> None:
        """Add a batch; raise UserError if the task does not predict segments."""
        if missing := [name for name in NEEDED if name not in predictions]:
            raise UserError(
                f'panoptic_quality needs {missing[0]!r}, but the task does not predict it'
            )
        if not base.is_finite(predictions, 'masks', 'scores'):
            self._finite = False
            return
        for row, index in enumerate(batch['index'].tolist()):
            prediction = {name: x[row] for name, x in predictions.items()}
            self._counts.append(self._compare(prediction, self._source.annotations(index)))

    def result(self) -> dict[str, float]:
        if not self._finite:
            return dict.fromkeys(self.names(), math.nan)
        count = self._info.num_classes
        zeros = Counts(np.zeros(count), *np.zeros((3, count), int))
        counts = Counts(*(np.sum(x, axis=0) for x in zip(zeros, *self._counts, strict=True)))
        classes = np.arange(count)
        metrics = quality(counts, classes)
        stuff = np.isin(classes, self._info.stuff)
        if self._has_both_kinds():
            for kind, is_of_kind in zip(KINDS, (~stuff, stuff), strict=True):
                values = quality(counts, classes[is_of_kind])
                metrics |= {f'{name}_{kind}': x for name, x in values.items()}
        return metrics

    def names(self) -> tuple[str, ...]:
        kinds = KINDS if self._info is None or self._has_both_kinds() else ()
        return (*NAMES, *(f'{name}_{kind}' for kind in kinds for name in NAMES))

    def _has_both_kinds(self) -> bool:
        return 0 < len(set(self._info.stuff)) < self._info.num_classes

    def _compare(self, prediction: Arrays, truth: dict[str, Any]) -> Counts:
        numbers, queries = panoptic.from_prediction(
            prediction,
            lambda x: panoptic.resize_numbers(x, truth['size']),
            self.threshold,
            self.overlap,
            truth['size'],
        )
        true_numbers = panoptic.true_numbers(truth).astype(int)
        crowd = truth.get('crowd', np.zeros(len(truth['labels']), bool))
        return compare(
            numbers,
            prediction['labels'][queries],
            true_numbers,
            truth['labels'],
            crowd,
            self._info.num_classes,
        )


def compare(
    predicted: Int[np.ndarray, 'H W'],
    labels: Int[np.ndarray, ' S'],
    true_numbers: Int[np.ndarray, 'H W'],
    true_labels: Int[np.ndarray, ' N'],
    crowd: Bool[np.ndarray, ' N'],
    num_classes: int,
) -> Counts:
    """Compare the predicted and the true segments of one image.

    A pair of the same class with an IoU above 1/2 is a match; a segment has at most one match.
    Unlabeled pixels (VOID) are not part of the union. Crowds are neither matched nor missed. A
    predicted segment without a match is ignored, not wrong, if more than half of it is VOID or
    crowds of its class.

    Args:
      predicted: 1 + index of the predicted segment that a pixel belongs to, 0 for none.
      labels: Classes of the predicted segments.
      true_numbers, true_labels: Same for the true segments.
      crowd: Whether a true segment is a group of objects without separate masks.
      num_classes: Total number of classes.
    """
    shape = len(true_labels) + 1, len(labels) + 1
    pairs = np.bincount(
        (true_numbers * shape[1] + predicted).ravel(), minlength=shape[0] * shape[1]
    )
    pairs = pairs.reshape(shape)
    areas, intersection = pairs.sum(axis=0)[1:], pairs[1:, 1:]
    void = pairs[0, 1:]
    union = pairs.sum(axis=1)[1:, None] + areas - intersection - void
    same_class = true_labels[:, None] == labels
    iou = np.where(same_class & ~crowd[:, None], intersection / np.maximum(union, 1), 0)
    is_match = iou > 0.5
    ignored = void + (intersection * (same_class & crowd[:, None])).sum(axis=0)
    is_wrong = ~is_match.any(axis=0) & (ignored <= 0.5 * areas)
    is_missed = ~is_match.any(axis=1) & ~crowd

    def per_class(classes: np.ndarray, weights: np.ndarray | None = None) -> np.ndarray:
        return np.bincount(classes, weights, minlength=num_classes)

    rows, columns = np.nonzero(is_match)
    return Counts(
        per_class(true_labels[rows], iou[rows, columns]),
        per_class(true_labels[rows]),
        per_class(labels[is_wrong]),
        per_class(true_labels[is_missed]),
    )


def quality(counts: Counts, classes: Int[np.ndarray, ' C']) -> dict[str, float]:
    """Compute PQ, SQ and RQ, means over the given classes that occur; empty if none occurs.

    SQ is the mean IoU of matches, RQ = TP / (TP + FP/2 + FN/2), and PQ = SQ RQ, equation 2.
    """
    iou, matched, unmatched, missed = (x[classes] for x in counts)
    occurs = matched + unmatched + missed > 0
    if not occurs.any():
        return {}
    denominator = matched + 0.5 * unmatched + 0.5 * missed
    sq = iou / np.maximum(matched, 1)
    rq = matched / np.where(occurs, denominator, 1)
    values = (float(x[occurs].mean()) for x in (sq * rq, sq, rq))
    return dict(zip(NAMES, values, strict=True))
