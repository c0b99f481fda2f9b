"""The picture of a study: the course of its trials, and their final values over each dimension."""

from __future__ import annotations

import pathlib
from collections.abc import Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine
from optuna.trial import FrozenTrial, TrialState

from vit_jax.errors import UserError
from vit_jax.sweeps import space, status
from vit_jax.sweeps.study import Study, state_name
from vit_jax.viz import figures, names

MARKS = {TrialState.COMPLETE: 'o', TrialState.PRUNED: 'x'}


def plot(study: Study, path: str | pathlib.Path) -> pathlib.Path:
    """Draw the course of every trial, and its final value over each dimension.

    Pruned trials have no final value; they are drawn at the worse edge.

    Raises:
      UserError: if no trial has ended with a value.
      OSError: if the file cannot be written.
    """
    shown = [t for t in study.trials(*status.ENDED) if t.value is not None]
    if not shown:
        raise UserError(f'no trial of the study {study.name!r} has ended with a value')
    return figures.save(draw(study, shown), path)


def draw(study: Study, trials: Sequence[FrozenTrial]) -> Figure:
    """Draw one panel for the courses, if there are any, and one for each dimension, at most three
    in a row.
    """
    dimensions = study.sweep.dimensions()
    courses = any(len(trial.intermediate_values) > 1 for trial in trials) or not dimensions
    panels = courses + len(dimensions)
    columns = {1: 1, 2: 2, 4: 2}.get(panels, 3)
    height = -(-panels // columns)
    layout = ConstrainedLayoutEngine(w_pad=0.12, h_pad=0.1, wspace=0.02, hspace=0.04)
    figure = Figure(figsize=(4.6 * columns, 3.2 * height + 0.5), layout=layout)
    tally = ', '.join(f'{n} {state}' for state, n in status.counts(study).items() if n)
    measured = names.title(study.sweep.metric)
    separator = '\n' if columns == 1 else ' '
    title = f'{study.name}: {measured}{separator}of {tally}'
    figure.suptitle(title, x=0.01, ha='left', fontsize=13, color=figures.INK)
    winner = status.best(study).number if status.candidates(study) else None
    axes = [figure.add_subplot(height, columns, i + 1) for i in range(panels)]
    if courses:
        _courses(axes[0], trials, winner)
    _legend(axes[0], trials, winner)
    edge = 0.03 if study.sweep.direction == 'maximize' else 0.97
    titles = names.of_keys(list(dimensions))
    for panel, words, (name, dimension) in zip(
        axes[courses:], titles, dimensions.items(), strict=True
    ):
        figures.style(panel, words)
        _dimension(panel, trials, winner, name, dimension, edge)
    for panel in axes:
        panel.set_ylabel(measured, color=figures.FAINT, fontsize=9)
    return figure


def _color(trial: FrozenTrial, winner: int | None) -> str:
    if trial.number == winner:
        return figures.COLORS[1]
    return figures.COLORS[0] if trial.state == TrialState.COMPLETE else figures.FAINT


def _courses(axes: Axes, trials: Sequence[FrozenTrial], winner: int | None) -> None:
    figures.style(axes, 'Evaluations')
    for trial in sorted(trials, key=lambda t: (t.number == winner, t.state == TrialState.COMPLETE)):
        steps = sorted(trial.intermediate_values)
        values = [trial.intermediate_values[step] for step in steps]
        color, is_best = _color(trial, winner), trial.number == winner
        axes.plot(steps, values, color=color, linewidth=2 if is_best else 1, alpha=0.9)
        axes.plot(steps[-1:], values[-1:], MARKS[trial.state], color=color, markersize=5)
    axes.set_xlabel('step', color=figures.FAINT, fontsize=9)


def _legend(axes: Axes, trials: Sequence[FrozenTrial], winner: int | None) -> None:
    shown = {}  # a trial of each kind
    for trial in trials:
        shown['best' if trial.number == winner else state_name(trial)] = trial
    for label, trial in sorted(shown.items()):
        color, mark = _color(trial, winner), MARKS[trial.state]
        axes.plot([], [], mark, color=color, label=label, markersize=5)
    axes.legend(frameon=False, fontsize=9, labelcolor='linecolor', handlelength=1)


def _dimension(
    axes: Axes,
    trials: Sequence[FrozenTrial],
    winner: int | None,
    name: str,
    dimension: space.Dimension,
    edge: float,
) -> None:
    xs = positions(axes, dimension, [trial.params[name] for trial in trials])
    if len({*xs}) == len(xs) and all(t.params.keys() == {name} for t in trials):
        # Nothing else differs: a curve.
        ended = zip(xs, trials, strict=True)
        line = sorted((x, t.values[0]) for x, t in ended if t.state == TrialState.COMPLETE)
        axes.plot(*zip(*line, strict=True), color=figures.COLORS[0], linewidth=1, alpha=0.6)
    for x, trial in zip(xs, trials, strict=True):
        # The last value of a pruned trial is from an early step, not comparable to a final one.
        at_edge = winner is not None and trial.state != TrialState.COMPLETE
        is_best = trial.number == winner
        axes.plot(
            x,
            edge if at_edge else trial.values[0],
            MARKS[trial.state],
            color=_color(trial, winner),
            transform=axes.get_xaxis_transform() if at_edge else axes.transData,
            markersize=9 if is_best else 6,
            zorder=4 if is_best else 3,
        )
    axes.margins(y=0.15)


def positions(axes: Axes, dimension: space.Dimension, values: Sequence[Any]) -> list[float]:
    """Set the scale and ticks of the horizontal axis, and return the positions of the values."""
    if isinstance(dimension, space.Range):
        if dimension.log:
            axes.set_xscale('log')
            figures.log_ticks(axes.xaxis, dimension.low, dimension.high, words='{:g}'.format)
            axes.set_xlim(dimension.low / 1.2, dimension.high * 1.2)
        return [float(v) for v in values]
    choices = list(dimension.values)
    if all(isinstance(v, (int, float)) and not isinstance(v, bool) for v in choices):
        choices.sort()
    axes.set_xticks(np.arange(len(choices)), [status.number(v) for v in choices])
    axes.set_xlim(-0.5, len(choices) - 0.5)
    # Side by side, as many trials have the same value.
    spread = 0.3 * np.linspace(-1, 1, len(values)) if len(values) > len(choices) else 0.0
    return list(np.array([choices.index(v) for v in values]) + spread)
