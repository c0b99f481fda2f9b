"""COCO's average precision and recall of boxes, computed by pycocotools.

Lin et al., 2014, arXiv:1405.0312; definitions: https://cocodataset.org/#detection-eval. AP is the
mean over ten IoU thresholds from 0.50 to 0.95 and over the classes that occur.
"""

from __future__ import annotations

import contextlib
import io
import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from vit_jax.array_types import Float, Int
from vit_jax.errors import UserError
from vit_jax.evaluators import base
from vit_jax.evaluators.base import Arrays, Dataset
from vit_jax.extras import needed_by

EXTRA = 'detection'
SIZES = {'small': (0, 32**2), 'medium': (32**2, 96**2), 'large': (96**2, np.inf)}  # areas, pixels
# Order of pycocotools.
METRICS = (
    *('AP', 'AP50', 'AP75', 'AP_small', 'AP_medium', 'AP_large'),
    *('AR_1', 'AR_10', 'AR_100', 'AR_small', 'AR_medium', 'AR_large'),
)
MAX_PREDICTIONS = 100  # per image, with the highest scores


class Evaluator(base.Evaluator):
    """COCO's twelve metrics, 0 to 1; sizes without objects are omitted.

    True objects come from the source, at the size of its images, before any transforms. Transforms
    must not crop, since boxes are predicted relative to the sides of the image. Predictions on a
    crowd are ignored.
    """

    headline = ('AP', 'AP50', 'AP75')
    predictions: tuple[str, ...] = ('boxes', 'scores', 'labels')
    kind = 'bbox'  # IoU type of pycocotools
    precision: np.ndarray | None = None  # [thresholds, recalls, classes] of the last result
    needed: tuple[str, ...] = ('boxes', 'labels')  # fields of the truth

    def __init__(self) -> None:
        self._truth: Any = None
        self._sizes: dict[int, tuple[int, int]] = {}
        self.start()

    def open(self, dataset: Dataset, fit: Dataset | None = None) -> None:
        """Index the true objects; raise UserError if there are none, or pycocotools is missing."""
        source = dataset.source
        objects: list[dict[str, Any]] = []
        self._sizes = {}
        for i in range(len(source)):
            record = source.annotations(i)
            if not record:  # a broken record, which is never predicted
                continue
            if missing := set(self.needed) - record.keys():
                raise UserError(
                    f'{source.title}: detection needs {min(missing)!r}, but the records have only '
                    f'{", ".join(record)}'
                )
            self._sizes[i] = record['size']
            objects += self.objects(i, record)
        classes = [{'id': c} for c in range(dataset.info.num_classes)]
        images = [
            {'id': i, 'height': height, 'width': width}
            for i, (height, width) in self._sizes.items()
        ]
        self._truth = _index(
            images, [{**row, 'id': i + 1} for i, row in enumerate(objects)], classes
        )

    def start(self) -> None:
        self._predictions: list[dict[str, Any]] = []
        self._images: list[int] = []
        self._finite = True

    def update(self, predictions: Arrays, batch: Arrays) -> None:
        """Add a batch; raise UserError if boxes, scores or labels are not predicted."""
        self.add(predictions, batch, 'boxes')

    def add(self, predictions: Arrays, batch: Arrays, noun: str) -> None:
        """Add a batch with finite predictions of all required arrays."""
        if missing := set(self.predictions) - predictions.keys():
            raise UserError(
                f'AP of {noun} needs {min(missing)!r}, but the task does not predict it'
            )
        if not base.is_finite(predictions, self.predictions[0], 'scores'):
            self._finite = False
            return
        for row, index in enumerate(batch['index'].tolist()):
            prediction = {name: x[row] for name, x in predictions.items()}
            self._predictions += self.coco_predictions(index, prediction, self._sizes[index])
            self._images.append(index)

    def objects(self, image: int, record: dict[str, Any]) -> list[dict[str, Any]]:
        """Convert the true objects of an image to COCO's format."""
        corners = np.asarray(record['boxes'], np.float64)
        sides = corners[:, 2:] - corners[:, :2]
        areas = record.get('areas', sides.prod(axis=1))
        shapes = [{'bbox': box} for box in np.concatenate([corners[:, :2], sides], 1).tolist()]
        return in_coco_format(image, record, shapes, areas)

    def coco_predictions(
        self, image: int, prediction: Arrays, size: tuple[int, int]
    ) -> list[dict[str, Any]]:
        """Convert the predicted objects of an image of (height, width) to COCO's format."""
        height, width = size
        corners = prediction['boxes'].astype(np.float64) * [width, height, width, height]
        boxes = np.concatenate([corners[:, :2], corners[:, 2:] - corners[:, :2]], 1)
        rows = (boxes, prediction['scores'], prediction['labels'])
        return [
            {'image_id': image, 'category_id': label, 'score': score, 'bbox': box}
            for box, score, label in zip(*(x.tolist() for x in rows), strict=True)
        ]

    def result(self) -> dict[str, float]:
        self.precision = None
        if not self._finite:  # pycocotools counts NaN boxes as matches
            return dict.fromkeys(self.names(), math.nan)
        with _quiet():
            coco_eval = self._compare(self._predictions)
            coco_eval.params.maxDets = [1, 10, MAX_PREDICTIONS]
            coco_eval.evaluate()
            coco_eval.accumulate()
            coco_eval.summarize()
        self.precision = coco_eval.eval['precision'][..., 0, -1]  # all areas, most predictions
        values = zip(METRICS, coco_eval.stats.tolist(), strict=True)
        # pycocotools reports -1 for an empty mean.
        return {name: value for name, value in values if value >= 0}

    def confusion(self, threshold: float) -> Int[np.ndarray, 'C+1 C+1']:
        """Count objects by true class (row) and predicted class (column); the last is background.

        Of the last pass. In the order of their scores, predictions of any class take the free
        object with the highest IoU, at least 0.5. Predictions on a crowd do not count.

        Args:
          threshold: Minimum score of a prediction.
        """
        background = len(self._truth.dataset['categories'])
        matrix = np.zeros((background + 1, background + 1), np.int64)
        if not self._finite:
            return matrix
        chosen = [
            row
            for row in self._predictions
            if row['score'] >= threshold and row['category_id'] < background
        ]
        with _quiet():
            coco_eval = self._compare(chosen)
            coco_eval.params.useCats = 0
            coco_eval.params.iouThrs = np.array([0.5])
            coco_eval.params.areaRng = coco_eval.params.areaRng[:1]  # all
            coco_eval.evaluate()
        true, predicted = coco_eval.cocoGt.anns, coco_eval.cocoDt.anns
        for image in filter(None, coco_eval.evalImgs):
            (owners,), (takers,) = image['dtMatches'].astype(int), image['gtMatches']
            for one, owner, is_ignored in zip(
                image['dtIds'], owners.tolist(), image['dtIgnore'][0], strict=True
            ):
                row = true[owner]['category_id'] if owner else background
                matrix[row, predicted[one]['category_id']] += not is_ignored
            missed = (takers == 0) & (image['gtIgnore'] == 0)
            for one in np.asarray(image['gtIds'])[missed].tolist():
                matrix[true[one]['category_id'], background] += 1
        return matrix

    def curves(self) -> Float[np.ndarray, 'R C']:
        """Return the precision of each class at R recalls, at IoU 0.5; -1 for undefined."""
        if self.precision is None:
            return np.full((101, len(self._truth.dataset['categories'])), -1.0)
        return self.precision[0]

    def _compare(self, predictions: list[dict[str, Any]]) -> Any:
        """Return pycocotools' evaluation of predictions on the images of the last pass."""
        from pycocotools.cocoeval import COCOeval

        # pycocotools does not accept an empty list.
        loaded = self._truth.loadRes(predictions) if predictions else _index([], [], [])
        coco_eval = COCOeval(self._truth, loaded, self.kind)
        coco_eval.params.imgIds = sorted(self._images)
        return coco_eval

    def rows(
        self, names: Sequence[str], matrix: Int[np.ndarray, 'C+1 C+1']
    ) -> list[dict[str, Any]]:
        """Return a row per class: `class`, `objects` (without crowds), `AP` and `AP50`, and of the
        matrix of `confusion` `precision` and `recall`.
        """
        labels = [
            row['category_id'] for row in self._truth.dataset['annotations'] if not row['iscrowd']
        ]
        counts = np.bincount(np.asarray(labels, int), minlength=len(names)).tolist()
        table = []
        for label, name in enumerate(names):
            row: dict[str, Any] = {'class': name, 'objects': counts[label]}
            curves = np.full((1, 1), -1.0) if self.precision is None else self.precision[..., label]
            for metric, curve in {'AP': curves, 'AP50': curves[:1]}.items():
                mean = float(curve.mean())
                row[metric] = mean if mean >= 0 else None  # -1: no objects
            correct = int(matrix[label, label])
            for metric, line in {'precision': matrix[:, label], 'recall': matrix[label]}.items():
                count = int(line.sum())
                row[metric] = correct / count if count else None
            table.append(row)
        return table

    def names(self) -> tuple[str, ...]:
        if self._truth is None:
            return METRICS
        areas = [row['area'] for row in self._truth.dataset['annotations'] if not row['iscrowd']]
        absent = {
            name
            for name, (low, high) in SIZES.items()
            if not any(low <= area <= high for area in areas)
        }
        return tuple(name for name in METRICS if name.partition('_')[2] not in absent)


def in_coco_format(
    image: int, record: dict[str, Any], shapes: list[dict[str, Any]], areas: np.ndarray
) -> list[dict[str, Any]]:
    """Convert the objects of an image to COCO's format, adding the keys of `shapes`."""
    labels = np.asarray(record['labels'])
    crowd = np.asarray(record.get('crowd', np.zeros(len(labels), bool)))
    rows = (np.asarray(x).tolist() for x in (areas, crowd, labels))
    return [
        {
            'image_id': image,
            **shape,
            'area': float(area),
            'iscrowd': int(is_crowd),
            'category_id': int(label),
        }
        for shape, area, is_crowd, label in zip(shapes, *rows, strict=True)
    ]


def _index(images: list[Any], annotations: list[Any], categories: list[Any]) -> Any:
    with needed_by("COCO's AP", EXTRA):
        from pycocotools.coco import COCO
    coco = COCO()
    coco.dataset = {
        'info': {},
        'images': images,
        'annotations': annotations,
        'categories': categories,
    }
    with _quiet():
        coco.createIndex()
    return coco


def _quiet() -> contextlib.redirect_stdout[Any]:
    """Silence the progress output of pycocotools."""
    return contextlib.redirect_stdout(io.StringIO())
