"""Learning curves of a run, curves.png, drawn from its metrics.jsonl."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine
from matplotlib.ticker import EngFormatter, MaxNLocator

from vit_jax.storage import paths, run_folder
from vit_jax.storage.run_folder import Series
from vit_jax.viz import figures

FIRST = ('loss', 'accuracy', 'lr', 'images_per_sec', 'tokens_per_sec')
MIXES = ('mixup', 'cutmix')  # keys of `config.task` that mix pairs of training images
SMOOTH_FROM = 60  # minimum number of points for smoothing


def panels(series: Mapping[str, Series]) -> dict[str, list[str]]:
    """Group metrics into panels by the last part of their names, such as `loss` of `test/loss`.

    Common metrics come first, then other evaluation metrics; metrics measured only once come last.
    """
    groups: dict[str, list[str]] = {key: [] for key in FIRST}
    for name in sorted(series, key=lambda n: not n.startswith('train/')):
        prefix, _, key = name.rpartition('/')
        if key in FIRST or prefix != 'train':
            groups.setdefault(key, []).append(name)
    nonempty = [(key, group) for key, group in groups.items() if group]
    nonempty.sort(key=lambda item: all(len(series[name][0]) == 1 for name in item[1]))
    return dict(nonempty)


def remarks(config: Mapping[str, Any], metrics: Iterable[str]) -> dict[str, str]:
    """Return remarks {metric: text} on training metrics that are not comparable with evaluation."""
    task, step = config.get('task') or {}, config.get('step') or {}
    mixes = [key for key in MIXES if task.get(key)]
    reasons = {'train/accuracy': mixes, 'train/loss': list(mixes)}
    if task.get('label_smoothing'):
        reasons['train/loss'].append('label smoothing')
    notes = {name: f'with {", ".join(causes)}' for name, causes in reasons.items() if causes}
    if step.get('ema_decay'):
        evaluated = (name for name in metrics if not name.startswith('train/'))
        notes |= {name: note for name in evaluated if (note := _average_note(config, name))}
    return notes


def _average_note(config: Mapping[str, Any], metric: str) -> str:
    """Name the average that an evaluation measures; '' for none."""
    entry = (config.get('evals') or {}).get(metric.partition('/')[0]) or {}
    if (decay := entry.get('ema_decay')) is None:
        return 'EMA weights'
    return f'EMA weights {decay}' if decay else ''


def plot_curves(
    workdir: str | paths.Path, config: Mapping[str, Any] | None = None
) -> paths.Path | None:
    """Draw `curves.png` into a run folder.

    Args:
      workdir: Run folder.
      config: Config of the run, from which remarks on the metrics are derived.

    Returns:
      The picture's path; None if there is nothing to draw.
    """
    workdir = paths.path(workdir)
    series = run_folder.read_series(workdir)
    if not (groups := panels(series)):
        return None
    figure = draw(series, groups, workdir.name, remarks(config or {}, series))
    return figures.save(figure, workdir / run_folder.CURVES, dpi=130)


def draw(
    series: dict[str, Series],
    groups: dict[str, list[str]],
    title: str,
    remarks: Mapping[str, str] | None = None,
) -> Figure:
    """Draw one panel per group, at most three in a row; each prefix has one color.

    A note counts the groups beyond the first figures.MAX_PANELS.

    Args:
      series: All metrics.
      groups: See `panels`.
      title: Title above all panels.
      remarks: {metric: text} for the legend.
    """
    omitted = len(groups) - figures.MAX_PANELS
    groups = dict(itertools.islice(groups.items(), figures.MAX_PANELS))
    columns = 2 if len(groups) in (2, 4) else min(3, len(groups))
    rows = math.ceil(len(groups) / columns)
    layout = ConstrainedLayoutEngine(w_pad=0.12, h_pad=0.1, wspace=0.02, hspace=0.04)
    figure = Figure(figsize=(5.2 * columns, 3.1 * rows + 0.5), layout=layout)
    figures.heading(figure, title, 13)
    prefixes = list(dict.fromkeys(n.rpartition('/')[0] for g in groups.values() for n in g))
    colors = {p: figures.COLORS[i % len(figures.COLORS)] for i, p in enumerate(prefixes)}
    last = max(int(series[name][0][-1]) for group in groups.values() for name in group)
    for i, (key, group) in enumerate(groups.items()):
        axes = figure.add_subplot(rows, columns, i + 1)
        figures.style(axes, figures.metric_words(key))
        for name in group:
            prefix = name.rpartition('/')[0]
            label = ', '.join(filter(None, (prefix, (remarks or {}).get(name))))
            _draw_line(axes, series[name], colors[prefix], label, smooth=key != 'lr')
        _scale(axes, key, last, bottom=i + columns >= len(groups))
        figures.legend(axes)
    if omitted > 0:
        figures.footnote(figure, f'{omitted} more metrics are in {run_folder.METRICS}')
    return figure


def _draw_line(axes: Axes, series: Series, color: str, label: str, smooth: bool) -> None:
    steps, values = series
    line = values
    if smooth and len(values) >= SMOOTH_FROM and np.isfinite(values).all():
        axes.plot(steps, values, color=color, linewidth=0.8, alpha=0.3)
        line = running_mean(values, len(values) // 60)
    axes.plot(
        steps,
        line,
        color=color,
        linewidth=1.8,
        marker='o' if len(values) < 30 else None,
        markersize=3.5,
        label=f'{label}  {_number(values[-1])}',
    )


def running_mean(values: np.ndarray, radius: int) -> np.ndarray:
    """Average over up to `radius` points on either side."""
    total = np.concatenate([[0.0], np.cumsum(values)])
    indices = np.arange(len(values))
    low, high = np.maximum(indices - radius, 0), np.minimum(indices + radius + 1, len(values))
    return (total[high] - total[low]) / (high - low)


def _number(value: float) -> str:
    if value and (abs(value) < 1e-3 or abs(value) >= 1e6):
        return f'{value:.1e}'
    return f'{value:,.0f}' if abs(value) >= 100 else f'{value:.4g}'


def _scale(axes: Axes, key: str, last: int, bottom: bool) -> None:
    axes.set_xlim(0, last * 1.02)
    axes.xaxis.set_major_locator(MaxNLocator(6, integer=True))
    axes.xaxis.set_major_formatter(EngFormatter(sep=''))
    if key == 'lr' or key.endswith('_per_sec'):
        axes.set_ylim(0, axes.dataLim.y1 * 1.25 or 1)
        axes.yaxis.set_major_formatter('{x:g}' if key == 'lr' else figures.short_rate)
    if bottom:
        axes.set_xlabel('step', color=figures.FAINT, fontsize=9)
