"""Merging overlapping masks into disjoint segments, in NumPy.

In panoptic segmentation each pixel belongs to at most one segment, and a class of stuff, such as
sky, has a single segment (Kirillov et al., 2019, arXiv:1801.00868).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpy as np

from vit_jax.array_types import Bool, Float, Int
from vit_jax.ops.resize import bilinear_half_pixel, linear_matrix

THRESHOLD = 0.85  # minimum class probability of a segment
MIN_PIXELS = 5  # minimum size of a segment
VOID = -1  # unlabeled pixel, instead of a segment's number

# Maps pixels of the model's input to pixels of the segmented image.
Place = Callable[[np.ndarray], np.ndarray]


class Segments(NamedTuple):
    """Segments of an image.

    Attributes:
      numbers: 1 + index in `queries` of the segment that a pixel belongs to; 0 for none.
      queries: Query index of each segment.
    """

    numbers: Int[np.ndarray, 'H W']
    queries: Int[np.ndarray, ' S']


def merge_segments(
    scores: Float[np.ndarray, ' Q'],
    labels: Int[np.ndarray, ' Q'],
    things: Bool[np.ndarray, ' Q'],
    masks: Float[np.ndarray, 'Q h w'],
    place: Place = lambda numbers: numbers,
    threshold: float = THRESHOLD,
) -> Segments:
    """Merge overlapping predictions into segments.

    A pixel goes to the most confident mask, and masks of one class of stuff are fused. Segments
    with fewer than MIN_PIXELS pixels are dropped, round by round, and their pixels go to the
    remaining masks. Carion et al., 2020, arXiv:2005.12872, section 4.4, and the authors' code.

    Args:
      scores: Class probabilities of predictions.
      labels: Class indices.
      things: Whether the class is a thing.
      masks: Mask logits.
      place: Function that converts an [h w] map of integers to the image in which pixels are
        counted; -1 for pixels outside of all masks.
      threshold: Predictions with a score up to the threshold are dropped.
    """
    queries = np.flatnonzero(scores > threshold)
    fuse = True
    while True:
        if not len(queries):
            return Segments(0 * place(np.zeros(masks.shape[1:], int)), queries)
        owners = masks[queries].argmax(axis=0)
        if fuse:
            owners = _fuse_stuff(labels[queries], things[queries])[owners]
        owners = place(owners)
        large = np.bincount(owners[owners >= 0], minlength=len(queries)) >= MIN_PIXELS
        if large.all():
            return Segments(owners + 1, queries)
        # Fusing only empties masks in the first round.
        queries, fuse = queries[large], False


def merge_by_overlap(
    scores: Float[np.ndarray, ' Q'],
    labels: Int[np.ndarray, ' Q'],
    things: Bool[np.ndarray, ' Q'],
    masks: Float[np.ndarray, 'Q H W'],
    threshold: float,
    overlap: float,
) -> Segments:
    """Merge overlapping predictions into segments, dropping masks that are mostly covered by
    others.

    A pixel goes to the mask with the greatest product of score and probability, and to no segment
    if the probability is below 1/2. A mask that keeps less than a share `overlap` of its pixels is
    dropped, and masks of one class of stuff are fused. Cheng et al., 2021, arXiv:2107.06278,
    appendix, as in the code of Mask2Former and EoMT.

    Args:
      scores: Class probabilities of predictions.
      labels: Class indices.
      things: Whether the class is a thing.
      masks: Mask logits of the image.
      threshold: Predictions with a score up to the threshold are dropped.
      overlap: Minimum share of a mask's pixels that it keeps.
    """
    queries = np.flatnonzero(scores > threshold)
    numbers, segments = np.zeros(masks.shape[1:], int), []
    if not len(queries):
        return Segments(numbers, queries)
    probs = sigmoid(masks[queries])
    owners = (scores[queries, None, None] * probs).argmax(axis=0)
    stuff: dict[int, int] = {}
    for row, query in enumerate(queries.tolist()):
        is_owner, is_inside = owners == row, probs[row] >= 0.5
        visible = is_owner & is_inside
        if not visible.any() or is_owner.sum() / is_inside.sum() < overlap:
            continue
        label = int(labels[query])
        if things[query] or label not in stuff:
            segments.append(query)
            stuff[label] = len(segments)
        numbers[visible] = len(segments) if things[query] else stuff[label]
    return Segments(numbers, np.array(segments, int))


def sigmoid(x: Float[np.ndarray, '*B']) -> Float[np.ndarray, '*B']:
    """1 / (1 + exp(-x)), without overflow."""
    return 0.5 * (1 + np.tanh(0.5 * x))


def mask_logits(
    prediction: Mapping[str, np.ndarray],
    queries: Int[np.ndarray, ' N'],
    size: tuple[int, int] | None = None,
) -> Float[np.ndarray, 'N H W']:
    """Compute mask logits of some queries in the pixels of the real image.

    They are interpolated to the padded image, `frame`, cropped to the real one, `size` of the
    prediction, and interpolated to the argument `size` if given; all by two matrix products.
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
    """Merge the prediction for one image into segments.

    Args:
      prediction: Prediction of the task `segment_panoptic`. Masks are resized to the padded image
        and cropped to the real one.
      place: See `merge_segments`.
      threshold: Minimum score.
      overlap: Use `merge_by_overlap` instead of `merge_segments`.
      size: Height and width, with `overlap`, of the image to which logits are interpolated before
        merging, instead of mapping pixels with `place` afterwards.
    """
    confident = np.flatnonzero(prediction['scores'] > threshold)
    if overlap is not None:
        scores, labels, things = (
            prediction[name][confident] for name in ('scores', 'labels', 'things')
        )
        masks = mask_logits(prediction, confident, size)
        numbers, queries = merge_by_overlap(scores, labels, things, masks, threshold, overlap)
        return Segments(numbers if size else place(numbers - 1) + 1, confident[queries])
    frame, (height, width) = prediction['frame'].tolist(), prediction['size'].tolist()
    masks = bilinear_half_pixel(prediction['masks'][confident].transpose(1, 2, 0), tuple(frame))
    scores, labels, things = (
        prediction[name][confident] for name in ('scores', 'labels', 'things')
    )
    masks = masks[:height, :width].transpose(2, 0, 1)
    numbers, queries = merge_segments(scores, labels, things, masks, place, threshold)
    return Segments(numbers, confident[queries])


