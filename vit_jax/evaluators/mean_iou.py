"""Mean intersection over union of semantic segmentation.

Everingham et al., 2010, doi:10.1007/s11263-009-0275-4, section 4.1: intersections and unions of
each class are counted over the pixels of all images.
"""

from __future__ import annotations

import math
import re
from typing import Any

import numpy as np

from vit_jax.array_types import Int
from vit_jax.errors import UserError
from vit_jax.evaluators import base
from vit_jax.evaluators.base import Arrays, Dataset
from vit_jax.ops import panoptic

NAMES = ('mIoU', 'pixel_accuracy', 'mean_class_accuracy')
NONE = -1  # pixel without a class


class Evaluator(base.Evaluator):
    """Semantic segmentation metrics.

    `mIoU` is the mean over classes that occur in the truth or in the predictions, `pixel_accuracy`
    the share of correctly classified pixels, and `mean_class_accuracy` its mean over true classes.

    Pixels without a true class are ignored. A pixel predicted to have no class is wrong. Pixels are
    counted in the source's images: a predicted map of a different size is resized to them by
    nearest neighbor.

    Args:
      per_class: Whether to add `IoU_CLASS` for each class that occurs.

    Attributes:
      matrix: int64 [classes, classes + 1], number of pixels by true class (row) and predicted class
        (column); the last column is for no class.
    """

    headline = ('mIoU', 'pixel_accuracy')
    predictions = ('segmentation', 'size')

    def __init__(self, per_class: bool = False):
        self._per_class = per_class
        self.matrix = np.zeros((0, 1), np.int64)
        self._finite = True

    def open(self, dataset: Dataset, fit: Dataset | None = None) -> None:
        """Raise UserError if the images have no segments with classes."""
        base.require_segments(dataset)
        self._source, self._names = dataset.source, dataset.info.class_names
        self.matrix = np.zeros((dataset.info.num_classes, dataset.info.num_classes + 1), np.int64)
        self.start()

    def start(self) -> None:
        self.matrix = np.zeros_like(self.matrix)
        self._finite = True

    def update(self, predictions: Arrays, batch: Arrays) -> None:
        """Add a batch; raise UserError if the task does not predict classes of pixels."""
        if missing := {'segmentation', 'size'} - predictions.keys():
            raise UserError(f'mean_iou needs {min(missing)!r}, but the task does not predict it')
        maps = predictions['segmentation']
        if not base.is_finite(predictions, 'segmentation') or (maps < NONE).any():
            self._finite = False
            return
        for index, segmentation, size in zip(
            batch['index'].tolist(), maps, predictions['size'].tolist(), strict=True
        ):
            if any(side > pixels for side, pixels in zip(size, segmentation.shape, strict=True)):
                raise UserError(
                    f'the predicted map has {segmentation.shape[1]} x {segmentation.shape[0]} '
                    f'pixels, but the image {size[1]} x {size[0]}: enlarge config.task.frame'
                )
            truth = self._source.annotations(index)
            real = segmentation[: size[0], : size[1]].astype(np.int64)
            self.matrix += count_pixels(
                class_map(truth), panoptic.resize_numbers(real, truth['size']), len(self.matrix)
            )

    def result(self) -> dict[str, float]:
        if not self._finite:
            return dict.fromkeys(self.names(), math.nan)
        true, correct = self.matrix.sum(axis=1), self.matrix.diagonal()
        union = true + self.matrix[:, :-1].sum(axis=0) - correct
        occurs, labeled = union > 0, true > 0
        if not labeled.any():  # all pixels are ignored
            return {}
        iou = correct / np.maximum(union, 1)
        values = (
            iou[occurs].mean(),
            correct.sum() / true.sum(),
            (correct[labeled] / true[labeled]).mean(),
        )
        metrics = dict(zip(NAMES, map(float, values), strict=True))
        if self._per_class:
            classes = np.flatnonzero(occurs).tolist()
            metrics |= {self._name(label): float(iou[label]) for label in classes}
        return metrics

    def names(self) -> tuple[str, ...]:
        return NAMES

    def _name(self, label: int) -> str:
        return 'IoU_' + re.sub(r'\W+', '_', self._names[label]).strip('_')


def class_map(truth: dict[str, Any]) -> Int[np.ndarray, 'H W']:
    """Return the class of each pixel, NONE outside of segments."""
    classes = np.append(NONE, np.asarray(truth['labels'], np.int64))
    return classes[panoptic.true_numbers(truth)]


def count_pixels(
    truth: Int[np.ndarray, 'H W'], predicted_classes: Int[np.ndarray, 'H W'], num_classes: int
) -> Int[np.ndarray, '{num_classes} {num_classes}+1']:
    """Count pixels by true class (row) and predicted class (column, the last one for none).

    Args:
      truth: True classes; pixels with NONE do not count.
      predicted_classes: Predicted classes; NONE and classes that the data do not have count as
        none.
      num_classes: Total number of classes.
    """
    is_labeled = truth != NONE
    is_class = (predicted_classes >= 0) & (predicted_classes < num_classes)
    predicted = np.where(is_class, predicted_classes, num_classes)[is_labeled]
    cells = truth[is_labeled] * (num_classes + 1) + predicted
    return np.bincount(cells, minlength=num_classes * (num_classes + 1)).reshape(num_classes, -1)
