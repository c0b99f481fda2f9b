"""What a study has found so far: the rows of its table, its best trial, its picture."""

from __future__ import annotations

import collections
import datetime
import pathlib
import shlex
import statistics
from collections.abc import Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine
from optuna.trial import FrozenTrial, TrialState

from vit_jax.errors import UserError
from vit_jax.storage import lock as workdir
from vit_jax.sweeps import space
from vit_jax.sweeps.study import Study
from vit_jax.viz import figures

MARKS = {TrialState.COMPLETE: 'o', TrialState.PRUNED: 'x'}


def counts(study: Study) -> dict[str, int]:
    """How many trials are in each state, or interrupted; a diverged one is pruned too."""
    trials, at_work = study.trials(), workers(study)
    found = collections.Counter(trial.state for trial in trials)
    running = sum(t.state == TrialState.RUNNING and t.number in at_work for t in trials)
    tally = {state.name.lower(): found[state] for state in TrialState}
    return tally | {'running': running, 'interrupted': found[TrialState.RUNNING] - running}


def workers(study: Study) -> dict[int, str]:
    """Who is at work on which trial, as HOST:PID; who is not there has lost its worker."""
    found = {
        trial.number: workdir.holder(study.claim_folder(trial.number))
        for trial in study.trials(TrialState.RUNNING)
    }
    return {n: f'{owner["host"]}:{owner["pid"]}' for n, owner in found.items() if owner}


def rows(study: Study) -> list[list[str]]:
    """A line a trial that has begun: number, state, last step evaluated, value, and its point."""
    at_work = workers(study)
    begun = [trial for trial in study.trials() if trial.state != TrialState.WAITING]
    return [[*_progress(trial, at_work), *_point(study, trial)] for trial in begun]


def _progress(trial: FrozenTrial, at_work: dict[int, str]) -> list[str]:
    return [str(trial.number), outcome(trial, at_work), last_step(trial), value(trial)]


def _point(study: Study, trial: FrozenTrial) -> list[str]:
    return [number(trial.params.get(name)) for name in study.sweep.dimensions()]


def notes(study: Study) -> list[str]:
    """A line for each trial that failed or lost its worker, and one on the time that is left."""
    failed = [
        f'trial {trial.number} failed: {trial.user_attrs.get("error", "")}'
        for trial in study.trials(TrialState.FAIL)
    ]
    return [*failed, *filter(None, [time_left(study)])]


def time_left(study: Study) -> str:
    """How long the present workers will need; empty while nothing tells."""
    open_trials = study.trials(TrialState.RUNNING, TrialState.WAITING)
    spans = [trial.duration for trial in study.trials(*MARKS) if trial.duration]
    if not (spans and open_trials and (at_work := len(workers(study)))):
        return ''
    typical = statistics.median(span.total_seconds() for span in spans)
    seconds = typical * max(1.0, len(open_trials) / at_work)
    each, left = (datetime.timedelta(seconds=round(s)) for s in (typical, seconds))
    return f'about {left} left: {len(open_trials)} trials of {each} (h:mm:ss), workers: {at_work}'


def outcome(trial: FrozenTrial, at_work: dict[int, str]) -> str:
    """The trial's state in a word, or who is at work on it."""
    if trial.state == TrialState.RUNNING:
        worker = at_work.get(trial.number)
        return f'running on {worker}' if worker else 'interrupted'
    return 'diverged' if 'diverged' in trial.user_attrs else trial.state.name.lower()


def last_step(trial: FrozenTrial) -> str:
    """Of its evaluations."""
    return str(trial.last_step) if trial.last_step is not None else '-'


def value(trial: FrozenTrial) -> str:
    """Its final value, or the last one before its end."""
    found = trial.value
    if found is None and trial.last_step is not None:
        found = trial.intermediate_values[trial.last_step]
    return '-' if found is None else f'{found:.4f}'


def number(what: Any) -> str:
    """A value in a table; short if it is a float."""
    if what is None:
        return '-'
    return f'{what:.4g}' if isinstance(what, float) else str(what)


def best(study: Study) -> FrozenTrial:
    """The trial with the best final value; the earlier one of two that are equal.

    Raises:
      UserError: while none is complete.
    """
    complete = study.trials(TrialState.COMPLETE)
    if not complete:
        raise UserError(f'no trial of the study {study.name!r} is complete')
    sign = -1 if study.sweep.direction == 'maximize' else 1
    return min(complete, key=lambda trial: sign * trial.values[0])


def command(study: Study, trial: FrozenTrial) -> str:
    """The command that trains as the trial did, in a new folder beside that of the sweep."""
    point = {**study.sweep.overrides, **trial.params}
    flags = [f'--config.{text}' for text in space.overrides(point)]
    place = ('--workdir', f'{study.folder}-{trial.number:04d}')
    words = ('python', '-m', 'vit_jax', 'train', '--config', study.sweep.config, *flags, *place)
    return shlex.join(words)