def number(masks: Bool[np.ndarray, 'N H W']) -> Int[np.ndarray, 'H W']:
    """Return 1 + the row of the smallest mask that covers each pixel, or 0; int16."""
    numbers = np.zeros(masks.shape[1:], np.int16)
    for row in np.argsort(-masks.sum((1, 2)), kind='stable').tolist():
        numbers[masks[row]] = row + 1
    return numbers


def keep_rows(
    segments: Int[np.ndarray, 'H W'], keep: Bool[np.ndarray, ' N']
) -> Int[np.ndarray, 'H W']:
    """Renumber segments after dropping objects, whose pixels become VOID."""
    new = np.concatenate([[0], np.where(keep, np.cumsum(keep), VOID)]).astype(segments.dtype)
    return np.where(segments > 0, new[segments.clip(0)], segments)


def true_numbers(truth: Mapping[str, Any]) -> Int[np.ndarray, 'H W']:
    """Return 1 + the row of the true segment of each pixel, 0 for none."""
    if 'segments' in truth:
        return np.asarray(truth['segments']).clip(0)
    return number(np.asarray(truth['masks']) != 0)


def resize_numbers(numbers: Int[np.ndarray, 'h w'], size: tuple[int, int]) -> np.ndarray:
    """Resize a map by nearest neighbor: the value of the old pixel below the new pixel's center."""
    rows, columns = (
        (2 * np.arange(new) + 1) * old // (2 * new)
        for old, new in zip(numbers.shape, size, strict=True)
    )
    return numbers[rows[:, None], columns]


def _fuse_stuff(labels: np.ndarray, things: np.ndarray) -> Int[np.ndarray, ' Q']:
    """Return the first prediction that each prediction is fused with."""
    is_fused = (labels[:, None] == labels) & ~things[:, None] & ~things
    return (is_fused | np.eye(len(labels), dtype=bool)).argmax(axis=1)
