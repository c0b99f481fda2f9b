"""The examples of a batch, beside one another, as the task of the config shows them.

The module of a task, see `predictions`, may have

    caption(example, class_names)          the line above an example
    mark(axes, example, class_names)       what is drawn on its image

where an example is {name: array} of one row of the batch.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from types import ModuleType

import numpy as np
from jaxtyping import UInt8
from matplotlib.figure import Figure

from vit_jax.viz import figures

Example = Mapping[str, np.ndarray]
ACROSS = 8  # at most, images in a row
SIDE = 1.9  # inches of an image
LINE = 0.3  # inches of a line of text


def draw(
    images: UInt8[np.ndarray, 'B H W C'],
    examples: Sequence[Example],
    class_names: Sequence[str],
    viz: ModuleType | None,
) -> Figure:
    """A grid of images.

    Args:
      images: that the model gets.
      examples: what else the batch has of them.
      class_names: of the data.
      viz: the module of the task; None if there is none.
    """
    caption = getattr(viz, 'caption', lambda example, class_names: '')
    mark = getattr(viz, 'mark', lambda axes, example, class_names: None)
    across = min(ACROSS, len(examples))
    down = math.ceil(len(examples) / across)
    tall = images.shape[1] / images.shape[2]
    size = (SIDE * across, (SIDE * tall + LINE) * down)
    figure = Figure(figsize=size, layout='constrained')
    grid = figure.subplots(down, across, squeeze=False).flat
    for axes, image, example in zip(grid, images, examples, strict=False):
        figures.show_image(axes, figures.as_picture(image), caption(example, class_names))
        mark(axes, example, class_names)
    for axes in grid[len(examples) :]:
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
            axes.text(column, line, shown, fontsize=8, color=figures.INK, parse_math=False)
    return figure
