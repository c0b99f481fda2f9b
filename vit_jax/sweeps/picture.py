"""Progress of a study, its best trial, and pictures of its trials."""

from __future__ import annotations

import collections
import dataclasses
import datetime
import pathlib
import shlex
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine
from optuna.trial import FrozenTrial, TrialState
from scipy import stats

from vit_jax.errors import UserError, nearest
from vit_jax.scaling import runs
from vit_jax.storage import lock
from vit_jax.sweeps import asha, space
from vit_jax.sweeps.study import Study, run_number, state_name, trial_title, vary
from vit_jax.viz import figures

ENDED = (TrialState.COMPLETE, TrialState.PRUNED)
MARKS = {TrialState.COMPLETE: 'o', TrialState.PRUNED: 'x'}

Curve = Mapping[float, Sequence[float]]  # x -> the metric of each seed


def counts(study: Study) -> dict[str, int]:
    """Count trials by state, including `interrupted`, `paused` and `diverged`."""
    trials, at_work = study.trials(), workers(study)
    tally_by_state = collections.Counter(trial.state for trial in trials)
    running = sum(t.state == TrialState.RUNNING and t.number in at_work for t in trials)
    pruned = [trial for trial in trials if trial.state == TrialState.PRUNED]
    diverged = sum('diverged' in trial.user_attrs for trial in pruned)
    paused = sum(is_paused(study, t) and t.number not in at_work for t in trials)
    tally = {state.name.lower(): tally_by_state[state] for state in TrialState}
    return tally | {
        'running': running,
        'pruned': len(pruned) - diverged,
        'diverged': diverged,
        'paused': paused,
        'interrupted': tally_by_state[TrialState.RUNNING] - running - paused,
    }


def workers(study: Study) -> dict[int, str]:
    """Return workers by trial, HOST:PID; a running trial without one has lost its worker."""
    owners = {
        trial.number: lock.holder(study.claim_folder(trial.number))
        for trial in study.trials(TrialState.RUNNING)
    }
    return {n: f'{owner["host"]}:{owner["pid"]}' for n, owner in owners.items() if owner}


def rows(study: Study) -> list[list[str]]:
    """Make a row per started trial: number, state, last evaluated step, value, point."""
    at_work = workers(study)
    started = [trial for trial in study.trials() if trial.state != TrialState.WAITING]
    return [[*_progress(study, trial, at_work), *_point(study, trial)] for trial in started]


def _progress(study: Study, trial: FrozenTrial, at_work: dict[int, str]) -> list[str]:
    state = outcome(trial, at_work)
    if state == 'interrupted' and is_paused(study, trial):
        state = 'paused'
    return [str(trial.number + 1), state, last_step(trial), value(trial)]


def is_paused(study: Study, trial: FrozenTrial) -> bool:
    """Return whether the trial waits at a rung of ASHA."""
    rule = asha.from_sweep(study.sweep)
    return rule is not None and trial.state == TrialState.RUNNING and rule.is_paused(trial)


def _point(study: Study, trial: FrozenTrial) -> list[str]:
    point = asha.readable(trial.params)
    return [shorten(point.get(name)) for name in study.sweep.dimensions()]


def remarks(study: Study) -> list[str]:
    """Describe each failed trial, and the remaining time, one per line."""
    failures = [
        f'{trial_title(trial)} failed: {trial.user_attrs.get("error", "")}'
        for trial in study.trials(TrialState.FAIL)
    ]
    return [*failures, *filter(None, [time_left(study)])]


def time_left(study: Study) -> str:
    """Estimate the time until the present workers are done; empty if unknown."""
    open_trials = study.trials(TrialState.RUNNING, TrialState.WAITING)
    spans = [trial.duration for trial in study.trials(*ENDED) if trial.duration]
    if not (spans and open_trials and (at_work := len(workers(study)))):
        return ''
    typical = statistics.median(span.total_seconds() for span in spans)
    seconds = typical * max(1.0, len(open_trials) / at_work)
    typical_time, time_remaining = (
        datetime.timedelta(seconds=round(s)) for s in (typical, seconds)
    )
    trials = f'{len(open_trials)} trials of {typical_time} (h:mm:ss)'
    return f'about {time_remaining} left: {trials}, workers: {at_work}'


