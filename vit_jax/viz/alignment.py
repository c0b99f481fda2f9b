"""Attention weights between two sentences as a map, with words on both axes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from vit_jax.array_types import Float
from vit_jax.viz import figures

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

SPACE = '\u2581'  # SentencePiece's mark for the space before a word
TOKEN_CELL, TOKEN_MARGIN = 0.24, 1.6  # inches: of a token, and of the labels


def draw_token_map(
    weights: Float[np.ndarray, 'N M'],
    rows: Sequence[str],
    columns: Sequence[str],
    *,
    names: tuple[str, str],
    title: str = '',
) -> Figure:
    """A map of the weights, queries from top to bottom, keys from left to right.

    Args:
      weights: every row sums to one.
      rows: the pieces that attend (queries).
      columns: the pieces that are attended to (keys).
      names: of the two axes, rows first.
      title: printed above.
    """
    from matplotlib.colors import LinearSegmentedColormap

    size = len(columns) * TOKEN_CELL + TOKEN_MARGIN, len(rows) * TOKEN_CELL + TOKEN_MARGIN
    figure = figures.new_figure((max(size[0], 4.0), max(size[1], 2.5)))
    axes = figure.add_subplot()
    blues = LinearSegmentedColormap.from_list('weights', ['#ffffff', figures.COLORS[0], '#0b1f45'])
    # Evenly spread weights should look pale.
    top = max(0.5, float(weights.max()))
    image = axes.imshow(weights, cmap=blues, vmin=0, vmax=top, interpolation='nearest')
    _label_tokens(axes, rows, columns)
    axes.set_ylabel(names[0], color=figures.FAINT)
    axes.set_xlabel(names[1], color=figures.FAINT)
    axes.xaxis.set_label_position('top')
    bar = figure.colorbar(image, ax=axes, fraction=0.05, pad=0.02, aspect=30, shrink=0.6)
    bar.ax.tick_params(labelsize=8, colors=figures.FAINT, length=0)
    bar.outline.set_visible(False)
    figure.suptitle(title, x=0.01, ha='left', fontsize=11, color=figures.INK)
    return figure


def _label_tokens(axes: Axes, rows: Sequence[str], columns: Sequence[str]) -> None:
    """Label both axes with the pieces, and draw lines between words."""
    style: dict[str, Any] = {'fontsize': 9, 'color': figures.INK}
    axes.set_yticks(range(len(rows)), [_piece_label(piece) for piece in rows], **style)
    axes.set_xticks(
        range(len(columns)), [_piece_label(piece) for piece in columns], rotation=90, **style
    )
    axes.tick_params(length=0, top=True, labeltop=True, bottom=False, labelbottom=False)
    axes.set_yticks([i - 0.5 for i in _word_starts(rows)], minor=True)
    axes.set_xticks([i - 0.5 for i in _word_starts(columns)], minor=True)
    axes.grid(which='minor', color=figures.GRID, linewidth=1)
    axes.tick_params(which='minor', length=0)
    axes.spines[:].set_color(figures.GRID)


def _word_starts(pieces: Sequence[str]) -> list[int]:
    """Indices at which words begin; the end of a sentence, `</s>`, counts as a word."""
    return [i for i, piece in enumerate(pieces) if piece[:1] in (SPACE, '<')]


def _piece_label(piece: str) -> str:
    """The label of a piece; an open box for a space alone."""
    return piece.replace(SPACE, '') or '\u2423'
