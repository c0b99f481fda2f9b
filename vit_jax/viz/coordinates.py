"""The picture of a coordinate check: changes of each layer over width, for each parametrization."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING

from vit_jax.viz import figures

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

TITLES = {'standard': 'standard', 'mup': 'muP'}


@dataclasses.dataclass(frozen=True)
class Change:
    """The change of one layer's outputs by all steps.

    Attributes:
      parametrization: 'standard' or 'mup'.
      times: widths, in those of the base model.
      layer: the path of a block, or an output of the model.
      rms: root mean square over the entries, averaged over seeds.
    """

    parametrization: str
    times: int
    layer: str
    rms: float


def draw(changes: Sequence[Change], steps: int) -> Figure:
    """Draw one panel a parametrization on the same axes, and a line for each layer."""
    figure = figures.new((9.0, 4.0))
    panels = figure.subplots(1, 2, sharey=True)
    low, high = min(c.rms for c in changes), max(c.rms for c in changes)
    for axes, name in zip(panels, TITLES, strict=True):
        _panel(axes, [c for c in changes if c.parametrization == name], TITLES[name])
        figures.log_ticks(axes.yaxis, low, high, words='{:.2g}'.format)
    panels[0].set_ylabel(f'RMS change by {steps} steps', color=figures.INK)
    handles, labels = panels[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc='outside right center', frameon=False, fontsize=9)
    return figure


def _panel(axes: Axes, changes: Sequence[Change], title: str) -> None:
    figures.style(axes, title)
    axes.set_xscale('log', base=2)
    axes.set_yscale('log')
    widths = sorted({c.times for c in changes})
    for i, layer in enumerate(dict.fromkeys(c.layer for c in changes)):
        rms = [c.rms for c in changes if c.layer == layer]
        color = figures.COLORS[i % len(figures.COLORS)]
        axes.plot(widths, rms, 'o-', color=color, markersize=4, linewidth=1.6, label=layer)
    axes.set_xticks(widths, [str(width) for width in widths])
    axes.minorticks_off()
    axes.set_xlabel('widths, in those of the base model', color=figures.INK)