def outcome(trial: FrozenTrial, at_work: dict[int, str]) -> str:
    """Return the trial's state in a word, with its worker if it is running."""
    if trial.state == TrialState.RUNNING:
        worker = at_work.get(trial.number)
        return f'running on {worker}' if worker else 'interrupted'
    return state_name(trial)


def last_step(trial: FrozenTrial) -> str:
    """Return the last evaluated step, or '-'."""
    return str(trial.last_step) if trial.last_step is not None else '-'


def value(trial: FrozenTrial) -> str:
    """Its final value, or the last one so far, or '-'."""
    final = trial.value
    if final is None and trial.last_step is not None:
        final = trial.intermediate_values[trial.last_step]
    return '-' if final is None else f'{final:.4f}'


def shorten(value: Any) -> str:
    """Format a value; floats are shortened."""
    if value is None:
        return '-'
    return f'{value:.4g}' if isinstance(value, float) else str(value)


@dataclasses.dataclass(frozen=True)
class Setting:
    """Complete trials that differ only in the seed.

    Attributes:
      trials: Trials, the best first.
      mean: Mean of their final values.
      half: Half the 90% interval of the mean, by the noise between seeds of all settings; None if
        no setting has several seeds.
    """

    trials: tuple[FrozenTrial, ...]
    mean: float
    half: float | None


def settings(study: Study) -> list[Setting]:
    """Rank the settings of a study by the worse ends of their intervals, best first.

    The best of many single seeds is partly lucky; the worse end of an interval corrects for it.

    Raises:
      UserError: if no trial is complete.
    """
    sign = -1 if study.sweep.direction == 'maximize' else 1
    groups: dict[str, list[FrozenTrial]] = collections.defaultdict(list)
    for trial in complete_trials(study):
        point = asha.resolve_trunk(trial.params, study.run_folder)
        groups[runs.setting(vary(study.base, point).to_dict())].append(trial)
    if not groups:
        but = ' but trunks' if study.trials(TrialState.COMPLETE) else ''
        raise UserError(f'no trial of the study {study.name!r}{but} is complete')
    values = [np.array([trial.values[0] for trial in group]) for group in groups.values()]
    free = sum(len(seed_run) - 1 for seed_run in values)
    squares = sum(float(np.sum((seed_run - seed_run.mean()) ** 2)) for seed_run in values)
    noise = stats.t.ppf(0.95, free) * np.sqrt(squares / free) if free else 0.0
    ranked = [
        Setting(
            tuple(sorted(group, key=lambda trial: sign * trial.values[0])),
            float(seed_run.mean()),
            float(noise / np.sqrt(len(seed_run))) if free else None,
        )
        for group, seed_run in zip(groups.values(), values, strict=True)
    ]
    return sorted(ranked, key=lambda seed_run: sign * seed_run.mean + (seed_run.half or 0.0))


def over_seeds(setting: Setting) -> str:
    """Format the mean of a setting with its 90% interval, and its trials."""
    half = setting.half or 0.0
    count, trials = (
        len(setting.trials),
        ', '.join(str(trial.number + 1) for trial in setting.trials),
    )
    return (
        f'{setting.mean:.4f} [{setting.mean - half:.4f}, {setting.mean + half:.4f}], mean of '
        f'{count} seed{"s" * (count > 1)}: trial{"s" * (count > 1)} {trials}'
    )


def best(study: Study) -> FrozenTrial:
    """Return the best complete trial of the best setting; of equal trials, the first.

    Raises:
      UserError: if there is none.
    """
    return settings(study)[0].trials[0]


def complete_trials(study: Study) -> list[FrozenTrial]:
    """List complete trials except trunks, whose learning rate has not fallen."""
    branched = {asha.trunk_of(point) for point in study.sweep.points}
    return [
        trial
        for trial in study.trials(TrialState.COMPLETE)
        if run_number(trial) not in branched
        or runs.cools_down(vary(study.base, trial.params).to_dict())
    ]


def command(study: Study, trial: FrozenTrial) -> str:
    """Return the command that repeats a trial in a new folder next to the sweep."""
    point = asha.resolve_trunk({**study.sweep.overrides, **trial.params}, study.run_folder)
    flags = [f'--config.{text}' for text in space.overrides(point)]
    workdir = ('--workdir', f'{study.folder}-{study.run_folder(trial.number).name}')
    arguments = (
        'python',
        '-m',
        'vit_jax',
        'train',
        '--config',
        study.sweep.config,
        *flags,
        *workdir,
    )
    return shlex.join(arguments)


