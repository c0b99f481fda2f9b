"""A confusion matrix as a picture."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from matplotlib.colors import LinearSegmentedColormap
from matplotlib.figure import Figure

from vit_jax.array_types import Int
from vit_jax.errors import visible
from vit_jax.viz import figures

NAMED = 40  # classes that have room for names
NUMBERED = 15  # classes that have room for numbers in the cells
SHARES = LinearSegmentedColormap.from_list('shares', ['white', figures.COLORS[0]])


def draw(matrix: Int[np.ndarray, 'C C'], names: Sequence[str], title: str) -> Figure:
    """Draw the share of each true class (row) by predicted class (column), and numbers of examples.

    Args:
      matrix: examples by true class (row) and predicted class (column).
      names: of the classes.
      title: of the picture.
    """
    classes = len(matrix)
    shares = matrix / np.maximum(matrix.sum(axis=1, keepdims=True), 1)
    side = min(max(0.42 * classes, 3.2), 11.0)
    figure = Figure(figsize=(side + 1.6, side + 1.0), layout='constrained')
    axes = figure.add_subplot()
    image = axes.imshow(shares, cmap=SHARES, vmin=0, vmax=1, interpolation='nearest')
    figures.style(axes, title)
    axes.grid(visible=False)
    axes.set_xlabel('predicted', color=figures.FAINT)
    axes.set_ylabel('class', color=figures.FAINT)
    if classes <= NAMED:
        shown = [name if len(name) <= 18 else f'{name[:17]}…' for name in map(visible, names)]
        turned = max(map(len, shown)) > 3
        axes.set_xticks(range(classes), shown, rotation=90 if turned else 0)
        axes.set_yticks(range(classes), shown)
    if classes <= NUMBERED:
        for row, column in np.argwhere(matrix):
            color = 'white' if shares[row, column] > 0.6 else figures.INK
            text = f'{matrix[row, column]:,}'
            axes.text(column, row, text, ha='center', va='center', fontsize=7, color=color)
    bar = figure.colorbar(image, ax=axes, shrink=0.7)
    bar.set_label('share of the class', color=figures.FAINT)
    bar.outline.set_visible(False)
    bar.ax.tick_params(colors=figures.FAINT, labelsize=8, length=0)
    return figure
