"""Masks and segments of an image: overlapping masks become disjoint segments. In NumPy.

In panoptic segmentation each pixel of an image belongs to one segment at most, and a class of
stuff, such as sky, has a single segment (Kirillov et al., 2019, arXiv:1801.00868).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpy as np

from vit_jax.array_types import Bool, Float, Int
from vit_jax.ops.resize import bilinear_half_pixel, linear_matrix

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


def merge_by_overlap(
    scores: Float[np.ndarray, ' Q'],
    labels: Int[np.ndarray, ' Q'],
    things: Bool[np.ndarray, ' Q'],
    masks: Float[np.ndarray, 'Q H W'],
    threshold: float,
    overlap: float,
) -> Segments:
    """Merge overlapping predictions into segments, without those that others mostly cover.

    A pixel goes to the mask with the greatest product of score and probability there, and to no
    segment if that probability is below 1/2. A mask that is left with less than the share `overlap`
    of its pixels is dropped, and masks of one class of stuff become one.
    Cheng et al., 2021, arXiv:2107.06278, appendix, as in the code of Mask2Former and EoMT.

    Args:
      scores: probabilities of the classes of predictions.
      labels: the classes.
      things: whether they are classes of things.
      masks: logits of the pixels of the image.
      threshold: predictions whose score is not above it are left out.
      overlap: the least share of a mask's pixels that it keeps.
    """
    queries = np.flatnonzero(scores > threshold)
    numbers, kept = np.zeros(masks.shape[1:], int), []
    if not len(queries):
        return Segments(numbers, queries)
    probs = sigmoid(masks[queries])
    owners = (scores[queries, None, None] * probs).argmax(axis=0)
    stuff: dict[int, int] = {}
    for row, query in enumerate(queries.tolist()):
        own, whole = owners == row, probs[row] >= 0.5
        visible = own & whole
        if not visible.any() or own.sum() / whole.sum() < overlap:
            continue
        label = int(labels[query])
        if things[query] or label not in stuff:
            kept.append(query)
            stuff[label] = len(kept)
        numbers[visible] = len(kept) if things[query] else stuff[label]
    return Segments(numbers, np.array(kept, int))


def sigmoid(x: Float[np.ndarray, '*B']) -> Float[np.ndarray, '*B']:
    """1 / (1 + exp(-x)), without overflow."""
    return 0.5 * (1 + np.tanh(0.5 * x))


def mask_logits(
    prediction: Mapping[str, np.ndarray],
    queries: Int[np.ndarray, ' N'],
    size: tuple[int, int] | None = None,
) -> Float[np.ndarray, 'N H W']:
    """Logits of the masks of some queries, in the pixels of the real image.

    They are interpolated to the padded image, `frame`, cropped to the real one, `size`, and
    interpolated to `size` of the arguments, if given; by two products of matrices in all.
    """
    masks = prediction['masks'][queries]
    matrices = []
    for axis, (frame, real) in enumerate(
        zip(prediction['frame'].tolist(), prediction['size'].tolist(), strict=True)
    ):
        matrix = linear_matrix(masks.shape[1 + axis], frame)[:real]
        if size is not None:
            matrix = linear_matrix(real, size[axis]) @ matrix
        matrices.append(matrix.astype(np.float32))
    rows, columns = matrices
    return rows @ masks @ columns.T


def from_prediction(
    prediction: Mapping[str, np.ndarray],
    place: Place,
    threshold: float = THRESHOLD,
    overlap: float | None = None,
    size: tuple[int, int] | None = None,
) -> Segments:
    """The segments of one image, of a task's predictions.

    Args:
      prediction: as of the task `segment_panoptic`. The masks are resized to the padded image and
        cropped to the real one.
      place: see `merge`.
      threshold: least score.
      overlap: merge by `merge_by_overlap` instead of `merge`.
      size: with `overlap`, height and width of the image to which logits are interpolated before
        they are merged, instead of placing pixels by `place` afterwards.
    """
    sure = np.flatnonzero(prediction['scores'] > threshold)
    if overlap is not None:
        scores, labels, things = (prediction[name][sure] for name in ('scores', 'labels', 'things'))
        masks = mask_logits(prediction, sure, size)
        numbers, queries = merge_by_overlap(scores, labels, things, masks, threshold, overlap)
        return Segments(numbers if size else place(numbers - 1) + 1, sure[queries])
    frame, (height, width) = prediction['frame'].tolist(), prediction['size'].tolist()
    masks = bilinear_half_pixel(prediction['masks'][sure].transpose(1, 2, 0), tuple(frame))
    scores, labels, things = (prediction[name][sure] for name in ('scores', 'labels', 'things'))
    masks = masks[:height, :width].transpose(2, 0, 1)
    numbers, queries = merge(scores, labels, things, masks, place, threshold)
    return Segments(numbers, sure[queries])


def number(masks: Bool[np.ndarray, 'N H W']) -> Int[np.ndarray, 'H W']:
    """1 + the row of the mask that a pixel belongs to, the smallest of several, or 0; int16."""
    numbers = np.zeros(masks.shape[1:], np.int16)
    for row in np.argsort(-masks.sum((1, 2)), kind='stable').tolist():
        numbers[masks[row]] = row + 1
    return numbers


def keep_rows(
    segments: Int[np.ndarray, 'H W'], kept: Bool[np.ndarray, ' N']
) -> Int[np.ndarray, 'H W']:
    """Number segments anew after objects were left out, whose pixels become VOID."""
    new = np.concatenate([[0], np.where(kept, np.cumsum(kept), VOID)]).astype(segments.dtype)
    return np.where(segments > 0, new[segments.clip(0)], segments)


def true_numbers(truth: Mapping[str, Any]) -> Int[np.ndarray, 'H W']:
    """1 + the row of the true segment of each pixel, 0 for none; of `segments` or `masks`."""
    if 'segments' in truth:
        return np.asarray(truth['segments']).clip(0)
    return number(np.asarray(truth['masks']) != 0)


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
