"""Panoptic segmentation: overlapping masks become disjoint segments. In NumPy.

Each pixel of an image belongs to one segment at most, and a class of stuff, such as sky, has a
single segment (Kirillov et al., 2019, arXiv:1801.00868).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple

import numpy as np

from vit_jax.array_types import Bool, Float, Int
from vit_jax.ops.resize import bilinear_half_pixel

THRESHOLD = 0.85  # least probability of the class of a segment
LEAST = 5  # pixels that a segment has at least
VOID = -1  # instead of a segment's number: a pixel that nobody labeled

# Maps pixels of the model's input to pixels of the segmented image.
Place = Callable[[np.ndarray], np.ndarray]


class Segments(NamedTuple):
    """The segments of an image.

    Attributes:
      numbers: 1 + the index in `queries` of the segment that a pixel belongs to; 0 for none.
      queries: the prediction of each segment.
    """

    numbers: Int[np.ndarray, 'H W']
    queries: Int[np.ndarray, ' S']


def merge(
    scores: Float[np.ndarray, ' Q'],
    labels: Int[np.ndarray, ' Q'],
    things: Bool[np.ndarray, ' Q'],
    masks: Float[np.ndarray, 'Q h w'],
    place: Place = lambda numbers: numbers,
    threshold: float = THRESHOLD,
) -> Segments:
    """Merge overlapping predictions into segments.

    A pixel goes to the most confident mask, and masks of one class of stuff become one. Segments of
    fewer than LEAST pixels are dropped, one round after the other, and their pixels go to the
    masks that are left.
    Carion et al., 2020, arXiv:2005.12872, section 4.4, and the authors' code.

    Args:
      scores: probabilities of the classes of predictions.
      labels: the classes.
      things: whether they are classes of things.
      masks: logits of the pixels.
      place: converts an [h w] map of integers to the image in which pixels are counted; -1 in
        pixels outside of all masks.
      threshold: predictions whose score is not above it are left out.
    """
    queries = np.flatnonzero(scores > threshold)
    fuse = True
    while True:
        if not len(queries):
            return Segments(0 * place(np.zeros(masks.shape[1:], int)), queries)
        owners = masks[queries].argmax(axis=0)
        if fuse:
            owners = _first_of_stuff(labels[queries], things[queries])[owners]
        owners = place(owners)
        large = np.bincount(owners[owners >= 0], minlength=len(queries)) >= LEAST
        if large.all():
            return Segments(owners + 1, queries)
        # Masks emptied by fusing are gone after the first round.
        queries, fuse = queries[large], False


def from_prediction(
    prediction: Mapping[str, np.ndarray], place: Place, threshold: float = THRESHOLD
) -> Segments:
    """`merge` for one image of the predictions of the task `segment_panoptic`.

    The masks are resized to the padded image and cropped to the real one.
    """
    sure = np.flatnonzero(prediction['scores'] > threshold)
    frame, (height, width) = prediction['frame'].tolist(), prediction['size'].tolist()
    masks = bilinear_half_pixel(prediction['masks'][sure].transpose(1, 2, 0), tuple(frame))
    scores, labels, things = (prediction[name][sure] for name in ('scores', 'labels', 'things'))
    masks = masks[:height, :width].transpose(2, 0, 1)
    numbers, queries = merge(scores, labels, things, masks, place, threshold)
    return Segments(numbers, sure[queries])


def resize_numbers(numbers: Int[np.ndarray, 'h w'], size: tuple[int, int]) -> np.ndarray:
    """Resize a map: each new pixel has the value of the old one below its center."""
    rows, columns = (
        (2 * np.arange(new) + 1) * old // (2 * new)
        for old, new in zip(numbers.shape, size, strict=True)
    )
    return numbers[rows[:, None], columns]


def _first_of_stuff(labels: np.ndarray, things: np.ndarray) -> Int[np.ndarray, ' Q']:
    """The first prediction that each one is fused with."""
    same = (labels[:, None] == labels) & ~things[:, None] & ~things
    return (same | np.eye(len(labels), dtype=bool)).argmax(axis=1)