def plot(study: Study, path: str | pathlib.Path) -> pathlib.Path:
    """Draw the evaluations of every trial, and its final value over each dimension.

    Pruned trials have no final value and are drawn at the worse edge.

    Raises:
      UserError: if no trial has ended with a value.
      OSError: if the file cannot be written.
    """
    finished = [t for t in study.trials(*ENDED) if t.value is not None]
    if not finished:
        raise UserError(f'no trial of the study {study.name!r} has ended with a value')
    return figures.save(draw(study, finished), path)


def draw(study: Study, trials: Sequence[FrozenTrial]) -> Figure:
    """Draw a panel of evaluations, if there are several, and one for each dimension, at most three
    in a row.
    """
    dimensions = study.sweep.dimensions()
    several = any(len(trial.intermediate_values) > 1 for trial in trials) or not dimensions
    panels = several + len(dimensions)
    columns = {1: 1, 2: 2, 4: 2}.get(panels, 3)
    height = -(-panels // columns)
    layout = ConstrainedLayoutEngine(w_pad=0.12, h_pad=0.1, wspace=0.02, hspace=0.04)
    figure = Figure(figsize=(4.6 * columns, 3.2 * height + 0.5), layout=layout)
    tally = ', '.join(f'{n} {state}' for state, n in counts(study).items() if n)
    measured = figures.title(study.sweep.metric)
    figures.heading(figure, f'{study.name}: {measured}; trials: {tally}', 13)
    winner = best(study).number if complete_trials(study) else None
    axes = [figure.add_subplot(height, columns, i + 1) for i in range(panels)]
    if several:
        _draw_evaluations(axes[0], trials, winner)
    _legend(axes[0], trials, winner)
    edge = 0.03 if study.sweep.direction == 'maximize' else 0.97
    titles = figures.short_key_names(list(dimensions))
    for panel, title, (name, dimension) in zip(
        axes[several:], titles, dimensions.items(), strict=True
    ):
        figures.style(panel, title)
        _dimension(panel, trials, winner, name, dimension, edge)
    for panel in axes:
        panel.set_ylabel(measured, color=figures.FAINT, fontsize=9)
    return figure


def _color(trial: FrozenTrial, winner: int | None) -> str:
    if trial.number == winner:
        return figures.COLORS[1]
    return figures.COLORS[0] if trial.state == TrialState.COMPLETE else figures.FAINT


def _draw_evaluations(axes: Axes, trials: Sequence[FrozenTrial], winner: int | None) -> None:
    figures.style(axes, 'Evaluations')
    for trial in sorted(trials, key=lambda t: (t.number == winner, t.state == TrialState.COMPLETE)):
        steps = sorted(trial.intermediate_values)
        values = [trial.intermediate_values[step] for step in steps]
        color, is_best = _color(trial, winner), trial.number == winner
        axes.plot(steps, values, color=color, linewidth=2 if is_best else 1, alpha=0.9)
        axes.plot(steps[-1:], values[-1:], MARKS[trial.state], color=color, markersize=5)
    axes.set_xlabel('step', color=figures.FAINT, fontsize=9)


def _legend(axes: Axes, trials: Sequence[FrozenTrial], winner: int | None) -> None:
    handles = {}  # a trial of each kind
    for trial in trials:
        handles['best' if trial.number == winner else state_name(trial)] = trial
    for label, trial in sorted(handles.items()):
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
        # Only this dimension differs: draw a curve.
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
            figures.log_ticks(axes.xaxis, dimension.low, dimension.high, labels='{:g}'.format)
            axes.set_xlim(dimension.low / 1.2, dimension.high * 1.2)
        return [float(v) for v in values]
    choices = list(dimension.values)
    if all(isinstance(v, (int, float)) and not isinstance(v, bool) for v in choices):
        choices.sort()
    axes.set_xticks(np.arange(len(choices)), [shorten(v) for v in choices])
    axes.set_xlim(-0.5, len(choices) - 0.5)
    indices = np.array([choices.index(v) for v in values], float)
    for value in np.unique(indices):
        same = np.flatnonzero(indices == value)
        if len(same) > 1:  # else they would hide each other
            indices[same] += 0.6 * ((np.arange(len(same)) + 0.5) / len(same) - 0.5)
            axes.set_xlabel('jittered', color=figures.FAINT, fontsize=9)
    return indices.tolist()


@dataclasses.dataclass(frozen=True)
class Dimensions:
    """Dimensions of a picture, by their paths in the config.

    Attributes:
      x: Dimension of the horizontal axis; numbers above 0.
      by: Dimension with a curve for each value, if any.
      panel: Dimension with a panel for each value, if any.
    """

    x: str
    by: str | None = None
    panel: str | None = None


def plot_curves(study: Study, dimensions: Dimensions, path: str | pathlib.Path) -> pathlib.Path:
    """Draw the mean final metric of complete trials over `x`, with the best point of each curve.

    Bars are one standard deviation over seeds, and over dimensions that are not shown.

    Raises:
      UserError: for an unknown dimension, x values that are not positive numbers, or if no trial is
        complete.
      OSError: if the file cannot be written.
    """
    return figures.save(_draw_curves(study, dimensions, read_curves(study, dimensions)), path)


def read_curves(study: Study, dimensions: Dimensions) -> dict[Any, dict[Any, Curve]]:
    """Return the curves of each panel: metrics by x; raise UserError like `plot_curves`."""
    names = study.sweep.dimensions()
    for name in (dimensions.x, dimensions.by, dimensions.panel):
        if name is not None and name not in names:
            raise UserError('sweep plot: ' + nearest('dimension', name, names))
    curves_by_panel: Any = collections.defaultdict(lambda: collections.defaultdict(dict))
    for trial in study.trials(TrialState.COMPLETE):
        panel, curve = (trial.params[n] if n else None for n in (dimensions.panel, dimensions.by))
        x = trial.params[dimensions.x]
        if isinstance(x, (str, bool)) or x <= 0:
            raise UserError(f'sweep plot: --x {dimensions.x} is {x!r}, not a positive number')
        curves_by_panel[panel][curve].setdefault(x, []).append(trial.values[0])
    if not curves_by_panel:
        raise UserError(f'no trial of the study {study.name!r} is complete')
    return {
        panel: {name: dict(sorted(points.items())) for name, points in curves.items()}
        for panel, curves in curves_by_panel.items()
    }


def _draw_curves(
    study: Study, dimensions: Dimensions, curves_by_panel: Mapping[Any, Mapping[Any, Curve]]
) -> Figure:
    figure = figures.new_figure((4.8 * len(curves_by_panel) + 0.4, 4.0))
    panels = figure.subplots(1, len(curves_by_panel), sharey=True, squeeze=False)[0]
    for axes, (value, curves) in zip(panels, curves_by_panel.items(), strict=True):
        figures.style(axes, study.name if dimensions.panel is None else shorten(value))
        _curves_panel(axes, study, dimensions, curves)
    panels[0].set_ylabel(figures.title(study.sweep.metric), color=figures.INK)
    return figure


def _curves_panel(
    axes: Axes, study: Study, dimensions: Dimensions, curves: Mapping[Any, Curve]
) -> None:
    best = max if study.sweep.direction == 'maximize' else min
    axes.set_xscale('log')
    for i, (value, curve) in enumerate(curves.items()):
        means = {x: statistics.fmean(values) for x, values in curve.items()}
        top = best(means, key=means.__getitem__)
        name = (
            ''
            if dimensions.by is None
            else f'{figures.short_key_names([dimensions.by])[0]} {shorten(value)}, '
        )
        color = figures.COLORS[i % len(figures.COLORS)]
        label = f'{name}best at {top:g}'
        axes.plot([*means], [*means.values()], 'o-', color=color, markersize=4, label=label)
        axes.plot([top], [means[top]], 'o', color=color, markersize=10)
        bars = {x: statistics.stdev(values) for x, values in curve.items() if len(values) > 1}
        means_of_bars = [means[x] for x in bars]
        axes.errorbar(
            [*bars], means_of_bars, [*bars.values()], fmt='none', ecolor=color, capsize=2.5
        )
    xs = sorted({x for curve in curves.values() for x in curve})
    axes.set_xticks(xs, [f'{x:g}' for x in xs])
    axes.minorticks_off()
    axes.set_xlabel(figures.short_key_names([dimensions.x])[0], color=figures.INK)
    figures.legend(axes)
