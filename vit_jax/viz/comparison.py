"""Comparison of several runs by their metrics.jsonl."""

from __future__ import annotations

import dataclasses
import fnmatch
import math
from collections.abc import Sequence

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from vit_jax.errors import UserError, nearest
from vit_jax.storage import paths, run_folder
from vit_jax.storage.run_folder import Series
from vit_jax.viz import figures

AXES = ('steps', 'minutes')
BARS = '*'  # in a metric's name: draw the last values of all matching metrics as bars

FALLING = ('loss', 'error', 'perplexity', 'step_sec')  # substrings of metrics to minimize
GROWING = ('accuracy', 'bleu', '_shot', 'per_sec')


@dataclasses.dataclass(frozen=True)
class History:
    """Logged metrics of a run.

    Attributes:
      name: Name of the run.
      series: (steps, values) of each metric.
    """

    name: str
    series: dict[str, Series]

    @property
    def steps(self) -> int:
        """Last logged step."""
        return max(int(steps[-1]) for steps, _ in self.series.values())

    def minutes(self, steps: np.ndarray) -> np.ndarray:
        """Return minutes of training up to each of `steps`, without evaluations and saving."""
        at, seconds = self.series['train/step_sec']  # means since the previous line
        elapsed = np.cumsum(np.diff(at, prepend=0) * seconds)
        return np.interp(steps, [0, *at], [0, *elapsed]) / 60

    def last(self, metric: str) -> float | None:
        """Return the last value of a metric; None if it was not logged."""
        return float(self.series[metric][1][-1]) if metric in self.series else None

    def rate(self) -> tuple[str, float] | None:
        """Return the median throughput per second, of 'tokens' or 'images'."""
        for unit in ('tokens', 'images'):
            if (throughput := self.series.get(f'train/{unit}_per_sec')) is not None:
                return unit, float(np.median(throughput[1]))
        return None

    def first_step_at(self, metric: str, value: float, falls: bool) -> int | None:
        """Return the first step at which a metric reached `value`; None if never."""
        steps, values = self.series[metric]
        has_reached = values <= value if falls else values >= value
        return int(steps[has_reached.argmax()]) if has_reached.any() else None


def read(folders: Sequence[str]) -> list[History]:
    """Read the histories of runs, named by their folders; see `labels`.

    Raises:
      UserError: if a folder has no logged metrics.
    """
    histories = []
    for folder, name in zip(folders, labels(folders), strict=True):
        series = run_folder.read_series(paths.path(folder))
        if 'train/step_sec' not in series:
            raise UserError(f'{folder!r} has no run with logged metrics')
        histories.append(History(name, series))
    return histories


def labels(folders: Sequence[str]) -> list[str]:
    """Return names of run folders, with parents of plain numbers; full paths if names collide."""
    names = [_label(paths.absolute(folder)) for folder in folders]
    return names if len(set(names)) == len(names) else list(folders)  # sweep/0/run, sweep/1/run


def _label(folder: paths.Path) -> str:
    parent = f'{folder.parent.name}/' if folder.name.isdecimal() else ''
    return f'{parent}{folder.name}'


def find_metrics(histories: Sequence[History], metric: str) -> list[str]:
    """Find the metrics that match a name, or a pattern with `*`, in the order of the runs.

    Raises:
      UserError: if no metric matches.
    """
    all_names = list(dict.fromkeys(name for history in histories for name in history.series))
    if not (matches := [name for name in all_names if fnmatch.fnmatchcase(name, metric)]):
        raise UserError(nearest('metric', metric, all_names))
    return matches


def evaluation_metrics(histories: Sequence[History]) -> list[str]:
    """Return the evaluation metrics, metrics of all runs first; without any, the training loss."""
    names = dict.fromkeys(name for history in histories for name in history.series)
    metrics = [name for name in names if not name.startswith('train/')]
    metrics.sort(key=lambda name: not all(name in history.series for history in histories))
    return metrics or ['train/loss']


def smaller_is_better(histories: Sequence[History], metric: str) -> bool:
    """Return whether smaller is better, by the metric's name or else by its course in the runs."""
    for endings, is_smaller_better in ((FALLING, True), (GROWING, False)):
        if any(word in metric for word in endings):
            return is_smaller_better
    curves = [history.series[metric][1] for history in histories if metric in history.series]
    return bool(sum(values[-1] - values[0] for values in curves) < 0)