def plot(study: Study, path: str | pathlib.Path) -> pathlib.Path:
    """Draws the course of every trial, and its final value over each dimension.

    Trials that were pruned have no final value; they stand at the worse edge.

    Raises:
      UserError: while there is nothing to draw.
      OSError: if the file cannot be written.
    """
    shown = [t for t in study.trials(*MARKS) if t.value is not None]
    if not shown:
        raise UserError(f'no trial of the study {study.name!r} has ended with a value')
    return figures.save(draw(study, shown), path)


def draw(study: Study, trials: Sequence[FrozenTrial]) -> Figure:
    """One panel for the courses and one a dimension, at most three a row."""
    dimensions = study.sweep.dimensions()
    panels = 1 + len(dimensions)
    columns = 2 if panels in (2, 4) else 3
    height = -(-panels // columns)
    layout = ConstrainedLayoutEngine(w_pad=0.12, h_pad=0.1, wspace=0.02, hspace=0.04)
    figure = Figure(figsize=(4.6 * columns, 3.2 * height + 0.5), layout=layout)
    tally = ', '.join(f'{n} {state}' for state, n in counts(study).items() if n)
    title = f'{study.name}: {study.sweep.metric} of {tally}'
    figure.suptitle(title, x=0.01, ha='left', fontsize=13, color=figures.INK)
    complete = [trial for trial in trials if trial.state == TrialState.COMPLETE]
    winner = best(study).number if complete else None
    axes = [figure.add_subplot(height, columns, i + 1) for i in range(panels)]
    _courses(axes[0], trials, winner)
    edge = 0.03 if study.sweep.direction == 'maximize' else 0.97
    for panel, (name, dimension) in zip(axes[1:], dimensions.items(), strict=True):
        _dimension(panel, trials, winner, name, dimension, edge)
    return figure


def _colour(trial: FrozenTrial, winner: int | None) -> str:
    if trial.number == winner:
        return figures.COLOURS[1]
    return figures.COLOURS[0] if trial.state == TrialState.COMPLETE else figures.FAINT


def _courses(axes: Axes, trials: Sequence[FrozenTrial], winner: int | None) -> None:
    figures.style(axes, 'Evaluations')
    for trial in sorted(trials, key=lambda t: (t.number == winner, t.state == TrialState.COMPLETE)):
        steps = sorted(trial.intermediate_values)
        values = [trial.intermediate_values[step] for step in steps]
        colour, is_best = _colour(trial, winner), trial.number == winner
        axes.plot(steps, values, color=colour, linewidth=2 if is_best else 1, alpha=0.9)
        axes.plot(steps[-1:], values[-1:], MARKS[trial.state], color=colour, markersize=5)
    axes.set_xlabel('step', color=figures.FAINT, fontsize=9)
    labels = {'best': ('o', 1), 'complete': ('o', 0), 'pruned': ('x', None)}
    for label, (mark, index) in labels.items():
        colour = figures.FAINT if index is None else figures.COLOURS[index]
        axes.plot([], [], mark, color=colour, label=label, markersize=5)
    axes.legend(frameon=False, fontsize=9, labelcolor='linecolor', handlelength=1)


def _dimension(
    axes: Axes,
    trials: Sequence[FrozenTrial],
    winner: int | None,
    name: str,
    dimension: space.Dimension,
    edge: float,
) -> None:
    figures.style(axes, name)
    xs = positions(axes, dimension, [trial.params[name] for trial in trials])
    for x, trial in zip(xs, trials, strict=True):
        # The last value of a pruned trial is of an early step, and no match for a final one.
        at_edge = winner is not None and trial.state != TrialState.COMPLETE
        is_best = trial.number == winner
        axes.plot(
            x,
            edge if at_edge else trial.values[0],
            MARKS[trial.state],
            color=_colour(trial, winner),
            transform=axes.get_xaxis_transform() if at_edge else axes.transData,
            markersize=9 if is_best else 6,
            zorder=4 if is_best else 3,
        )
    axes.margins(y=0.15)


def positions(axes: Axes, dimension: space.Dimension, values: Sequence[Any]) -> list[float]:
    """Where values stand on the horizontal axis, whose scale and ticks are set."""
    if isinstance(dimension, space.Range):
        if dimension.log:
            axes.set_xscale('log')
            axes.tick_params(which='minor', length=0)
        return [float(v) for v in values]
    choices = list(dimension.values)
    if all(isinstance(v, (int, float)) and not isinstance(v, bool) for v in choices):
        choices.sort()
    axes.set_xticks(np.arange(len(choices)), [number(v) for v in choices])
    axes.set_xlim(-0.5, len(choices) - 0.5)
    # Side by side, as many a trial has the same value.
    spread = 0.3 * np.linspace(-1, 1, len(values)) if len(values) > len(choices) else 0.0
    return list(np.array([choices.index(v) for v in values]) + spread)
