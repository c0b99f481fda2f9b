"""Metrics of images with any number of labels: mean average precision and F1."""

from __future__ import annotations

import math

import numpy as np
from sklearn import metrics

from vit_jax.array_types import Bool, Float
from vit_jax.errors import UserError
from vit_jax.evaluators import base
from vit_jax.evaluators.base import Arrays, Dataset

NAMES = ('mAP', 'f1_micro', 'f1_macro')


class Evaluator(base.Evaluator):
    """`mAP`, the mean over classes of the average precision, and `f1_micro` and `f1_macro`.

    Average precision is the area below the curve of precision by recall, as a sum over thresholds
    without interpolation. Classes without an image are left out of the means. F1 is computed from
    all decisions together (micro), or as the mean over classes (macro).

    Args:
      threshold: Probability from which on a class is predicted, for F1.
      per_class: Whether to add `AP_CLASS` for each class with an image.
    """

    headline = NAMES
    predictions = ('probs',)

    def __init__(self, threshold: float = 0.5, per_class: bool = False):
        if not 0 < threshold < 1:
            raise UserError(f'threshold={threshold}: must be a probability between 0 and 1')
        self._threshold, self._per_class = threshold, per_class
        self.start()

    def open(self, dataset: Dataset, fit: Dataset | None = None) -> None:
        """Raise UserError unless images have several labels."""
        if not dataset.info.multilabel:
            raise UserError(
                f"{dataset.source.title}: its images have one class each: use the task's accuracy, "
                "or the evaluator 'confusion'"
            )
        self._classes = dataset.info.class_names

    def names(self) -> tuple[str, ...]:
        return NAMES

    def start(self) -> None:
        self._probs: list[np.ndarray] = []
        self._labels: list[np.ndarray] = []
        self._finite = True

    def update(self, predictions: Arrays, batch: Arrays) -> None:
        """Add a batch; raise UserError if the task does not predict probabilities of classes."""
        if 'probs' not in predictions:
            raise UserError("several_labels needs 'probs', but the task does not predict them")
        self._finite &= base.is_finite(predictions, 'probs')
        labels = batch['label']
        # A model may have more outputs than the data have classes.
        self._probs.append(predictions['probs'][:, : labels.shape[1]])
        self._labels.append(labels > 0)

    def result(self) -> dict[str, float]:
        probs, labels = np.concatenate(self._probs), np.concatenate(self._labels)
        is_finite = self._finite
        self.start()
        if not is_finite:
            return dict.fromkeys(self.names(), math.nan)
        present = np.flatnonzero(labels.any(axis=0))
        if not present.size:
            return {}
        precisions = average_precisions(probs[:, present], labels[:, present])
        decisions = probs[:, present] >= self._threshold
        result = {
            'mAP': float(precisions.mean()),
            **{
                f'f1_{mean}': float(
                    metrics.f1_score(labels[:, present], decisions, average=mean, zero_division=0)
                )
                for mean in ('micro', 'macro')
            },
        }
        if self._per_class:
            names = self._classes or tuple(map(str, range(labels.shape[1])))
            by_class = zip(present.tolist(), precisions.tolist(), strict=True)
            result |= {f'AP_{names[i]}': precision for i, precision in by_class}
        return result


def average_precisions(
    probs: Float[np.ndarray, 'N C'], labels: Bool[np.ndarray, 'N C']
) -> Float[np.ndarray, ' C']:
    """Compute the average precision of each class; each must have an image."""
    return np.atleast_1d(metrics.average_precision_score(labels, probs, average=None))
