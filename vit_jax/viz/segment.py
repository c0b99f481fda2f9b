"""Visualization of mask classification: each pixel in the color of its segment."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np

from vit_jax.array_types import Bool, Int
from vit_jax.ops import panoptic
from vit_jax.ops.panoptic import Segments
from vit_jax.viz import detect, segment_panoptic
from vit_jax.viz.photo import Context, Fields, Photo
from vit_jax.viz.segment_panoptic import to_file_pixels

OVERLAP = 0.8  # minimum share of its pixels that a segment keeps


class Viz(segment_panoptic.Viz):
    """Show segments, instances or classes in colors, depending on the task's kind."""

    threshold = 0.8
    weighted: bool = True  # whether scores of instances are multiplied by their masks' certainty

    def adapt_task(self, task: Any, context: Context) -> Any:
        """Remove the size of the data's largest image from the task, since files may be larger."""
        return dataclasses.replace(task, frame=None)

    def rows(self, prediction: Fields, photo: Photo, context: Context) -> list[dict[str, Any]]:
        """Return the segments, sorted by area, see `segment_panoptic.Viz.rows`.

        Instances may overlap; a box is the predicted one if the model predicts boxes.
        """
        if 'segmentation' in prediction or 'queries' not in prediction:
            return super().rows(prediction, photo, context)
        threshold = context.flags.threshold
        masks, indices, instances = _find_instances(prediction, threshold, self.weighted)
        _, height, width = masks.shape
        places = to_file_pixels(np.arange(height * width).reshape(height, width), photo)
        rows: list[dict[str, Any]] = []
        for mask, index in zip(masks[::-1], indices[::-1].tolist(), strict=True):
            pixels = np.append(mask, False)[places]  # -1, outside of the model's view, is the last
            if pixels.any():
                row = segment_panoptic.segment_row(len(rows) + 1, pixels, index, instances, context)
                rows.append(row | _predicted_box(prediction, index, photo))
        return sorted(rows, key=lambda row: -row['area'])

    def labels(self, prediction: Fields, queries: np.ndarray, context: Context) -> list[str]:
        """Return the label of each segment: its class, and its score if it has one."""
        if 'segmentation' in prediction:
            return [context.class_name(label) for label in prediction['labels'][queries].tolist()]
        return super().labels(prediction, queries, context)

    def note(self, prediction: Fields, context: Context) -> str:
        """Return the line for an image without segments."""
        if 'segmentation' in prediction:
            return 'no pixel has a class'
        return super().note(prediction, context)

    def find_segments(
        self, prediction: Fields, photo: Photo, context: Context
    ) -> tuple[Segments, Fields]:
        """Return the segments of the file, and their `labels`, `scores` and `things`.

        Raises:
          UserError: if a transform of the run does not track the positions of pixels.
        """
        threshold = context.flags.threshold
        if 'segmentation' in prediction:
            return _classes(prediction, photo)
        if 'queries' in prediction:
            return _instances(prediction, photo, threshold, self.weighted)
        segments = panoptic.from_prediction(
            prediction, lambda x: to_file_pixels(x, photo), threshold, OVERLAP
        )
        return _visible(*segments), prediction


def _classes(prediction: Fields, photo: Photo) -> tuple[Segments, Fields]:
    """Return a segment per class; classes of pixels have no score, which counts as 1."""
    height, width = prediction['size'].tolist()
    classes = to_file_pixels(prediction['segmentation'][:height, :width], photo)
    labels = np.unique(classes[classes >= 0])
    numbers = np.where(classes >= 0, np.searchsorted(labels, classes) + 1, 0)
    indices = np.arange(len(labels))
    prediction_of_classes = {
        **prediction,
        'labels': labels,
        'scores': np.ones(len(labels)),
        'things': indices < 0,
    }
    return Segments(numbers, indices), prediction_of_classes


def _instances(
    prediction: Fields, photo: Photo, threshold: float, weighted: bool
) -> tuple[Segments, Fields]:
    """Return the visible pixels of the instances, of which the best are on top."""
    masks, indices, instances = _find_instances(prediction, threshold, weighted)
    numbers = np.zeros(masks.shape[1:], int)
    for number, mask in enumerate(masks, start=1):
        numbers[mask] = number
    return _visible(to_file_pixels(numbers, photo), indices), instances


def _find_instances(
    prediction: Fields, threshold: float, weighted: bool
) -> tuple[Bool[np.ndarray, 'K h w'], Int[np.ndarray, ' K'], Fields]:
    """Return masks and indices of the instances whose score, if `weighted` times the mean
    probability of their mask, is above `threshold`, the best last; and the prediction with these
    scores.
    """
    rows = np.flatnonzero(prediction['scores'] > threshold)  # weights are at most 1
    logits = panoptic.mask_logits(prediction, prediction['queries'][rows])
    is_inside, scores = logits > 0, prediction['scores'].copy()
    if weighted:
        total = (panoptic.sigmoid(logits) * is_inside).sum((1, 2))
        scores[rows] *= total / (is_inside.sum((1, 2)) + 1e-6)
    order = np.argsort(scores[rows], kind='stable')
    order = order[scores[rows[order]] > threshold]
    instances = {**prediction, 'scores': scores, 'things': np.ones(len(scores), bool)}
    return is_inside[order], rows[order], instances


def _predicted_box(prediction: Fields, index: int, photo: Photo) -> dict[str, list[float]]:
    if 'boxes' not in prediction:
        return {}
    (box,) = detect.to_file_boxes(prediction['boxes'][[index]], photo)
    return {'bbox': [round(float(side), 2) for side in box]}


def _visible(numbers: np.ndarray, queries: np.ndarray) -> Segments:
    """Return the segments with pixels in the file; numbers are 0 outside of the model's view."""
    visible = np.unique(numbers[numbers > 0])
    new_numbers = np.zeros(len(queries) + 1, int)
    new_numbers[visible] = np.arange(len(visible)) + 1
    return Segments(new_numbers[numbers.clip(0)], queries[visible - 1])
