"""A picture of a study: the final metric over one dimension, a curve for each value of another."""

from __future__ import annotations

import collections
import dataclasses
import pathlib
import statistics
from collections.abc import Mapping
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from optuna.trial import TrialState

from vit_jax.errors import UserError, nearest
from vit_jax.sweeps import status
from vit_jax.sweeps.study import Study
from vit_jax.viz import figures, names

Curve = Mapping[float, float]


@dataclasses.dataclass(frozen=True)
class Dimensions:
    """The dimensions of the picture, by their places in the config.

    Attributes:
      x: of the horizontal axis; numbers above 0.
      by: with a curve for each value; none for a single curve.
      panel: with a panel for each value; none for a single panel.
    """

    x: str
    by: str | None = None
    panel: str | None = None


def plot(study: Study, shown: Dimensions, path: str | pathlib.Path) -> pathlib.Path:
    """Draw the mean final metric of complete trials over `x`, with the best point of each curve.

    Raises:
      UserError: for a dimension that the study has not, or one of no positive numbers, or if no
        trial is complete.
      OSError: if the file cannot be written.
    """
    return figures.save(_draw(study, shown, read(study, shown)), path)


def read(study: Study, shown: Dimensions) -> dict[Any, dict[Any, Curve]]:
    """The curves of each panel: the mean metric by x; raises UserError as `plot`."""
    known = study.sweep.dimensions()
    for name in (shown.x, shown.by, shown.panel):
        if name is not None and name not in known:
            raise UserError('sweep plot: ' + nearest('dimension', name, known))
    found: Any = collections.defaultdict(lambda: collections.defaultdict(dict))
    for trial in study.trials(TrialState.COMPLETE):
        panel, curve = (trial.params[n] if n else None for n in (shown.panel, shown.by))
        x = trial.params[shown.x]
        if isinstance(x, (str, bool)) or x <= 0:
            raise UserError(f'sweep plot: --x {shown.x} has the value {x!r}, no positive number')
        found[panel][curve].setdefault(x, []).append(trial.values[0])
    if not found:
        raise UserError(f'no trial of the study {study.name!r} is complete')
    return {
        panel: {
            name: {x: statistics.fmean(values) for x, values in sorted(points.items())}
            for name, points in curves.items()
        }
        for panel, curves in found.items()
    }


def _draw(study: Study, shown: Dimensions, found: Mapping[Any, Mapping[Any, Curve]]) -> Figure:
    figure = figures.new((4.8 * len(found) + 0.4, 4.0))
    panels = figure.subplots(1, len(found), sharey=True, squeeze=False)[0]
    for axes, (value, curves) in zip(panels, found.items(), strict=True):
        figures.style(axes, study.name if shown.panel is None else status.number(value))
        _panel(axes, study, shown, curves)
    panels[0].set_ylabel(names.title(study.sweep.metric), color=figures.INK)
    return figure


def _panel(axes: Axes, study: Study, shown: Dimensions, curves: Mapping[Any, Curve]) -> None:
    best = max if study.sweep.direction == 'maximize' else min
    axes.set_xscale('log')
    for i, (value, curve) in enumerate(curves.items()):
        top = best(curve, key=curve.__getitem__)
        name = (
            '' if shown.by is None else f'{names.of_keys([shown.by])[0]} {status.number(value)}, '
        )
        color = figures.COLORS[i % len(figures.COLORS)]
        label = f'{name}best at {top:g}'
        axes.plot([*curve], [*curve.values()], 'o-', color=color, markersize=4, label=label)
        axes.plot([top], [curve[top]], 'o', color=color, markersize=10)
    xs = sorted({x for curve in curves.values() for x in curve})
    axes.set_xticks(xs, [f'{x:g}' for x in xs])
    axes.minorticks_off()
    axes.set_xlabel(names.of_keys([shown.x])[0], color=figures.INK)
    figures.legend(axes)
