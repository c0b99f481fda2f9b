"""Visualization of panoptic segmentation: each pixel of the file in the color of its segment."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from vit_jax.array_types import Bool, Int
from vit_jax.ops import panoptic
from vit_jax.viz import batch, detect, figures
from vit_jax.viz.photo import Context, Fields, Photo

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

OPACITY = 0.5  # of colors on the image
LINE = 0.004  # width of the lines between segments, relative to the image's longer side
SIDE = 480  # minimum pixels of the shorter side, so that these lines are thin


class Viz(detect.Viz):
    """Show segments in colors."""

    columns = ('class', 'kind', 'score', 'area', 'bbox')
    coco = (*detect.Viz.coco, 'segmentation')
    threshold = panoptic.THRESHOLD
    noun = 'segment'

    def rows(self, prediction: Fields, photo: Photo, context: Context) -> list[dict[str, Any]]:
        """Return the segments, sorted by area, with the keys of COCO's panoptic results.

        `bbox` is (x, y, width, height) in pixels of the file; for `category_id` see
        `Context.category_id`; `segmentation` is COCO's run-length encoding, alternating runs
        outside and inside of the segment, column by column.

        Raises:
          UserError: see `segments`.
        """
        (numbers, queries), prediction = self.find_segments(prediction, photo, context)
        rows = [
            segment_row(number, numbers == number, int(query), prediction, context)
            for number, query in enumerate(queries, start=1)
        ]
        return sorted(rows, key=lambda row: -row['area'])

    def note(self, prediction: Fields, context: Context) -> str:
        """Return the line for an image without segments: the threshold, and the highest score."""
        if (prediction['scores'] > context.flags.threshold).any():
            return 'no segment is large enough'
        return super().note(prediction, context)

    def draw(
        self, predictions: Sequence[Fields], photos: Sequence[Photo], context: Context
    ) -> Figure:
        """Draw the files with colored segments, labeled with class and score."""
        figure, cells = detect.image_grid(photos)
        for axes, raw_prediction, photo in zip(cells, predictions, photos, strict=True):
            (numbers, queries), prediction = self.find_segments(raw_prediction, photo, context)
            picture = figures.as_picture(photo.original, SIDE)
            factor = len(picture) // len(numbers)
            numbers = numbers.repeat(factor, axis=0).repeat(factor, axis=1)
            classes = prediction['labels'][queries].tolist()
            tints = figures.object_colors(classes)
            heading = self._heading(photo, len(queries), context)
            figures.show_image(axes, paint_segments(picture, numbers, tints), heading, size=9)
            names = self.labels(prediction, queries, context)
            write_labels(axes, numbers, names, tints, numbers.shape[1] / detect.INSIDE)
        return figure

    def labels(self, prediction: Fields, queries: np.ndarray, context: Context) -> list[str]:
        """Return the label of each segment: its class and score."""
        labels, scores = (prediction[name][queries].tolist() for name in ('labels', 'scores'))
        scored = zip(labels, scores, strict=True)
        return [f'{context.class_name(label)} {score:.2f}' for label, score in scored]

    def find_segments(
        self, prediction: Fields, photo: Photo, context: Context
    ) -> tuple[panoptic.Segments, Fields]:
        """Return the segments of the file, and their `labels`, `scores` and `things`."""
        return segments(prediction, photo, context), prediction

    def mark(self, axes: Axes, fields: Fields, context: Context) -> None:
        """Draw the segments of an example in color, each with its class at the thickest point."""
        (axes_image,) = axes.images
        picture = np.asarray(axes_image.get_array())
        factor = len(picture) // len(fields['segments'])
        numbers = fields['segments'].clip(0).repeat(factor, axis=0).repeat(factor, axis=1)
        classes = fields['labels'][: numbers.max()].tolist()
        tints = figures.object_colors(classes)
        axes_image.set_data(paint_segments(picture, numbers, tints))
        names = [context.class_name(label) for label in classes]
        inch = numbers.shape[1] / (batch.SIDE - figures.MARGIN)
        write_labels(axes, numbers, names, tints, inch, figures.SMALL_LABEL_SIZE)


def segments(prediction: Fields, photo: Photo, context: Context) -> panoptic.Segments:
    """Return the segments of the file.

    Raises:
      UserError: if a transform of the run does not track the positions of pixels.
    """
    threshold = context.flags.threshold
    return panoptic.from_prediction(prediction, lambda x: to_file_pixels(x, photo), threshold)


def to_file_pixels(numbers: Int[np.ndarray, 'h w'], photo: Photo) -> Int[np.ndarray, 'Y X']:
    """Map segment numbers from the model's pixels to the file's; -1 outside of the model's view."""
    height, width = photo.original.shape[:2]
    y, x = np.mgrid[:height, :width] + 0.5
    x, y = np.floor(photo.from_original(np.stack([x, y], axis=-1))).astype(int).transpose(2, 0, 1)
    is_inside = (x >= 0) & (x < numbers.shape[1]) & (y >= 0) & (y < numbers.shape[0])
    values = numbers[y.clip(0, numbers.shape[0] - 1), x.clip(0, numbers.shape[1] - 1)]
    return np.where(is_inside, values, -1)


