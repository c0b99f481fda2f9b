"""Visualization of depth: each file next to its depth in colors, with a bar of the scale."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from vit_jax.array_types import Float
from vit_jax.viz import base, figures
from vit_jax.viz.photo import Context, Fields, Photo

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

SIDE = 3.6  # inches of a picture
COLORS = {'depth': 'viridis_r', 'inverse_depth': 'viridis'}  # near is bright
LABELS = {'depth': 'depth in m', 'inverse_depth': 'inverse depth, no unit'}
SHARES = (2, 98)  # percentiles between which colors differ
NARROW = 0.02  # share of the value, below which colors span all values


class Viz(base.Viz):
    """Show depth in meters, or inverse depth up to a scale and a shift, of whole files."""

    whole = True

    def rows(self, prediction: Fields, photo: Photo, context: Context) -> list[dict[str, Any]]:
        """Return the least, the median and the largest value of the map."""
        name, depth = find_map(prediction)
        values = {'min': depth.min(), 'median': np.median(depth), 'max': depth.max()}
        unit = 'm' if name == 'depth' else ''
        return [{'map': name, **{key: float(x) for key, x in values.items()}, 'unit': unit}]

    def draw(
        self, predictions: Sequence[Fields], photos: Sequence[Photo], context: Context
    ) -> Figure:
        """Draw a row for each file: the image as the model sees it, and its depth."""
        heights = [SIDE * photo.image.shape[0] / photo.image.shape[1] + 0.3 for photo in photos]
        figure = figures.new_figure((2.3 * SIDE, sum(heights)))
        grid = figure.subplots(
            len(photos), 2, squeeze=False, gridspec_kw={'height_ratios': heights}
        )
        for (left, right), prediction, photo in zip(grid, predictions, photos, strict=True):
            figures.show_image(left, figures.as_picture(photo.image), photo.path.name)
            draw_map(right, prediction)
        return figure

    def draw_batch(
        self, images: Sequence[np.ndarray] | None, examples: Sequence[Fields], context: Context
    ) -> Figure:
        """Draw the examples of a batch with their depth, if they have it."""
        if images is None or 'depth' not in examples[0]:
            return super().draw_batch(images, examples, context)
        figure = figures.new_figure((2.3 * SIDE, SIDE * len(images)))
        grid = figure.subplots(len(images), 2, squeeze=False)
        for (left, right), image, example in zip(grid, images, examples, strict=True):
            figures.show_image(left, figures.as_picture(image), self.caption(example, context))
            draw_map(right, example)
        return figure


def find_map(fields: Fields) -> tuple[str, Float[np.ndarray, 'H W']]:
    """Return the name and the values of the map among a prediction's arrays."""
    name = next(name for name in LABELS if name in fields)
    return name, np.asarray(fields[name], np.float32)


def draw_map(axes: Axes, fields: Fields) -> None:
    """Draw a map in colors with a bar of its scale; unknown depth, 0 in data, is white."""
    name, depth = find_map(fields)
    known = depth[depth > 0] if (depth > 0).any() else depth
    low, high = _span(known)
    shown = np.ma.masked_where((depth <= 0) & (name == 'depth'), depth)
    picture = axes.imshow(shown, cmap=COLORS[name], vmin=low, vmax=high, interpolation='nearest')
    axes.set(xticks=[], yticks=[])
    axes.set_axis_off()
    figure = axes.figure
    bar = figure.colorbar(picture, ax=axes, fraction=0.05, pad=0.02, extend='both')
    bar.set_label(LABELS[name], color=figures.INK, fontsize=8)
    bar.ax.tick_params(colors=figures.FAINT, labelsize=8)
    bar.outline.set_visible(False)


def _span(values: np.ndarray) -> tuple[float, float]:
    """Return the values between which colors differ, which are never equal."""
    low, high = np.percentile(values, SHARES)
    if high - low < NARROW * abs(high):
        low, high = values.min(), values.max()
    margin = max(NARROW * abs(high) - (high - low), 0) / 2
    return float(low - margin), float(high + margin) or 1.0
