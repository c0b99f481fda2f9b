"""Pictures of several examples, as a grid of images or a table of texts, and of loading stages."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np

from vit_jax.array_types import UInt8
from vit_jax.errors import one_line
from vit_jax.viz import figures

if TYPE_CHECKING:
    from matplotlib.figure import Figure

MAX_ACROSS = 8  # images per row
SIDE = 1.9  # inches of an image
MIN_PIXELS = 128  # minimum of the shorter side of a picture in a row
LINE = 0.3  # inches of a line of text
Panels = list[tuple[str, UInt8[np.ndarray, '_ _ C']]]  # pictures with titles


def draw_images(images: Sequence[np.ndarray], captions: Sequence[str]) -> Figure:
    """Draw a grid of images [H W C] with captions; their axes are the first ones of the figure.

    Frames of a clip or views of an image, [T H W C], are shown side by side.
    """
    images = [np.concatenate(list(image.reshape(-1, *image.shape[-3:])), 1) for image in images]
    num_rows = math.ceil(len(images) / MAX_ACROSS)
    num_columns = math.ceil(len(images) / num_rows)
    aspect = max(image.shape[0] / image.shape[1] for image in images)
    captions = [figures.wrap(caption, SIDE, 8) for caption in captions]
    lines = 1 + max(caption.count('\n') for caption in captions)
    size = (SIDE * num_columns, (SIDE * aspect + LINE * lines) * num_rows)
    figure = figures.new_figure(size)
    grid = figure.subplots(num_rows, num_columns, squeeze=False).flat
    for axes, image, caption in zip(grid, images, captions, strict=False):
        figures.show_image(axes, figures.as_picture(image), caption)
    for axes in grid[len(images) :]:
        axes.set_axis_off()
    return figure


def draw_rows(rows: Sequence[Panels], names: Sequence[str], side: float = SIDE) -> Figure:
    """Draw a row of titled pictures per file; the first title includes the file's name.

    Args:
      rows: Pictures of each file; within a row all have the same shape.
      names: File names.
      side: Width of a picture in inches.
    """
    columns = max(map(len, rows))
    heights = [side * row[0][1].shape[0] / row[0][1].shape[1] + LINE for row in rows]
    figure = figures.new_figure((side * columns, sum(heights)))
    grid = figure.subplots(
        len(rows), columns, squeeze=False, gridspec_kw={'height_ratios': heights}
    )
    for line, row, name in zip(grid, rows, names, strict=True):
        for i, (axes, (title, picture)) in enumerate(zip(line, row, strict=False)):
            enlarged = figures.as_picture(picture, MIN_PIXELS)
            figures.show_image(axes, enlarged, title if i else f'{name}: {title}')
        for axes in line[len(row) :]:
            axes.set_axis_off()
    return figure


def draw_texts(texts: Sequence[Mapping[str, str]]) -> Figure:
    """Draw a table of sentences, with {side: text} for each example."""
    names = list(texts[0])
    figure = figures.new_figure((6.5 * len(names), LINE * (len(texts) + 2)))
    axes = figure.add_subplot()
    axes.set(xlim=(0, len(names)), ylim=(len(texts) + 0.5, -1.5))
    axes.set_axis_off()
    for column, name in enumerate(names):
        axes.text(column, -1, name, fontsize=10, fontweight='bold', color=figures.INK)
        for line, text in enumerate(texts):
            short_text = text[name] if len(text[name]) < 90 else f'{text[name][:88]} …'
            axes.text(column, line, short_text, fontsize=8, color=figures.INK)
    return figure


def draw_stages(seconds: Mapping[str, float]) -> Figure:
    """Draw a bar per stage, from top to bottom.

    Args:
      seconds: Time per example, by stage.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 1.2 + 0.34 * len(seconds)), layout='constrained')
    axes = figure.add_subplot()
    figures.style(axes, f'{1 / sum(seconds.values()):,.0f} examples/s on one core')
    times = [1e3 * value for value in seconds.values()]
    bars = axes.barh(range(len(times)), times, height=0.7, color=figures.COLORS[0])
    axes.bar_label(bars, [f'{time:.2g} ms' for time in times], padding=4, color=figures.INK)
    axes.set_yticks(range(len(times)), [one_line(name) for name in seconds])
    axes.invert_yaxis()
    axes.margins(x=0.15)
    axes.grid(visible=False, axis='y')
    axes.set_xlabel('milliseconds per example', color=figures.FAINT)
    return figure
