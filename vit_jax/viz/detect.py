"""Visualization of detection: boxes with names and scores on the image of the file."""

from __future__ import annotations

import argparse
import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from vit_jax.array_types import Float, Int
from vit_jax.errors import UserError
from vit_jax.viz import base, batch, figures
from vit_jax.viz.photo import Context, Fields, Photo

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

MAX_ACROSS = 3  # images per row
WIDTH = 5.0  # inches of an image with its margins
INSIDE = WIDTH - figures.MARGIN
THRESHOLD = 0.7  # minimum score to show an object
MOST_QUERIES = 40  # maximum number of queries to draw


class Object(NamedTuple):
    """An object in a picture.

    Attributes:
      box: X, y, width and height in pixels.
      name: Text of the label.
      color: Color of frame and label.
    """

    box: figures.Box
    name: str
    color: figures.Color


class Viz(base.Viz):
    """Show boxes with names and scores."""

    columns: tuple[str, ...] | None = ('class', 'score', 'bbox')
    bar = 'score'
    coco: tuple[str, ...] = ('category_id', 'bbox', 'score')
    threshold: float = THRESHOLD
    noun: str = 'object'

    def add_flags(self, parser: argparse.ArgumentParser) -> None:
        """Add the minimum score to show an object or segment."""
        parser.add_argument(
            '--threshold',
            type=parse_threshold,
            default=self.threshold,
            metavar='P',
            help='minimum score to show (default: %(default)s)',
        )

    def rows(self, prediction: Fields, photo: Photo, context: Context) -> list[dict[str, Any]]:
        """Return the detected objects, sorted by score, with the keys of COCO's results.

        `bbox` is (x, y, width, height) in pixels of the file; for `category_id` see
        `Context.category_id`.

        Raises:
          UserError: if a transform of the run does not track the positions of pixels.
        """
        return self._rows(self._shown(prediction, context), prediction, photo, context)

    def _rows(
        self, shown: Int[np.ndarray, ' K'], prediction: Fields, photo: Photo, context: Context
    ) -> list[dict[str, Any]]:
        return [
            {
                'class': context.class_name(int(label)),
                'category_id': context.category_id(int(label)),
                'score': float(score),
                'bbox': [round(float(side), 2) for side in box],
            }
            for label, score, box in zip(
                prediction['labels'][shown],
                prediction['scores'][shown],
                to_file_boxes(prediction['boxes'][shown], photo),
                strict=True,
            )
        ]

    def note(self, prediction: Fields, context: Context) -> str:
        """Return the line for an image without objects: the threshold, and the highest score."""
        message = f'no {self.noun} with a score of at least {context.flags.threshold:g}'
        if not len(scores := prediction['scores']):
            return message
        best = int(scores.argmax())
        name = context.class_name(int(prediction['labels'][best]))
        return f'{message} (--threshold); the highest is {scores[best]:.2f}, {name}'

    def _heading(self, photo: Photo, count: int, context: Context) -> str:
        """Return the title of an image, which reports if nothing is drawn."""
        name = photo.path.name
        return name if count else f'{name}: no {self.noun} at {context.flags.threshold:g}'

    def _shown(self, prediction: Fields, context: Context) -> Int[np.ndarray, ' K']:
        """Return the indices of the shown predictions, sorted by score."""
        order = np.argsort(-prediction['scores'], kind='stable')
        return order[prediction['scores'][order] >= context.flags.threshold]

    def drawn(self, prediction: Fields, context: Context) -> Int[np.ndarray, ' K']:
        """Return the indices of the predictions in the picture, sorted by score."""
        return self._shown(prediction, context)

    def queries(self, outputs: Mapping[str, Any], context: Context) -> dict[int, str] | None:
        """Return the queries that detect objects in the first image, with their classes.

        If there are none: all, or the most probable MOST_QUERIES without a class.
        """
        probs = self.class_probs(np.asarray(outputs['logits'][0], np.float64))
        scores = probs.max(axis=-1)
        best = np.sort(np.argsort(-scores, kind='stable')[:MOST_QUERIES]).tolist()
        names = {
            i: context.class_name(int(probs[i].argmax()))
            for i in best
            if scores[i] >= self.threshold
        }
        if names or len(best) == len(scores):
            return names or None
        return dict.fromkeys(best, '')

    def class_probs(self, logits: Float[np.ndarray, 'Q L']) -> Float[np.ndarray, 'Q C']:
        """Compute the probability of each class of a query; the last logit is "no object"."""
        exps = np.exp(logits - logits.max(axis=-1, keepdims=True))
        probs: np.ndarray = (exps / exps.sum(axis=-1, keepdims=True))[:, :-1]
        return probs

    def draw(
        self, predictions: Sequence[Fields], photos: Sequence[Photo], context: Context
    ) -> Figure:
        """Draw the files with a frame around each object, labeled with class and score.

        The first object of a class has the class's color.
        """
        figure, cells = image_grid(photos)
        for axes, prediction, photo in zip(cells, predictions, photos, strict=True):
            drawn = self.drawn(prediction, context)
            rows = self._rows(drawn, prediction, photo, context)
            heading = self._heading(photo, len(rows), context)
            figures.show_image(axes, figures.as_picture(photo.original), heading, size=9)
            classes = prediction['labels'][drawn].tolist()
            objects = [
                Object(tuple(row['bbox']), f'{row["class"]} {row["score"]:.2f}', color)
                for row, color in zip(rows, figures.object_colors(classes), strict=True)
            ]
            draw_objects(axes, photo.original.shape[:2], objects, photo.original.shape[1] / INSIDE)
        return figure

    def caption(self, fields: Fields, context: Context) -> str:
        """Return the number of objects in an example of the data."""
        if 'object_mask' not in fields:
            return ''
        count = int(np.sum(fields['object_mask']))
        return f'{count} object' + 's' * (count != 1)

    def mark(self, axes: Axes, fields: Fields, context: Context) -> None:
        """Draw a frame around each object of an example, labeled with its class."""
        real = np.flatnonzero(fields.get('object_mask', ()))
        if not real.size:
            return
        size = abs(np.subtract(*axes.get_ylim())), abs(np.subtract(*axes.get_xlim()))
        corners = fields['boxes'][real] * (size[0] / fields['image'].shape[0])
        boxes = np.concatenate([corners[:, :2], corners[:, 2:] - corners[:, :2]], axis=1)
        labels = fields['labels'][real].tolist()
        objects = [
            Object(tuple(box), context.class_name(label), color)
            for box, label, color in zip(
                boxes.tolist(), labels, figures.object_colors(labels), strict=True
            )
        ]
        draw_objects(
            axes,
            size,
            objects,
            size[1] / (batch.SIDE - figures.MARGIN),
            figures.SMALL_LABEL_SIZE,
            line=1.2,
        )


