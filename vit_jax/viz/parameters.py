"""Parameters of a model as pictures: relative position biases, position embeddings, filters."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from matplotlib.figure import Figure, SubFigure

from vit_jax.errors import UserError
from vit_jax.nn.parameter_pictures import ParameterPictures
from vit_jax.viz import figures

_WIDTH, _MOST_COLUMNS = 9.0, 12  # inches; pictures side by side
_HEADING = 0.35  # inches


def draw(
    parameters: Sequence[ParameterPictures], *, only: int | None = None, title: str = ''
) -> Figure:
    """Draw a section for each parameter, its pictures side by side.

    Numbers are blue below zero, white at zero and red above, on one scale for each parameter,
    given in its heading. RGB pictures are stretched to their own range.

    Args:
      parameters: at least one.
      only: the index of one picture of each parameter, from 0; None for all.
      title: printed above everything.

    Raises:
      UserError: if a parameter has no such picture.
    """
    if only is not None:
        parameters = [_one(p, only) for p in parameters]
    columns = [p.columns or min(len(p.pictures), _MOST_COLUMNS) for p in parameters]
    rows = [-(-len(p.pictures) // n) for p, n in zip(parameters, columns, strict=True)]
    # A few pictures do not fill the page.
    least = min(max(*columns, 3), 4)
    width, across = _WIDTH * least / 4, [max(n, least) for n in columns]
    heights = [n * width / m + _HEADING for n, m in zip(rows, across, strict=True)]
    figure = Figure(figsize=(width, sum(heights) + _HEADING), layout='constrained')
    figure.suptitle(title, x=0.01, ha='left', fontsize=11, fontweight='bold', color=figures.INK)
    spec = figure.add_gridspec(len(rows), 1, height_ratios=heights)
    for i, parameter in enumerate(parameters):
        part = figure.add_subfigure(spec[i])
        _section(part, parameter, rows[i], columns[i], across[i], only or 0)
    return figure


def _one(parameter: ParameterPictures, number: int) -> ParameterPictures:
    count = len(parameter.pictures)
    if not 0 <= number < count:
        raise UserError(
            f'there is no {parameter.each} {number}: {parameter.name} has {count}, 0 to {count - 1}'
        )
    return parameter._replace(pictures=parameter.pictures[number : number + 1], columns=0)


def _section(
    part: SubFigure, parameter: ParameterPictures, rows: int, columns: int, across: int, first: int
) -> None:
    pictures, each = parameter.pictures, parameter.each
    extent = float(np.abs(pictures).max())
    scale = f' (-{extent:.3g} to {extent:.3g})' if pictures.ndim == 3 else ''
    caption = f': {parameter.caption}' if parameter.caption else ''
    heading = f'{parameter.name}{caption}{scale}'
    part.suptitle(heading, x=0.01, ha='left', va='top', fontsize=9, color=figures.INK)
    for i, picture in enumerate(pictures):
        row, column = divmod(i, columns)
        axes = part.add_subplot(rows, across, row * across + column + 1)
        if picture.ndim == 2:
            axes.imshow(picture, cmap='RdBu_r', vmin=-extent, vmax=extent)
        else:
            axes.imshow(figures.as_picture(picture))
        axes.set_axis_off()
        if not parameter.columns:
            axes.set_title(f'{each} {first + i}', fontsize=7, color=figures.INK, pad=2)
