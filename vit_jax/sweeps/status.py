"""Progress of a study: its trials and their states, the workers, the best trial."""

from __future__ import annotations

import collections
import datetime
import shlex
import statistics
from typing import Any

from optuna.trial import FrozenTrial, TrialState

from vit_jax.errors import UserError
from vit_jax.scaling import trunks
from vit_jax.storage import lock
from vit_jax.sweeps import asha, branches, space
from vit_jax.sweeps.study import Study, run_number, state_name, vary

ENDED = (TrialState.COMPLETE, TrialState.PRUNED)


def counts(study: Study) -> dict[str, int]:
    """Number of trials in each state; also `interrupted`, `paused` and `diverged`."""
    trials, at_work = study.trials(), workers(study)
    found = collections.Counter(trial.state for trial in trials)
    running = sum(t.state == TrialState.RUNNING and t.number in at_work for t in trials)
    pruned = [trial for trial in trials if trial.state == TrialState.PRUNED]
    diverged = sum('diverged' in trial.user_attrs for trial in pruned)
    paused = sum(is_paused(study, t) and t.number not in at_work for t in trials)
    tally = {state.name.lower(): found[state] for state in TrialState}
    return tally | {
        'running': running,
        'pruned': len(pruned) - diverged,
        'diverged': diverged,
        'paused': paused,
        'interrupted': found[TrialState.RUNNING] - running - paused,
    }


def workers(study: Study) -> dict[int, str]:
    """Workers by trial, as HOST:PID; a running trial without an entry has lost its worker."""
    found = {
        trial.number: lock.holder(study.claim_folder(trial.number))
        for trial in study.trials(TrialState.RUNNING)
    }
    return {n: f'{owner["host"]}:{owner["pid"]}' for n, owner in found.items() if owner}


def rows(study: Study) -> list[list[str]]:
    """A row for each started trial: number, state, last evaluated step, value, point."""
    at_work = workers(study)
    begun = [trial for trial in study.trials() if trial.state != TrialState.WAITING]
    return [[*_progress(study, trial, at_work), *_point(study, trial)] for trial in begun]


def _progress(study: Study, trial: FrozenTrial, at_work: dict[int, str]) -> list[str]:
    state = outcome(trial, at_work)
    if state == 'interrupted' and is_paused(study, trial):
        state = 'paused'
    return [str(trial.number), state, last_step(trial), value(trial)]


def is_paused(study: Study, trial: FrozenTrial) -> bool:
    """Whether the trial waits at a rung of ASHA."""
    rule = asha.of_sweep(study.sweep)
    return rule is not None and trial.state == TrialState.RUNNING and rule.is_paused(trial)


def _point(study: Study, trial: FrozenTrial) -> list[str]:
    return [number(trial.params.get(name)) for name in study.sweep.dimensions()]


def notes(study: Study) -> list[str]:
    """A line for each failed trial, and one on the remaining time."""
    failed = [
        f'trial {trial.number} failed: {trial.user_attrs.get("error", "")}'
        for trial in study.trials(TrialState.FAIL)
    ]
    return [*failed, *filter(None, [time_left(study)])]


def time_left(study: Study) -> str:
    """Estimate of the time that the present workers will need; empty if it is unknown."""
    open_trials = study.trials(TrialState.RUNNING, TrialState.WAITING)
    spans = [trial.duration for trial in study.trials(*ENDED) if trial.duration]
    if not (spans and open_trials and (at_work := len(workers(study)))):
        return ''
    typical = statistics.median(span.total_seconds() for span in spans)
    seconds = typical * max(1.0, len(open_trials) / at_work)
    each, left = (datetime.timedelta(seconds=round(s)) for s in (typical, seconds))
    return f'about {left} left: {len(open_trials)} trials of {each} (h:mm:ss), workers: {at_work}'


def outcome(trial: FrozenTrial, at_work: dict[int, str]) -> str:
    """The trial's state in a word, with its worker if it is running."""
    if trial.state == TrialState.RUNNING:
        worker = at_work.get(trial.number)
        return f'running on {worker}' if worker else 'interrupted'
    return state_name(trial)


def last_step(trial: FrozenTrial) -> str:
    """The last evaluated step, or '-'."""
    return str(trial.last_step) if trial.last_step is not None else '-'


def value(trial: FrozenTrial) -> str:
    """Its final value, or the last one so far, or '-'."""
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
    """The candidate with the best final value; the earlier of equal ones.

    Raises:
      UserError: without one.
    """
    found = candidates(study)
    if not found:
        but = ' but trunks' if study.trials(TrialState.COMPLETE) else ''
        raise UserError(f'no trial of the study {study.name!r}{but} is complete')
    sign = -1 if study.sweep.direction == 'maximize' else 1
    return min(found, key=lambda trial: sign * trial.values[0])


def candidates(study: Study) -> list[FrozenTrial]:
    """The complete trials but trunks, whose learning rate has not fallen."""
    branched = {branches.trunk_of(point) for point in study.sweep.points}
    return [
        trial
        for trial in study.trials(TrialState.COMPLETE)
        if run_number(trial) not in branched
        or trunks.cools_down(vary(study.base, trial.params).to_dict())
    ]


def command(study: Study, trial: FrozenTrial) -> str:
    """The command that repeats the trial's training, in a new folder next to that of the sweep."""
    point = branches.resolved({**study.sweep.overrides, **trial.params}, study.run_folder)
    flags = [f'--config.{text}' for text in space.overrides(point)]
    place = ('--workdir', f'{study.folder}-{trial.number:04d}')
    words = ('python', '-m', 'vit_jax', 'train', '--config', study.sweep.config, *flags, *place)
    return shlex.join(words)
