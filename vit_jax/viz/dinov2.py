"""Visualization of self-supervised features: patches colored by principal components."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from vit_jax.array_types import Float, UInt8
from vit_jax.viz import base, batch, figures
from vit_jax.viz.photo import Context, Fields, Photo

if TYPE_CHECKING:
    from matplotlib.figure import Figure

SIDE = 2.4  # inches of an image
TITLES = ('image', 'patches')


class Viz(base.Viz):
    """Show prototypes as rows; colors of patches are comparable across the images of a call."""

    bar: str | None = 'probability'

    def adapt_task(self, task: Any, context: Context) -> Any:
        """Enable patch tokens, which the picture shows."""
        return dataclasses.replace(task, patches=True)

    def rows(self, prediction: Fields, photo: Photo, context: Context) -> list[dict[str, Any]]:
        """Return the most likely prototypes."""
        pairs = zip(prediction['prototype'], prediction['probability'], strict=True)
        return [{'prototype': int(k), 'probability': float(p)} for k, p in pairs]

    def draw(
        self, predictions: Sequence[Fields], photos: Sequence[Photo], context: Context
    ) -> Figure:
        """Draw each image next to its patches, colored by the first principal components.

        As figure 1 of DINOv2, arXiv:2304.07193, without removing the background. Without patch
        tokens, as during a run, images show their prototypes as text.
        """
        if 'patches' not in predictions[0]:
            return super().draw(predictions, photos, context)
        colors = principal_colors([prediction['patches'] for prediction in predictions])
        rows = []
        for photo, patch_colors in zip(photos, colors, strict=True):
            image = figures.as_picture(photo.image, 1)
            side = math.isqrt(image.shape[0] * image.shape[1] // len(patch_colors))
            grid = patch_colors.reshape(image.shape[0] // side, -1, 3)
            panels = image, grid.repeat(side, 0).repeat(side, 1)
            rows.append(list(zip(TITLES, panels, strict=True)))
        return batch.draw_rows(rows, [photo.path.name for photo in photos], SIDE)


def principal_colors(patches: Sequence[Float[np.ndarray, '_ D']]) -> list[UInt8[np.ndarray, '_ 3']]:
    """Color vectors by the first three principal components of all of them."""
    lengths = [len(image_patches) for image_patches in patches]
    rows = np.concatenate(patches)
    rows = rows - rows.mean(0)
    values = rows @ np.linalg.svd(rows, full_matrices=False)[2][:3].T
    values = (values - values.min(0)) / np.maximum(np.ptp(values, 0), 1e-12)
    colors = np.round(255 * values).astype(np.uint8)
    return np.split(colors, np.cumsum(lengths)[:-1])
