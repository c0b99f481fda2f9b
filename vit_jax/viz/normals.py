"""Visualization of normals: each file next to its normals, whose x, y, z are red, green, blue."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from vit_jax.array_types import Float, UInt8
from vit_jax.viz import base, batch, figures
from vit_jax.viz.batch import Panels
from vit_jax.viz.photo import Context, Fields, Photo

if TYPE_CHECKING:
    from matplotlib.figure import Figure

TITLE = 'normals: right is red, down green, away blue'


class Viz(base.Viz):
    """Show normals of whole files."""

    whole = True
    side = 3.6

    def rows(self, prediction: Fields, photo: Photo, context: Context) -> list[dict[str, Any]]:
        """Return the mean of each component."""
        means = np.asarray(prediction['normals']).mean((0, 1)).tolist()
        return [dict(zip(('x', 'y', 'z'), map(float, means), strict=True))]

    def panels(self, prediction: Fields, photo: Photo) -> Panels:
        """Return the image as the model sees it, and its normals."""
        return [
            ('image', figures.as_picture(photo.image)),
            (TITLE, to_colors(np.asarray(prediction['normals'], np.float32))),
        ]

    def draw_batch(
        self, images: Sequence[np.ndarray] | None, examples: Sequence[Fields], context: Context
    ) -> Figure:
        """Draw the examples of a batch with their normals, if they have them."""
        if images is None or 'normals' not in examples[0]:
            return super().draw_batch(images, examples, context)
        rows: list[Panels] = [
            [('image', figures.as_picture(image)), (TITLE, to_colors(example['normals']))]
            for image, example in zip(images, examples, strict=True)
        ]
        return batch.draw_rows(rows, [str(i) for i in range(len(rows))], self.side)


def to_colors(normals: Float[np.ndarray, 'H W 3']) -> UInt8[np.ndarray, 'H W 3']:
    """Convert components from -1 to 1 to bytes; unknown normals are white."""
    colors = np.round(255 * (np.asarray(normals) + 1) / 2).clip(0, 255)
    return np.where((np.asarray(normals) != 0).any(-1, keepdims=True), colors, 255).astype(np.uint8)
