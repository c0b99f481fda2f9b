"""A worker: claim a trial -> train -> tell, until none is left.

A claim is a lock in the shared folder, which ends with its process however that dies. A trial
that is said to run but is claimed by nobody lost its worker: whoever claims it next continues
the same trial from its checkpoint. This needs nothing of the storage, so that it holds for all.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
from collections.abc import Iterator
from typing import Any

import jax
import optuna
from optuna.trial import FrozenTrial, Trial, TrialState

from vit_jax import train, workdir
from vit_jax.errors import UserError, nearest
from vit_jax.meter import Diverged
from vit_jax.sweeps import space
from vit_jax.sweeps.study import Study


@dataclasses.dataclass
class Work:
    """What a worker has done.

    Attributes:
      finished: number of trials that it brought to an end of any kind.
      failures: a line for each that failed.
    """

    finished: int = 0
    failures: list[str] = dataclasses.field(default_factory=list)


def work(study: Study, limit: int | None = None) -> Work:
    """Runs trials until none is left to claim, or `limit` of them are finished.

    Raises:
      Preempted: after SIGTERM or SIGINT; the trial's state is saved, and any worker resumes it.
    """
    done = Work()
    while limit is None or done.finished < limit:
        with claimed(study) as trial:
            if trial is None:
                break
            if failure := run(study, trial):
                done.failures.append(f'trial {trial.number}: {failure}')
        done.finished += 1
        jax.clear_caches()  # the next trial may have another shape
    return done


@contextlib.contextmanager
def claimed(study: Study) -> Iterator[Trial | None]:
    """A trial that lost its worker, or else the next that waits; None if there is neither."""
    for state in (TrialState.RUNNING, TrialState.WAITING):
        for frozen in study.trials(state):
            with contextlib.ExitStack() as held:
                try:
                    held.enter_context(workdir.lock(study.folder / 'claims' / str(frozen.number)))
                except workdir.InUse:
                    continue
                if (trial := take(study, frozen)) is not None:
                    yield trial
                    return
    yield None


def take(study: Study, frozen: FrozenTrial) -> Trial | None:
    """The trial as one that runs; None if it ended or was taken before it was claimed."""
    state = study.storage.get_trial(frozen._trial_id).state
    if state.is_finished():
        return None
    if state == TrialState.WAITING and not study.storage.set_trial_state_values(
        frozen._trial_id, TrialState.RUNNING
    ):
        return None
    # A search then depends on its seed and on what is known, not on who runs the trial.
    return Trial(study.load(study.sweep.seed + frozen.number), frozen._trial_id)


def run(study: Study, trial: Trial) -> str:
    """Trains a trial and tells the study; returns what went wrong, if its config cannot run.

    A run that diverges counts as pruned, so that a search learns from it.
    """
    point, folder = suggest(study, trial), study.run_folder(trial.number)
    words = ' '.join(space.overrides(point))
    print(f'trial {trial.number} of {len(study.trials())}: {words}', flush=True)
    trial.set_user_attr('folder', str(folder))
    try:
        config = study.config(point)
        trial.set_user_attr('config', config.to_dict())
        results = train.train(config, folder, report=reporter(study, trial))
        end(trial, TrialState.COMPLETE, finite(results, study.sweep.metric))
    except train.Pruned:
        end(trial, TrialState.PRUNED)
    except Diverged as e:
        trial.set_user_attr('diverged', str(e))
        end(trial, TrialState.PRUNED)
    except workdir.InUse:
        raise
    except UserError as e:
        fail(trial, str(e))
        return str(e)
    except Exception as e:
        fail(trial, f'{type(e).__name__}: {e}')
        raise
    return ''


def suggest(study: Study, trial: Trial) -> space.Point:
    """The trial's values: those that it already has, or was queued with, or the search's."""
    return {name: _suggest(trial, name, d) for name, d in study.sweep.dimensions().items()}


def _suggest(trial: Trial, name: str, dimension: space.Dimension) -> Any:
    if isinstance(dimension, space.Choice):
        return trial.suggest_categorical(name, dimension.values)
    low, high, log = dimension.low, dimension.high, dimension.log
    if isinstance(low, int) and isinstance(high, int):
        return trial.suggest_int(name, low, high, log=log)
    return trial.suggest_float(name, low, high, log=log)


def reporter(study: Study, trial: Trial) -> train.Report:
    """Passes evaluations on to the study, and says when its pruner ends the run.

    Evaluations that a resumed run repeats are already there.
    """
    metric = study.sweep.metric
    entry = metric.rpartition('/')[0]
    known = set(study.storage.get_trial(trial._trial_id).intermediate_values)

    def report(step: int, results: dict[str, float]) -> bool:
        if not any(name.startswith(entry) for name in results):
            return False  # this one has an `every` of its own
        if step not in known:
            trial.report(pick(results, metric), step)
        return trial.should_prune()

    return report


def pick(results: dict[str, float], metric: str) -> float:
    """The metric of an evaluation; raises UserError if it is not there."""
    if metric not in results:
        raise UserError('sweep: ' + nearest('metric', metric, results))
    return results[metric]


def finite(results: dict[str, float], metric: str) -> float:
    """As `pick`; raises Diverged if it is not a finite number."""
    if not math.isfinite(value := pick(results, metric)):
        raise Diverged(f'{metric} is {value}')
    return value


def end(trial: Trial, state: TrialState, value: float | None = None) -> None:
    """Tells the study how a trial ended."""
    frozen = trial.study.tell(trial, value, state)
    number = '' if frozen.value is None else f' at {frozen.value:.4f}'
    print(f'trial {trial.number}: {state.name.lower()}{number}', flush=True)


def fail(trial: Trial, reason: str) -> None:
    """Tells the study that a trial failed, and why."""
    trial.set_user_attr('error', reason)
    end(trial, optuna.trial.TrialState.FAIL)
