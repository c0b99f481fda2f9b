"""Mean intersection over union of the classes of pixels, over all pixels of a split.

Everingham et al., 2010, doi:10.1007/s11263-009-0275-4, section 4.1: of each class the pixels are
counted that are of the class and predicted as it, and those that are either, in all images
together.
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
NONE = -1  # a pixel of no class


class Evaluator(base.Evaluator):
    """`mIoU`, the mean over the classes that occur in the truth or in the predictions;
    `pixel_accuracy`, the share of pixels whose class is right; and `mean_class_accuracy`, the mean
    over true classes of that share.

    Pixels without a true class are ignored. A pixel that is predicted to have none is wrong. Pixels
    are those of the source's images: a predicted map of another size is resized, each pixel to its
    nearest.

    Args:
      per_class: also give `IoU_CLASS` for every class that occurs.

    Attributes:
      matrix: int64 [classes, classes + 1], numbers of pixels of a pass by true class (row) and
        predicted class (column), the last one for none.
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
        """Add a batch; raise UserError if the task predicts no classes of pixels."""
        if missing := {'segmentation', 'size'} - predictions.keys():
            raise UserError(f'classes of pixels are compared, the task predicts no {min(missing)}')
        maps = predictions['segmentation']
        if not base.is_finite(predictions, 'segmentation') or (maps < NONE).any():
            self._finite = False
            return
        for index, found, size in zip(
            batch['index'].tolist(), maps, predictions['size'].tolist(), strict=True
        ):
            if any(side > pixels for side, pixels in zip(size, found.shape, strict=True)):
                raise UserError(
                    f'the predicted map has {found.shape[1]} x {found.shape[0]} pixels, the image '
                    f'{size[1]} x {size[0]}: enlarge the frame of the task'
                )
            truth = self._source.annotations(index)
            real = found[: size[0], : size[1]].astype(np.int64)
            self.matrix += count_pixels(
                class_map(truth), panoptic.resize_numbers(real, truth['size']), len(self.matrix)
            )

    def result(self) -> dict[str, float]:
        if not self._finite:
            return dict.fromkeys(self.names(), math.nan)
        true, right = self.matrix.sum(axis=1), self.matrix.diagonal()
        union = true + self.matrix[:, :-1].sum(axis=0) - right
        occurs, labeled = union > 0, true > 0
        if not labeled.any():  # every pixel is ignored
            return {}
        iou = right / np.maximum(union, 1)
        values = (
            iou[occurs].mean(),
            right.sum() / true.sum(),
            (right[labeled] / true[labeled]).mean(),
        )
        found = dict(zip(NAMES, map(float, values), strict=True))
        if self._per_class:
            chosen = np.flatnonzero(occurs).tolist()
            found |= {self._name(label): float(iou[label]) for label in chosen}
        return found

    def names(self) -> tuple[str, ...]:
        return NAMES

    def _name(self, label: int) -> str:
        return 'IoU_' + re.sub(r'\W+', '_', self._names[label]).strip('_')


def class_map(truth: dict[str, Any]) -> Int[np.ndarray, 'H W']:
    """The class of each pixel, NONE where it is in no segment."""
    classes = np.append(NONE, np.asarray(truth['labels'], np.int64))
    return classes[panoptic.true_numbers(truth)]


def count_pixels(
    truth: Int[np.ndarray, 'H W'], found: Int[np.ndarray, 'H W'], num_classes: int
) -> Int[np.ndarray, '{num_classes} {num_classes}+1']:
    """Count pixels by true class (row) and predicted class (column, the last one for none).

    Args:
      truth: classes; pixels of NONE do not count.
      found: classes; NONE, or a class that the data do not have, counts as none.
      num_classes: total number of classes.
    """
    known = truth != NONE
    predicted = np.where((found >= 0) & (found < num_classes), found, num_classes)[known]
    cells = truth[known] * (num_classes + 1) + predicted
    return np.bincount(cells, minlength=num_classes * (num_classes + 1)).reshape(num_classes, -1)
