"""Spots of an image, as table rows and drawn on it."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any

from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from vit_jax.viz import base, figures
from vit_jax.viz.photo import Context, Fields, Photo


class Viz(base.Viz):
    """Boxes around spots."""

    def add_flags(self, parser: argparse.ArgumentParser) -> None:
        """Add `--threshold`, the minimum probability of a shown spot."""
        parser.add_argument('--threshold', type=float, default=0.5, help='least probability')

    def rows(self, prediction: Fields, photo: Photo, context: Context) -> list[dict[str, Any]]:
        """The detected spots, with boxes in pixels of the file."""
        found = []
        for box, probs in zip(prediction['boxes'], prediction['probs'], strict=True):
            label = int(probs.argmax())
            if label < len(context.class_names) and probs[label] >= context.flags.threshold:
                corners = photo.to_original(box.reshape(2, 2)).ravel()
                found.append(
                    {
                        'class': context.class_name(label),
                        'probability': float(probs[label]),
                        'box': [float(side) for side in corners],
                    }
                )
        return found

    def draw(
        self, predictions: Sequence[Fields], photos: Sequence[Photo], context: Context
    ) -> Figure:
        """Draw each file with a frame around each spot."""
        figure = Figure(figsize=(3 * len(photos), 3), layout='constrained')
        for i, (prediction, photo) in enumerate(zip(predictions, photos, strict=True)):
            axes = figure.add_subplot(1, len(photos), i + 1)
            figures.show_image(axes, photo.original, photo.path.name)
            for row in self.rows(prediction, photo, context):
                x0, y0, x1, y1 = row['box']
                axes.add_patch(Rectangle((x0, y0), x1 - x0, y1 - y0, fill=False, edgecolor='white'))
        return figure
