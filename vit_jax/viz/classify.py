"""Visualization of image classification: the most probable classes of every image."""

from __future__ import annotations

import argparse
import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from vit_jax.array_types import Float
from vit_jax.errors import UserError, positive_number
from vit_jax.viz import base, figures
from vit_jax.viz.photo import Context, Fields, Photo

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

MAX_ACROSS = 4  # images per row
WIDTH, LINE = 2.5, 0.2  # inches of an image, and of a class below it


class Viz(base.Viz):
    """Show the most probable classes of each image."""

    columns = ('class', 'probability')
    bar = 'probability'

    def add_flags(self, parser: argparse.ArgumentParser) -> None:
        """Add the number of classes to show."""
        help_text = 'classes to show (default: 5)'
        parser.add_argument('--top', type=positive_number, default=5, metavar='K', help=help_text)

    def rows(self, prediction: Fields, photo: Photo, context: Context) -> list[dict[str, Any]]:
        """Return the most probable classes of an image, in descending order.

        Raises:
          UserError: if the model does not classify whole images.
        """
        probs = prediction.get('probs')
        if probs is None:
            raise UserError('the model has no head, so it cannot predict classes')
        if probs.ndim != 1:
            raise UserError('the model predicts a class for every patch, not for the image')
        return [
            {'label': label, 'class': context.class_name(label), 'probability': float(probs[label])}
            for label in top_classes(probs, context.flags.top)
        ]

    def draw(
        self, predictions: Sequence[Fields], photos: Sequence[Photo], context: Context
    ) -> Figure:
        """Draw the images as the model sees them, each above bars of its classes."""
        from matplotlib.layout_engine import ConstrainedLayoutEngine

        classes_of_images = [
            self.rows(p, photo, context) for p, photo in zip(predictions, photos, strict=True)
        ]
        rows = math.ceil(len(photos) / MAX_ACROSS)
        columns = math.ceil(len(photos) / rows)
        tall = max(photo.image.shape[0] / photo.image.shape[1] for photo in photos)
        max_classes = max(map(len, classes_of_images))
        names = [figures.wrap(photo.path.name, WIDTH, 9) for photo in photos]
        extra_lines = max(name.count('\n') for name in names)
        heights = [WIDTH * tall + 0.3 + 0.15 * extra_lines, LINE * (max_classes + 1)] * rows
        layout = ConstrainedLayoutEngine(h_pad=0.02, hspace=0)
        figure = figures.new_figure((WIDTH * columns, sum(heights)), layout)
        grid = figure.add_gridspec(2 * rows, columns, height_ratios=heights)
        for i, (photo, name, image_classes) in enumerate(
            zip(photos, names, classes_of_images, strict=True)
        ):
            line, column = divmod(i, columns)
            picture = figures.as_picture(photo.image)
            above, below = (figure.add_subplot(grid[2 * line + part, column]) for part in (0, 1))
            figures.show_image(above, picture, name, size=9)
            above.set_anchor('S')
            _draw_bars(below, image_classes, max_classes)
        return figure

    def caption(self, fields: Fields, context: Context) -> str:
        """Return the class or classes of an example; for mixed examples both, with their shares."""
        if 'label' not in fields:
            return ''
        if np.ndim(fields['label']):
            return _short(
                ', '.join(map(context.class_name, np.flatnonzero(fields['label']).tolist()))
            )
        first = context.class_name(int(fields['label']))
        if (share := float(fields.get('label_weight', 1.0))) == 1:
            return _short(first)
        second = context.class_name(int(fields['label_other']))
        return f'{_short(first, 12)} {share:.2f}  {_short(second, 12)} {1 - share:.2f}'


def top_classes(probs: Float[np.ndarray, ' C'], k: int) -> list[int]:
    """Return the `k` most probable classes, or all if there are fewer; ties go to the first."""
    return (-probs).argsort(kind='stable')[:k].tolist()


def _draw_bars(axes: Axes, classes: Sequence[Mapping[str, Any]], max_classes: int) -> None:
    """Draw a line per class, its name over its bar, the most probable class at the top."""
    positions = range(len(classes))
    shares = [row['probability'] for row in classes]
    axes.barh(positions, shares, height=0.86, color=figures.COLORS[0], alpha=0.3)
    for position, row in zip(positions, classes, strict=True):
        style: dict[str, Any] = {'va': 'center', 'fontsize': 8, 'color': figures.INK}
        axes.text(0.02, position, _short(row['class']), **style)
        axes.text(0.99, position, f'{row["probability"]:.3f}', ha='right', **style)
    axes.set(xlim=(0, 1), ylim=(max_classes + 0.5, -0.5))  # a line of air below
    axes.set_axis_off()


def _short(name: str, most: int = 26) -> str:
    return name if len(name) <= most else f'{name[: most - 1]}…'
