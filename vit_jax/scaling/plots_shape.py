"""Star sweeps as a figure: the loss over each dimension, and the optimum of each budget."""

from __future__ import annotations

import numpy as np
from matplotlib import colormaps
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine

from vit_jax.scaling import rows
from vit_jax.scaling.shape import Law, Shapes
from vit_jax.scaling.star import Columns, Ray, Star
from vit_jax.viz import figures

BUDGETS = 5  # at which the law is drawn


def draw(star: Star, shapes: Shapes, columns: Columns, target: float | None = None) -> Figure:
    """A panel for each dimension: runs and the law at several budgets, with its minima joined.

    Colors are budgets, dark for large ones. A star is the optimum for the target.
    """
    count = len(star.rays)
    figure = Figure(figsize=(4.2 * count, 4.4), layout=ConstrainedLayoutEngine(w_pad=0.08))
    for i, (name, ray) in enumerate(star.rays.items()):
        axes = figure.add_subplot(1, count, i + 1)
        law = shapes.laws.get(name)
        noun = name.rpartition('.')[2]
        title = noun if law is None else f'{noun} ~ {_exponent(shapes, name)}'
        _draw_ray(axes, ray, law, target)
        axes.set_xscale('log')
        axes.set_yscale('log')
        figures.style(axes, title)
        ends = [ray.x.min(), ray.x.max(), *([law.best(target)] if law and target else [])]
        for axis, values in ((axes.xaxis, np.array(ends)), (axes.yaxis, ray.y)):
            low, high = float(values.min()), float(values.max())
            figures.log_ticks(axis, low, high, few=True, words=rows.short)
        axes.set_xlabel(noun, color=figures.FAINT, fontsize=9)
        if i == 0:
            axes.set_ylabel(columns.y, color=figures.FAINT, fontsize=9)
    figure.supxlabel(
        f'Lines: the law at budgets {columns.t}, dark for large ones; dots: its minima; '
        'star: that of the target.',
        x=0.01,
        ha='left',
        fontsize=8,
        color=figures.FAINT,
    )
    return figure


def _exponent(shapes: Shapes, name: str) -> str:
    s, band = shapes.exponent(name)
    return f't^{s:.3f}' + (f' [{band[0]:.3f}, {band[1]:.3f}]' if band else '')


def _draw_ray(axes: Axes, ray: Ray, law: Law | None, target: float | None) -> None:
    palette = colormaps['viridis_r']
    low, high = np.log(ray.t.min()), np.log(ray.t.max())
    shade = 0.15 + 0.85 * (np.log(ray.t) - low) / (high - low)
    axes.scatter(ray.x, ray.y, c=shade, cmap=palette, vmin=0, vmax=1, s=16, linewidths=0)
    if law is None:
        return
    ends = ray.x.min(), ray.x.max()
    if target is not None:
        ends = min(ends[0], law.best(target)), max(ends[1], law.best(target))
    x = np.geomspace(*ends, 120)
    budgets = np.geomspace(ray.t.min(), ray.t.max(), BUDGETS)
    for i, t in enumerate(budgets):
        color = palette(0.15 + 0.85 * i / (BUDGETS - 1))
        axes.plot(x, law.value(x, t), color=color, linewidth=1.2)
        if ends[0] <= law.best(t) <= ends[1]:
            best = np.array([law.best(t)])
            axes.plot(best, law.value(best, t), 'o', color=color)
    if target is not None:
        best = np.array([law.best(target)])
        axes.plot(
            best,
            law.value(best, target),
            '*',
            color=figures.COLORS[1],
            markersize=14,
            markeredgecolor='white',
        )
