"""Charts of measurements: costs, coordinates, goodput, detections, confusion, robustness."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import LinearSegmentedColormap
from matplotlib.figure import Figure
from matplotlib.image import AxesImage
from matplotlib.patches import Patch

from vit_jax.array_types import Float, Int
from vit_jax.errors import visible
from vit_jax.storage import times
from vit_jax.storage.times import Account
from vit_jax.viz import figures

GIB = 2**30
MAX_PARTS = 14  # parts of the time; the others share one bar
TITLES = {'standard': 'standard', 'mup': 'muP'}
BINS = 240
TIME_COLORS = {
    times.STEPS: '#149e78',
    times.DATA: '#c8961a',
    times.EVALUATION: '#2f6fde',
    times.SAVING: '#a24bc4',
    times.START: '#9aa1ae',
    times.RESTORE: '#6f7787',
    times.COMPILE: '#e2661a',
    times.LOST: '#d43d6b',
    times.BETWEEN: '#e4e6eb',
    times.UNKNOWN: '#1f2430',
}
TIME_UNITS = ((3 * 86400, 86400, 'days'), (3 * 3600, 3600, 'hours'), (300, 60, 'minutes'))
MAX_NAMED = 40  # maximum number of classes to show names
MAX_NUMBERED = 15  # maximum number of classes to show numbers in cells
SHARES = LinearSegmentedColormap.from_list('shares', ['white', figures.COLORS[0]])


@dataclasses.dataclass(frozen=True)
class Change:
    """Change of a layer's outputs over all steps.

    Attributes:
      parametrization: 'standard' or 'mup'.
      times: Multiple of the base model's widths.
      layer: Path of a block, or an output of the model.
      rms: Root mean square over entries, averaged over seeds.
    """

    parametrization: str
    times: int
    layer: str
    rms: float


def draw_chip_costs(
    title: str,
    memory: Mapping[str, float],
    usable: float,
    seconds: Mapping[str, float],
    parallel: float = 0.0,
) -> Figure:
    """Draw two panels of bars.

    Args:
      title: Title of the picture.
      memory: Bytes by content.
      usable: Usable bytes of memory per chip.
      seconds: Seconds by part of the model, the longest first.
      parallel: Seconds of copies that run in parallel, drawn pale.
    """
    figure = Figure(figsize=(11, 4.8), layout='constrained')
    figures.heading(figure, title, 10, color=figures.FAINT)
    left, right = figure.subplots(1, 2, width_ratios=(1, 1.3))
    _draw_bars(left, {k: v / GIB for k, v in memory.items()}, figures.COLORS[0])
    used = sum(memory.values())
    figures.style(left, f'memory of a chip: {used / GIB:.3g} of {usable / GIB:.3g} GiB')
    items = list(seconds.items())
    largest = dict(items[:MAX_PARTS])
    if remaining := sum(value for _, value in items[MAX_PARTS:]):
        largest['others'] = remaining
    colors = [figures.COLORS[2]] * len(largest)
    if parallel:
        largest['parallel copies'] = parallel
        colors.append(figures.GRID)
    _draw_bars(right, {k: 1e3 * v for k, v in largest.items()}, colors)
    figures.style(right, 'minimum milliseconds per step')
    return figure


def _draw_bars(axes: Axes, values: Mapping[str, float], color: str | Sequence[str]) -> None:
    names = list(values)
    bars = axes.barh(names, [values[name] for name in names], color=color, height=0.7)
    axes.bar_label(bars, [f'{values[name]:.3g}' for name in names], padding=3, fontsize=8)
    axes.invert_yaxis()
    axes.locator_params(axis='x', nbins=5)
    axes.margins(x=0.12)


def draw_coordinates(changes: Sequence[Change], steps: int) -> Figure:
    """Draw a panel per parametrization on the same axes, with a line per layer."""
    figure = figures.new_figure((9.0, 4.0))
    panels = figure.subplots(1, 2, sharey=True)
    low, high = min(c.rms for c in changes), max(c.rms for c in changes)
    for axes, name in zip(panels, TITLES, strict=True):
        _draw_parametrization(axes, [c for c in changes if c.parametrization == name], TITLES[name])
        figures.log_ticks(axes.yaxis, low, high, labels='{:.2g}'.format)
    panels[0].set_ylabel(f'RMS change by {steps} steps', color=figures.INK)
    handles, labels = panels[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc='outside right center', frameon=False, fontsize=9)
    return figure


def _draw_parametrization(axes: Axes, changes: Sequence[Change], title: str) -> None:
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
    axes.set_xlabel('widths, relative to the base model', color=figures.INK)


def draw_goodput(accounts: Mapping[str, Account]) -> Figure:
    """Draw a panel per run: the share of each part of its time over time."""
    figure = Figure(figsize=(9, 1.2 + 1.7 * len(accounts)), layout='constrained')
    part_names: dict[str, None] = {}
    for i, (name, account) in enumerate(accounts.items()):
        axes = figure.add_subplot(len(accounts), 1, i + 1)
        figures.style(axes, f'{name}: {account.goodput:.1%} steps')
        wall = max(account.wall, 1e-9)
        scale, unit = next(((s, u) for least, s, u in TIME_UNITS if wall >= least), (1, 'seconds'))
        edges = np.linspace(0, wall / scale, BINS + 1)
        bins = times.bin_seconds(account, BINS)
        total = np.array([max(sum(parts.values()), 1e-12) for parts in bins])
        below = np.zeros(BINS)
        for part, color in TIME_COLORS.items():
            share = np.array([parts.get(part, 0.0) for parts in bins]) / total
            if share.any():
                part_names[part] = None
                axes.stairs(below + share, edges, baseline=below, fill=True, color=color)
                below = below + share
        axes.set_xlim(0, edges[-1])
        axes.set_ylim(0, 1)
        axes.set_yticks([0, 0.5, 1], ['0 %', '50 %', '100 %'])
        axes.set_xlabel(unit, color=figures.FAINT, fontsize=9)
    handles = [
        Patch(color=color, label=part) for part, color in TIME_COLORS.items() if part in part_names
    ]
    figure.legend(handles=handles, loc='outside lower center', ncols=5, fontsize=9, frameon=False)
    return figure


def draw_detections(
    rows: Sequence[Mapping[str, Any]],
    curves: Float[np.ndarray, 'R C'],
    matrix: Int[np.ndarray, 'C+1 C+1'],
    title: str,
    threshold: float,
) -> Figure:
    """Draw average precision by class, curves of precision and recall, and the confusion matrix.

    Args:
      rows: `class`, `AP` and `AP50` of each class; classes without objects have no bar.
      curves: Precision of each class at R recalls from 0 to 1, at IoU 0.5; -1 without objects.
      matrix: Number of objects by true class (row) and predicted class (column); the last row and
        column are the background.
      title: Title of the picture.
      threshold: Minimum score of the matrix's predictions.
    """
    names = [str(row['class']) for row in rows]
    measured = [label for label, row in enumerate(rows) if row['AP'] is not None]
    side = _matrix_side(len(matrix))
    panels = max(side + 1.9, 4.6)
    height = max(0.32 * len(measured) + 1.0, panels)
    figure = Figure(figsize=(11.0 + side, height), layout='constrained')
    heights = (panels, height - panels) if height > panels else (1,)  # many classes: higher bars
    grid = figure.add_gridspec(
        len(heights), 3, width_ratios=(5, 4.6, side + 1.4), height_ratios=heights
    )
    bars, lines, cells = (figure.add_subplot(part) for part in (grid[:, 0], grid[0, 1], grid[0, 2]))
    _draw_class_precision(bars, [rows[label] for label in measured])
    _draw_precision_curves(lines, curves[:, measured], [names[label] for label in measured])
    image = _draw_matrix(cells, matrix, [*names, 'background'])
    cells.set_title(f'scores of at least {threshold:g}, IoU 0.5', fontsize=9, color=figures.FAINT)
    _add_share_bar(cells, image)
    figures.heading(figure, title, fontweight='bold')
    return figure


def _draw_class_precision(axes: Axes, rows: Sequence[Mapping[str, Any]]) -> None:
    """Draw the average precision of each class, the highest first, at all thresholds and at 0.5."""
    sorted_rows = sorted(rows, key=lambda row: -row['AP'])
    positions = np.arange(len(sorted_rows))
    axes.barh(
        positions, [row['AP50'] for row in sorted_rows], color=figures.FAINT, height=0.7, alpha=0.4
    )
    bars = axes.barh(positions, [row['AP'] for row in sorted_rows], color=figures.INK, height=0.35)
    axes.bar_label(bars, [f'{row["AP"]:.3f}' for row in sorted_rows], padding=3, fontsize=8)
    axes.set_yticks(positions, [visible(str(row['class'])) for row in sorted_rows])
    axes.set_ylim(len(positions) - 0.4, -0.6)
    axes.set_xlim(0, 1.12)
    axes.set_xlabel('AP (dark), AP50 (light)', color=figures.FAINT)
    figures.style(axes, '')


def _draw_precision_curves(
    axes: Axes, curves: Float[np.ndarray, 'R C'], names: Sequence[str]
) -> None:
    """Draw precision over recall: each class in its color if they are few, and the mean."""
    figures.style(axes, '')
    recalls = np.linspace(0, 1, len(curves))
    is_named = len(names) <= len(figures.COLORS)
    for i, name in enumerate(names):
        color = figures.COLORS[i] if is_named else figures.FAINT
        label = visible(name) if is_named else '_nolegend_'
        width = 1.4 if is_named else 0.6
        axes.plot(recalls, curves[:, i], color=color, linewidth=width, label=label)
    if len(names) > 1:
        axes.plot(recalls, curves.mean(1), color=figures.INK, linewidth=2.4, label='mean')
    axes.set_xlim(0, 1)
    axes.set_ylim(0, 1.03)
    axes.set_xlabel('recall', color=figures.FAINT)
    axes.set_ylabel('precision, IoU 0.5', color=figures.FAINT)
    figures.legend(axes)


def draw_confusion(matrix: Int[np.ndarray, 'C C'], names: Sequence[str], title: str) -> Figure:
    """Draw the confusion matrix: shares of each true class, and numbers of examples.

    Args:
      matrix: Number of examples by true class (row) and predicted class (column).
      names: Class names.
      title: Title of the picture.
    """
    side = _matrix_side(len(matrix))
    figure = Figure(figsize=(side + 1.6, side + 1.0), layout='constrained')
    axes = figure.add_subplot()
    accuracy = np.trace(matrix) / max(matrix.sum(), 1)
    heading = f'{title}: accuracy {accuracy:.3f} of {matrix.sum():,}'
    figures.heading(figure, heading, fontweight='bold')  # names of classes narrow the axes
    _add_share_bar(axes, _draw_matrix(axes, matrix, names))
    return figure


def _matrix_side(classes: int) -> float:
    """Return the side of a confusion matrix in inches."""
    return min(max(0.42 * classes, 3.2), 11.0)


def _draw_matrix(axes: Axes, matrix: Int[np.ndarray, 'C C'], names: Sequence[str]) -> AxesImage:
    """Draw the cells of a confusion matrix, with names and numbers if its classes are few."""
    classes = len(matrix)
    shares = matrix / np.maximum(matrix.sum(axis=1, keepdims=True), 1)
    image = axes.imshow(shares, cmap=SHARES, vmin=0, vmax=1, interpolation='nearest')
    figures.style(axes, '')
    axes.grid(visible=False)
    axes.set_xlabel('predicted', color=figures.FAINT)
    axes.set_ylabel('class', color=figures.FAINT)
    if classes <= MAX_NAMED:
        short_names = [name if len(name) <= 18 else f'{name[:17]}…' for name in map(visible, names)]
        is_rotated = max(map(len, short_names)) > 3
        axes.set_xticks(range(classes), short_names, rotation=90 if is_rotated else 0)
        axes.set_yticks(range(classes), short_names)
    if classes <= MAX_NUMBERED:
        for row, column in np.argwhere(matrix):
            color = 'white' if shares[row, column] > 0.6 else figures.INK
            text = f'{matrix[row, column]:,}'
            axes.text(column, row, text, ha='center', va='center', fontsize=7, color=color)
    return image


def _add_share_bar(axes: Axes, image: AxesImage) -> None:
    """Add the colors of a confusion matrix, with numbers."""
    bar = axes.figure.colorbar(image, ax=axes, shrink=0.7)
    bar.set_label('share of the class', color=figures.FAINT)
    bar.outline.set_visible(False)
    bar.ax.tick_params(colors=figures.FAINT, labelsize=8, length=0)


def draw_robustness(
    rows: Sequence[Mapping[str, Any]], errors: Mapping[str, float], title: str
) -> Figure:
    """Draw the accuracy on each set, and the error by corruption and severity.

    Args:
      rows: `set`, `corruption`, `severity` and `accuracy`, see `trainer.robustness.measure`.
      errors: Corruption errors by corruption, and `mCE`, see `trainer.robustness`.
      title: Title of the picture.
    """
    whole = [row for row in rows if not row['corruption']]
    corruptions = list(dict.fromkeys(row['corruption'] for row in rows if row['corruption']))
    shapes = [(draw, items) for draw, items in ((_draw_sets, whole), (_draw_errors, rows)) if items]
    if not corruptions:
        shapes = shapes[:1]
    height = max(0.42 * len(whole), 0.34 * len(corruptions)) + 1.5
    figure = Figure(figsize=(5.6 * len(shapes), max(height, 2.2)), layout='constrained')
    panels = figure.subplots(1, len(shapes), squeeze=False)[0]
    for axes, (draw, items) in zip(panels, shapes, strict=True):
        draw(axes, items, errors)
    figures.heading(figure, title, fontweight='bold')
    return figure


def _draw_sets(axes: Axes, rows: Sequence[Mapping[str, Any]], errors: Mapping[str, float]) -> None:
    del errors
    bars = axes.barh(range(len(rows)), [row['accuracy'] for row in rows], color=figures.COLORS[0])
    axes.bar_label(bars, [f'{row["accuracy"]:.3f}' for row in rows], padding=3, fontsize=8)
    axes.set_yticks(range(len(rows)), [row['set'] for row in rows])
    axes.invert_yaxis()
    axes.set_xlim(0, 1.12)
    figures.style(axes, 'accuracy')


def _draw_errors(
    axes: Axes, rows: Sequence[Mapping[str, Any]], errors: Mapping[str, float]
) -> None:
    corrupted = [row for row in rows if row['corruption']]
    names = list(dict.fromkeys(row['corruption'] for row in corrupted))
    levels = sorted({row['severity'] for row in corrupted})
    table = np.full((len(names), len(levels)), np.nan)
    for row in corrupted:
        table[names.index(row['corruption']), levels.index(row['severity'])] = 1 - row['accuracy']
    mean = f', mCE {errors["mCE"]:.3f}' if 'mCE' in errors else ''
    figures.style(axes, f'error by severity{mean}')
    axes.grid(visible=False)
    axes.imshow(table, cmap=SHARES, vmin=0, vmax=1, aspect='auto', interpolation='nearest')
    for row, column in np.argwhere(np.isfinite(table)):
        color = 'white' if table[row, column] > 0.75 else figures.INK
        text = f'{table[row, column]:.2f}'
        axes.text(column, row, text, ha='center', va='center', fontsize=7, color=color)
    labels = [
        name.replace('_', ' ') + (f'  CE {errors[name]:.2f}' if name in errors else '')
        for name in names
    ]
    axes.set_yticks(range(len(names)), labels)
    axes.set_xticks(range(len(levels)), [str(level) for level in levels])