def draw(histories: Sequence[History], metrics: Sequence[str], x: str = 'steps') -> Figure:
    """Draw a panel per metric: its history, or for a pattern with `*` the last values as bars.

    Bars with different units get separate panels. A note counts those beyond figures.MAX_PANELS.

    Args:
      histories: Runs, each with its own color.
      metrics: Names or patterns.
      x: 'steps' or 'minutes'.
    """
    all_panels = [panel for metric in metrics for panel in _panels(histories, metric)]
    panels = all_panels[: figures.MAX_PANELS]
    columns = 2 if len(panels) in (2, 4) else min(3, len(panels))
    rows = math.ceil(len(panels) / columns)
    figure = Figure(figsize=(5.2 * columns, 3.3 * rows), layout='constrained')
    for i, (metric, names) in enumerate(panels):
        axes = figure.add_subplot(rows, columns, i + 1)
        if BARS in metric:
            figures.style(axes, _title(metric, names))
            _draw_bars(axes, histories, names, metric)
        else:
            figures.style(axes, figures.title(metric))
            _draw_histories(axes, histories, metric, x)
        figures.legend(axes)
    if omitted := len(all_panels) - len(panels):
        figures.footnote(figure, f'{omitted} more metrics are in the table')
    return figure


def _panels(histories: Sequence[History], metric: str) -> list[tuple[str, list[str]]]:
    """Return the metrics of each panel: a single one, or matches with the same unit."""
    if BARS not in metric:
        return [(metric, [metric])]
    matches = find_metrics(histories, metric)
    units = dict.fromkeys(map(figures.unit, matches))
    return [(metric, [name for name in matches if figures.unit(name) == unit]) for unit in units]


def _title(pattern: str, names: Sequence[str]) -> str:
    """Return the title of a panel of bars: their unit and data."""
    if len(names) == 1:
        return figures.title(names[0])
    prefix, unit = pattern.rpartition('/')[0], figures.unit(names[0])
    return figures.title(unit if BARS in prefix else f'{prefix}/{unit}')


def _draw_histories(axes: Axes, histories: Sequence[History], metric: str, x: str) -> None:
    for history, color in zip(histories, _colors(histories), strict=True):
        if metric in history.series:
            steps, values = history.series[metric]
            positions = history.minutes(steps) if x == 'minutes' else steps
            mark = 'o' if len(values) < 30 else None
            axes.plot(
                positions,
                values,
                color=color,
                label=history.name,
                marker=mark,
                markersize=3.5,
                lw=1.8,
            )
    if _spread(axes.dataLim.intervaly) > 30:
        axes.set_yscale('log')
        figures.log_ticks(axes.yaxis, *axes.dataLim.intervaly, labels='{:g}'.format)
    axes.set_xlim(left=0)
    axes.set_xlabel(x, color=figures.FAINT, fontsize=9)


def _spread(interval: np.ndarray) -> float:
    """Return the largest value over the smallest; 0 if one is not positive."""
    low, high = interval
    return high / low if low > 0 else 0.0


def _draw_bars(
    axes: Axes, histories: Sequence[History], metrics: Sequence[str], pattern: str
) -> None:
    width, before = 0.8 / len(histories), pattern.index(BARS)
    positions = np.arange(len(metrics))
    for i, (history, color) in enumerate(zip(histories, _colors(histories), strict=True)):
        values = [history.last(metric) for metric in metrics]
        shift = (i - (len(histories) - 1) / 2) * width
        heights = [0.0 if value is None else value for value in values]
        bars = axes.bar(positions + shift, heights, 0.92 * width, color=color, label=history.name)
        texts = ['' if value is None else f'{value:.3g}' for value in values]
        axes.bar_label(bars, texts, fontsize=8, color=figures.FAINT, padding=2)
    labels = [figures.metric_words(metric[before:]) for metric in metrics]
    axes.set_xticks(positions, labels if len(labels) > 1 else [''])  # the title names a single one
    axes.margins(y=0.35)  # room for the legend


def _colors(histories: Sequence[History]) -> list[str]:
    return [figures.COLORS[i % len(figures.COLORS)] for i in range(len(histories))]
