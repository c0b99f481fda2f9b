"""Bar charts of the memory and the time on a chip."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from vit_jax.viz import figures

GIB = 2**30
PARTS = 14  # of the time; the others are one bar


def draw(
    title: str,
    memory: Mapping[str, float],
    usable: float,
    seconds: Mapping[str, float],
    beside: float = 0.0,
) -> Figure:
    """Draw two panels of bars.

    Args:
      title: of the picture.
      memory: bytes by content.
      usable: bytes of memory of a chip.
      seconds: by part of the model, the longest first.
      beside: seconds of the copies that run in parallel, a pale bar.
    """
    figure = Figure(figsize=(11, 4.8), layout='constrained')
    figure.suptitle(title, x=0.01, ha='left', fontsize=10, color=figures.FAINT)
    left, right = figure.subplots(1, 2, width_ratios=(1, 1.3))
    _bars(left, {k: v / GIB for k, v in memory.items()}, figures.COLORS[0])
    used = sum(memory.values())
    figures.style(left, f'memory of a chip: {used / GIB:.3g} of {usable / GIB:.3g} GiB')
    items = list(seconds.items())
    shown = dict(items[:PARTS])
    if rest := sum(value for _, value in items[PARTS:]):
        shown['all others'] = rest
    colors = [figures.COLORS[2]] * len(shown)
    if beside:
        shown['copies meanwhile'] = beside
        colors.append(figures.GRID)
    _bars(right, {k: 1e3 * v for k, v in shown.items()}, colors)
    figures.style(right, 'least milliseconds of a step')
    return figure


def _bars(axes: Axes, values: Mapping[str, float], color: str | Sequence[str]) -> None:
    names = list(values)
    bars = axes.barh(names, [values[name] for name in names], color=color, height=0.7)
    axes.bar_label(bars, [f'{values[name]:.3g}' for name in names], padding=3, fontsize=8)
    axes.invert_yaxis()
    axes.locator_params(axis='x', nbins=5)
    axes.margins(x=0.12)
