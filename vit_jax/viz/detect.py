"""Visualization of detection: boxes with names and scores, on the image of the file."""

from __future__ import annotations

import argparse
import colorsys
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from jaxtyping import Float
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from vit_jax.errors import UserError
from vit_jax.viz import base, figures
from vit_jax.viz.photo import Context, Fields, Photo

ACROSS = 3  # at most, images in a row of the picture
WIDTH = 5.0  # inches of an image
THRESHOLD = 0.7  # least score of an object that is shown
SIZE = 8  # points of the labels' letters
# The most luminance behind white letters: a contrast of 4.5, as W3C requires (WCAG 2.1, 1.4.3).
LUMINANCE = 1.05 / 4.5 - 0.05
GAMMA = 2.2

Box = tuple[float, float, float, float]  # x, y, width, height


class Viz(base.Viz):
    """Boxes with names and scores."""

    columns: tuple[str, ...] | None = ('class', 'score', 'bbox')
    bar = 'score'
    coco: tuple[str, ...] = ('category_id', 'bbox', 'score')

    def add_flags(self, parser: argparse.ArgumentParser) -> None:
        """Add the least score of an object that is shown."""
        parser.add_argument(
            '--threshold',
            type=float,
            default=THRESHOLD,
            metavar='P',
            help='least score of what is shown',
        )

    def rows(self, prediction: Fields, photo: Photo, context: Context) -> list[dict[str, Any]]:
        """The objects found, the most probable first, with the keys of COCO's results.

        `bbox` is (x, y, width, height) in pixels of the file, and `category_id` that of
        `Context.category_id`.

        Raises:
          UserError: if the threshold is not in [0, 1], or a transform of the run does not track
            the positions of pixels.
        """
        threshold = context.flags.threshold
        if not 0 <= threshold <= 1:
            raise UserError(f'--threshold {threshold}: must be in [0, 1]')
        order = np.argsort(-prediction['scores'], kind='stable')
        kept = order[prediction['scores'][order] >= threshold]
        return [
            {
                'class': context.class_name(int(label)),
                'category_id': context.category_id(int(label)),
                'score': float(score),
                'bbox': [round(float(side), 2) for side in box],
            }
            for label, score, box in zip(
                prediction['labels'][kept],
                prediction['scores'][kept],
                boxes_of_file(prediction['boxes'][kept], photo),
                strict=True,
            )
        ]

    def queries(self, outputs: Mapping[str, Any], context: Context) -> dict[int, str] | None:
        """The queries that have found an object of the first image, with the class of each.

        None if there are none.
        """
        logits = np.asarray(outputs['logits'][0], np.float64)
        exps = np.exp(logits - logits.max(axis=-1, keepdims=True))
        probs = (exps / exps.sum(axis=-1, keepdims=True))[:, :-1]
        sure = np.flatnonzero(probs.max(axis=-1) >= THRESHOLD)
        names = {int(i): context.class_name(int(probs[i].argmax())) for i in sure}
        return names or None

    def draw(
        self, predictions: Sequence[Fields], photos: Sequence[Photo], context: Context
    ) -> Figure:
        """Draw the files with a frame around each object, and its class and score beside it."""
        figure, cells = image_grid(photos)
        for axes, prediction, photo in zip(cells, predictions, photos, strict=True):
            figures.show_image(axes, figures.as_picture(photo.original), photo.path.name, size=9)
            draw_objects(axes, photo.original.shape[:2], self.rows(prediction, photo, context))
        return figure

    def caption(self, fields: Fields, context: Context) -> str:
        """The number of objects in an example of the data."""
        count = int(np.sum(fields.get('object_mask', 0)))
        return f'{count} object' + 's' * (count != 1)

    def mark(self, axes: Axes, fields: Fields, context: Context) -> None:
        """Draw a frame around each object of an example, and its class beside it."""
        real = np.asarray(fields.get('object_mask', ()), bool)
        scale = abs(np.subtract(*axes.get_ylim())) / fields['image'].shape[0]
        for i in np.flatnonzero(real):
            left, top, right, bottom = fields['boxes'][i] * scale
            frame: dict[str, Any] = {'fill': False, 'linewidth': 1.2, 'edgecolor': color(int(i))}
            axes.add_patch(Rectangle((left, top), right - left, bottom - top, **frame))
            write_mark(axes, (left, top), context.class_name(int(fields['labels'][i])), int(i))


def boxes_of_file(boxes: Float[np.ndarray, 'N 4'], photo: Photo) -> Float[np.ndarray, 'N 4']:
    """Convert boxes by corners, in shares of the model's image, to (x, y, width, height) in pixels
    of the file, clipped to it.
    """
    corners = photo.to_original(boxes.reshape(-1, 2, 2) * photo.seen[::-1])
    height, width = photo.original.shape[:2]
    first, last = (np.clip(f(corners, axis=1), 0, [width, height]) for f in (np.min, np.max))
    return np.concatenate([first, last - first], axis=1)


