"""The time of each stage of the data pipeline, as bars."""

from __future__ import annotations

from collections.abc import Mapping

from matplotlib.figure import Figure

from vit_jax.errors import one_line
from vit_jax.viz import figures


def draw(seconds: Mapping[str, float]) -> Figure:
    """Draw a bar a stage, in the order of the stages from top to bottom.

    Args:
      seconds: of an example, by stage.
    """
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
    axes.set_xlabel('milliseconds an example', color=figures.FAINT)
    return figure
