"""Pictures of several examples: a grid of images, or a table of texts."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import numpy as np
from matplotlib.figure import Figure

from vit_jax.viz import figures

ACROSS = 8  # at most, images in a row
SIDE = 1.9  # inches of an image
LINE = 0.3  # inches of a line of text


def draw_images(images: Sequence[np.ndarray], captions: Sequence[str]) -> Figure:
    """Draw a grid of images [H W C] with captions above; their axes are the figure's first ones.

    The frames of a clip or the views of an image, [T H W C], are shown side by side.
    """
    images = [np.concatenate(list(image.reshape(-1, *image.shape[-3:])), 1) for image in images]
    across = min(ACROSS, len(images))
    down = math.ceil(len(images) / across)
    tall = max(image.shape[0] / image.shape[1] for image in images)
    lines = 1 + max(caption.count('\n') for caption in captions)
    size = (SIDE * across, (SIDE * tall + LINE * lines) * down)
    figure = Figure(figsize=size, layout='constrained')
    grid = figure.subplots(down, across, squeeze=False).flat
    for axes, image, caption in zip(grid, images, captions, strict=False):
        figures.show_image(axes, figures.as_picture(image), caption)
    for axes in grid[len(images) :]:
        axes.set_axis_off()
    return figure


def draw_texts(texts: Sequence[Mapping[str, str]]) -> Figure:
    """A table of sentences, {side: text} an example."""
    names = list(texts[0])
    figure = Figure(figsize=(6.5 * len(names), LINE * (len(texts) + 2)), layout='constrained')
    axes = figure.add_subplot()
    axes.set(xlim=(0, len(names)), ylim=(len(texts) + 0.5, -1.5))
    axes.set_axis_off()
    for column, name in enumerate(names):
        axes.text(column, -1, name, fontsize=10, fontweight='bold', color=figures.INK)
        for line, text in enumerate(texts):
            shown = text[name] if len(text[name]) < 90 else f'{text[name][:88]} …'
            axes.text(column, line, shown, fontsize=8, color=figures.INK)
    return figure