def image_grid(photos: Sequence[Photo]) -> tuple[Figure, list[Axes]]:
    """A figure with a place for each file."""
    lines = math.ceil(len(photos) / ACROSS)
    columns = math.ceil(len(photos) / lines)
    tall = max(photo.original.shape[0] / photo.original.shape[1] for photo in photos)
    size = (WIDTH * columns, (WIDTH * tall + 0.3) * lines)
    figure = Figure(figsize=size, layout='constrained')
    return figure, [figure.add_subplot(lines, columns, i + 1) for i in range(len(photos))]


def write_mark(axes: Axes, place: tuple[float, float], name: str, index: int) -> None:
    """Draw a small label with its upper left corner at (x, y), in the color of an object."""
    style: dict[str, Any] = {'fontsize': 5, 'color': 'white', 'va': 'top', 'clip_on': True}
    ground = {'facecolor': color(index), 'edgecolor': 'none', 'pad': 0.8}
    axes.text(*place, name, bbox=ground, **style)


def draw_objects(axes: Axes, size: tuple[int, int], objects: Sequence[Mapping[str, Any]]) -> None:
    """Draw frames with white borders, visible on any background, and labels that do not overlap if
    there is room.

    Args:
      axes: with the image, WIDTH inches wide.
      size: height and width of the image in pixels.
      objects: see `rows`.
    """
    inch = size[1] / WIDTH
    taken: list[Box] = []
    # The largest first, so that none hides a smaller one.
    for i in sorted(range(len(objects)), key=lambda i: -math.prod(objects[i]['bbox'][2:])):
        x, y, width, height = objects[i]['bbox']
        for line, edge in ((3.2, 'white'), (1.6, color(i))):
            frame: dict[str, Any] = {'fill': False, 'linewidth': line, 'edgecolor': edge}
            axes.add_patch(Rectangle((x, y), width, height, **frame))
        text = f'{objects[i]["class"]} {objects[i]["score"]:.2f}'
        place = label_place((x, y, width, height), label_room(text, inch), size, taken)
        taken.append(place)
        write_label(axes, place, text, color(i), inch)


def label_room(text: str, inch: float) -> tuple[float, float]:
    """Width and height in pixels of a label, at `inch` pixels an inch."""
    return (0.6 * SIZE * len(text) + 4) / 72 * inch, (SIZE + 5) / 72 * inch


def write_label(axes: Axes, place: Box, text: str, ground: Any, inch: float) -> None:
    """Write white letters on the color `ground`, in a place found by `label_place`."""
    axes.text(
        place[0] + 2 / 72 * inch,
        place[1] + place[3] / 2,
        text,
        va='center',
        fontsize=SIZE,
        color='white',
        bbox={'facecolor': ground, 'edgecolor': 'none', 'pad': 1.5},
    )


def label_place(
    box: Box, room: tuple[float, float], size: tuple[int, int], taken: Sequence[Box]
) -> Box:
    """The place of a label of this width and height: at a corner of its box, within the image, with
    the least overlap with other labels.
    """

    def clash(place: Box) -> float:
        return sum(overlap(place, other) for other in taken)

    return min(_places(box, room, size), key=clash)


def _places(box: Box, room: tuple[float, float], size: tuple[int, int]) -> Iterator[Box]:
    """Places at the corners of a box, moved into the image; the best ones first."""
    x, y, width, height = box
    tall = room[1]
    for top in (y - tall, y + height, y, y + height - tall):
        for left in (x, x + width - room[0]):
            inside = max(0, min(left, size[1] - room[0])), max(0, min(top, size[0] - tall))
            yield (*inside, *room)


def overlap(a: Box, b: Box) -> float:
    """The area that two boxes have in common."""
    sides = [min(a[i] + a[i + 2], b[i] + b[i + 2]) - max(a[i], b[i]) for i in (0, 1)]
    return max(0, sides[0]) * max(0, sides[1])


def color(i: int) -> tuple[float, float, float]:
    """A saturated color dark enough for white letters; neighbors in number differ most."""
    hue = (0.6 + i * (math.sqrt(5) - 1) / 2) % 1
    rgb = colorsys.hsv_to_rgb(hue, 0.85, 0.75)
    share = min(1, LUMINANCE / luminance(rgb)) ** (1 / GAMMA)
    return rgb[0] * share, rgb[1] * share, rgb[2] * share


def luminance(rgb: Sequence[float]) -> float:
    """The luminance of a color of sRGB, 0 to 1, with its curve approximated by a power."""
    weights = (0.2126, 0.7152, 0.0722)
    return sum(w * c**GAMMA for w, c in zip(weights, rgb, strict=True))