def parse_threshold(text: str) -> float:
    """Parse `--threshold`; raise UserError unless it is a number in [0, 1)."""
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 <= value < 1:
        raise UserError(f'--threshold {text}: write a number from 0 to less than 1, such as 0.5')
    return value


def to_file_boxes(boxes: Float[np.ndarray, 'N 4'], photo: Photo) -> Float[np.ndarray, 'N 4']:
    """Convert corners, relative to the model's image, to (x, y, width, height) in the file's
    pixels, clipped to the file.
    """
    corners = photo.to_original(boxes.reshape(-1, 2, 2) * photo.seen[::-1])
    height, width = photo.original.shape[:2]
    first, last = (np.clip(f(corners, axis=1), 0, [width, height]) for f in (np.min, np.max))
    return np.concatenate([first, last - first], axis=1)


def image_grid(photos: Sequence[Photo]) -> tuple[Figure, list[Axes]]:
    """Create a figure with axes for each file."""
    num_rows = math.ceil(len(photos) / MAX_ACROSS)
    num_columns = math.ceil(len(photos) / num_rows)
    aspect = max(photo.original.shape[0] / photo.original.shape[1] for photo in photos)
    size = (WIDTH * num_columns, (WIDTH * aspect + 0.3) * num_rows)
    figure = figures.new_figure(size)
    return figure, [figure.add_subplot(num_rows, num_columns, i + 1) for i in range(len(photos))]


def draw_objects(
    axes: Axes,
    size: tuple[float, float],
    objects: Sequence[Object],
    inch: float,
    points: float = figures.LABEL_SIZE,
    line: float = 1.6,
) -> None:
    """Draw frames with white borders, visible on any background, and labels that avoid each other
    and small objects.

    Args:
      axes: Axes with the image.
      size: Height and width of the image in pixels.
      objects: Objects to draw.
      inch: Pixels of the image per inch.
      points: Font size.
      line: Width of the frames in points.
    """
    from matplotlib.patches import Rectangle

    label_boxes: list[figures.Box] = []
    boxes = [obj.box for obj in objects]
    # Draw the largest first, so that it does not hide smaller ones.
    for box, name, tint in sorted(objects, key=lambda obj: -math.prod(obj.box[2:])):
        x, y, width, height = box
        for thick, edge in ((2 * line, 'white'), (line, tint)):
            frame: dict[str, Any] = {'fill': False, 'linewidth': thick, 'edgecolor': edge}
            axes.add_patch(Rectangle((x, y), width, height, **frame))
        fits = width >= figures.label_size(name, inch, points)[0]
        letters = points if fits else min(points, figures.SMALL_LABEL_SIZE)
        label_box = figures.find_label_box(
            box, figures.label_size(name, inch, letters), size, label_boxes, boxes
        )
        label_boxes.append(label_box)
        figures.write_label(axes, label_box, name, tint, inch, letters)
