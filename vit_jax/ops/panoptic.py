"""Panoptic segmentation: of masks that overlap to segments that do not. In NumPy.

Each pixel of an image belongs to one segment at most, and of stuff, such as sky, there is one
segment a class (Kirillov et al., 2019, arXiv:1801.00868).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple

import numpy as np
from jaxtyping import Bool, Float, Int

from vit_jax.ops.resize import bilinear_half_pixel

THRESHOLD = 0.85  # least probability of the class of a segment
LEAST = 5  # pixels that a segment has at least

# Puts a map of the pixels that a model has seen onto those of the image that is segmented.
Place = Callable[[np.ndarray], np.ndarray]


class Segments(NamedTuple):
    """Those of an image.

    Attributes:
      numbers: 1 + the place in `queries` of the segment that a pixel belongs to; 0 for none.
      queries: the prediction that each segment is of.
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
    """The segments of predictions that overlap.

    A pixel goes to the surest mask, those of one class of stuff become one, and segments of fewer
    than LEAST pixels are dropped until there are none: theirs go to the masks that are left.
    Carion et al., 2020, arXiv:2005.12872, section 4.4, and the authors' code.

    Args:
      scores: probabilities of the classes of predictions.
      labels: the classes.
      things: whether they are classes of things.
      masks: logits of the pixels.
      place: makes the map of another image of an [h w] map of whole numbers, -1 in pixels that
        are in none of the masks; pixels are counted there.
      threshold: predictions whose score is no more are left out.
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
        # What fusing has emptied is gone after the first time.
        queries, fuse = queries[large], False


def of_prediction(
    prediction: Mapping[str, np.ndarray], place: Place, threshold: float = THRESHOLD
) -> Segments:
    """`merge` for one image of what the task `segment_panoptic` predicts.

    The masks get the size of the padded image, and lose its padding.
    """
    sure = np.flatnonzero(prediction['scores'] > threshold)
    frame, (height, width) = prediction['frame'].tolist(), prediction['size'].tolist()
    masks = bilinear_half_pixel(prediction['masks'][sure].transpose(1, 2, 0), tuple(frame))
    scores, labels, things = (prediction[name][sure] for name in ('scores', 'labels', 'things'))
    masks = masks[:height, :width].transpose(2, 0, 1)
    numbers, queries = merge(scores, labels, things, masks, place, threshold)
    return Segments(numbers, sure[queries])


def resize_numbers(numbers: Int[np.ndarray, 'h w'], size: tuple[int, int]) -> np.ndarray:
    """A map for another size: each new pixel has the value of the old one below its centre."""
    rows, columns = (
        (2 * np.arange(new) + 1) * old // (2 * new)
        for old, new in zip(numbers.shape, size, strict=True)
    )
    return numbers[rows[:, None], columns]


def _first_of_stuff(labels: np.ndarray, things: np.ndarray) -> Int[np.ndarray, ' Q']:
    """For each prediction the first one that is fused with it."""
    same = (labels[:, None] == labels) & ~things[:, None] & ~things
    return (same | np.eye(len(labels), dtype=bool)).argmax(axis=1)