def paint_segments(
    image: np.ndarray, numbers: Int[np.ndarray, 'Y X'], tints: Sequence[figures.Color]
) -> np.ndarray:
    """Blend the image with the colors of its segments, with white lines between them."""
    colors = np.array([(0, 0, 0), *tints]) * 255
    mixed = image * (1 - OPACITY) + colors[numbers] * OPACITY
    mixed = np.where((numbers == 0)[..., None], image, mixed)
    return np.where(_edges(numbers)[..., None], 255, mixed).astype(np.uint8)


def write_labels(
    axes: Axes,
    numbers: Int[np.ndarray, 'Y X'],
    names: Sequence[str],
    tints: Sequence[figures.Color],
    inch: float,
    points: float = figures.LABEL_SIZE,
) -> None:
    """Label each segment at its thickest point, or next to it if it is small, avoiding overlaps."""
    label_boxes: list[figures.Box] = []
    areas = np.bincount(numbers[numbers > 0], minlength=len(names) + 1)[1:]
    label_sizes = [figures.label_size(name, inch, points) for name in names]
    small = {
        i: bounding_box(numbers == i + 1)
        for i, size in enumerate(label_sizes)
        if 0 < areas[i] < 2 * math.prod(size)
    }
    for i in np.argsort(areas, kind='stable').tolist():
        if not areas[i]:
            continue
        (wide, tall), (x, y) = label_sizes[i], thickest_point(numbers == i + 1)
        # The box is large enough that its first corner candidate is around the middle.
        box = small.get(i, (x - wide / 2, y + tall / 2, wide, tall))
        label_box = figures.find_label_box(
            box, label_sizes[i], numbers.shape, label_boxes, list(small.values())
        )
        label_boxes.append(label_box)
        figures.write_label(axes, label_box, names[i], tints[i], inch, points)


def bounding_box(mask: Bool[np.ndarray, 'Y X']) -> figures.Box:
    """Return the smallest box around a nonempty mask."""
    y, x = np.nonzero(mask)
    left, top = float(x.min()), float(y.min())
    return left, top, float(x.max()) + 1 - left, float(y.max()) + 1 - top


def thickest_point(mask: Bool[np.ndarray, 'Y X']) -> tuple[int, int]:
    """Return the pixel (x, y) farthest from the edge of a mask."""
    from scipy import ndimage

    depth = ndimage.distance_transform_edt(np.pad(mask, 1))[1:-1, 1:-1]
    y, x = np.unravel_index(depth.argmax(), depth.shape)
    return int(x), int(y)


def run_lengths(mask: Bool[np.ndarray, 'Y X']) -> list[int]:
    """Return the lengths of alternating runs outside and inside of a mask, column by column."""
    flat = mask.ravel(order='F')
    starts = np.flatnonzero(np.diff(flat)) + 1
    ends = [0, *starts.tolist(), flat.size]
    lengths = [b - a for a, b in itertools.pairwise(ends)]
    return [0, *lengths] if flat[0] else lengths


def segment_row(
    number: int,
    mask: np.ndarray,
    query: int,
    prediction: Fields,
    context: Context,
) -> dict[str, Any]:
    """Return the row of a segment with these pixels, see `Viz.rows`."""
    class_id, is_thing = int(prediction['labels'][query]), bool(prediction['things'][query])
    return {
        'id': number,
        'class': context.class_name(class_id),
        'category_id': context.category_id(class_id),
        'isthing': int(is_thing),
        'kind': 'thing' if is_thing else 'stuff',
        'score': float(prediction['scores'][query]),
        'area': int(mask.sum()),
        'bbox': [int(side) for side in bounding_box(mask)],
        'segmentation': {'size': list(mask.shape), 'counts': run_lengths(mask)},
    }


def _edges(numbers: Int[np.ndarray, 'Y X']) -> Bool[np.ndarray, 'Y X']:
    """Return a mask of segment pixels near another segment."""
    from scipy import ndimage

    width = 2 * max(1, round(LINE * max(numbers.shape) / 2)) + 1
    highest = ndimage.maximum_filter(numbers, width)
    return (highest != ndimage.minimum_filter(numbers, width)) & (numbers > 0)
