"""Visualization of segmentation by masks with classes: every pixel in the color of its segment."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np

from vit_jax.ops import panoptic
from vit_jax.ops.panoptic import Segments
from vit_jax.viz import segment_panoptic
from vit_jax.viz.photo import Context, Fields, Photo
from vit_jax.viz.segment_panoptic import to_file_pixels

OVERLAP = 0.8  # least share of its pixels that a segment keeps


class Viz(segment_panoptic.Viz):
    """Segments, instances or classes in colors, by the task's kind."""

    threshold = 0.8

    def adapt_task(self, task: Any, context: Context) -> Any:
        """The task, without the size of the largest image of the data, as files may be larger."""
        return dataclasses.replace(task, frame=None)

    def labels(self, prediction: Fields, queries: np.ndarray, context: Context) -> list[str]:
        """The label of each segment in the picture: its class, and its score if it has one."""
        if 'segmentation' in prediction:
            return [context.class_name(label) for label in prediction['labels'][queries].tolist()]
        return super().labels(prediction, queries, context)

    def note(self, prediction: Fields, context: Context) -> str:
        """The line for an image without segments."""
        if 'segmentation' in prediction:
            return 'no pixel has a class'
        return super().note(prediction, context)

    def found(self, prediction: Fields, photo: Photo, context: Context) -> tuple[Segments, Fields]:
        """The segments of the file, and their `labels`, `scores` and `things`.

        Raises:
          UserError: if a transform of the run does not track the positions of pixels.
        """
        least = context.flags.threshold
        if 'segmentation' in prediction:
            return _classes(prediction, photo)
        if 'queries' in prediction:
            return _instances(prediction, photo, least)
        made = panoptic.from_prediction(
            prediction, lambda x: to_file_pixels(x, photo), least, OVERLAP
        )
        return _visible(*made), prediction


def _classes(prediction: Fields, photo: Photo) -> tuple[Segments, Fields]:
    """A segment for each class; classes of pixels have no score, which counts as 1."""
    height, width = prediction['size'].tolist()
    classes = to_file_pixels(prediction['segmentation'][:height, :width], photo)
    labels = np.unique(classes[classes >= 0])
    numbers = np.where(classes >= 0, np.searchsorted(labels, classes) + 1, 0)
    every = np.arange(len(labels))
    told = {**prediction, 'labels': labels, 'scores': np.ones(len(labels)), 'things': every < 0}
    return Segments(numbers, every), told


def _instances(prediction: Fields, photo: Photo, least: float) -> tuple[Segments, Fields]:
    """The instances whose score, times the mean probability of their mask, is above `least`; the
    best on top.
    """
    logits = panoptic.mask_logits(prediction, prediction['queries'])
    inside = logits > 0
    probs = (panoptic.sigmoid(logits) * inside).sum((1, 2)) / (inside.sum((1, 2)) + 1e-6)
    scores = prediction['scores'] * probs
    order = np.argsort(scores, kind='stable')
    numbers, kept = np.zeros(logits.shape[1:], int), []
    for row in order[scores[order] > least].tolist():
        kept.append(row)
        numbers[inside[row]] = len(kept)
    told = {**prediction, 'scores': scores, 'things': np.ones(len(scores), bool)}
    return _visible(to_file_pixels(numbers, photo), np.array(kept, int)), told


def _visible(numbers: np.ndarray, queries: np.ndarray) -> Segments:
    """The segments that have pixels in the file; numbers are 0 outside of the model's view."""
    seen = np.unique(numbers[numbers > 0])
    places = np.zeros(len(queries) + 1, int)
    places[seen] = np.arange(len(seen)) + 1
    return Segments(places[numbers.clip(0)], queries[seen - 1])
