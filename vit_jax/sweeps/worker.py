"""A worker: claim a trial -> train -> report, until none is left.

A worker may be several processes. Only the first one claims, chooses and reports; it broadcasts
the trial to the others, and after every evaluation whether the run ends there.
"""

from __future__ import annotations

import contextlib
import dataclasses
import enum
import math
import pathlib
import time
from collections.abc import Iterator
from typing import Any

import jax
from optuna.trial import FrozenTrial, Trial, TrialState

from vit_jax.errors import Unavailable, UserError
from vit_jax.runtime import processes
from vit_jax.runtime.preemption import Preemption
from vit_jax.runtime.watchdog import Stalled, Watchdog
from vit_jax.storage import lock, paths, run_folder
from vit_jax.sweeps import asha, space
from vit_jax.sweeps.study import Study, intact, run_number, state_name
from vit_jax.trainer import early_stopping, train
from vit_jax.trainer.meter import Diverged

WAIT_SECONDS = 1.0


@dataclasses.dataclass
class Tally:
    """Record of what a worker has done.

    Attributes:
      finished: Number of trials that it ended, in any state.
      failures: A line for each failed trial.
      has_waited: Whether it has waited for other workers.
    """

    finished: int = 0
    has_waited: bool = False
    failures: list[str] = dataclasses.field(default_factory=list)


class Idle(enum.Enum):
    """Reason why no trial is claimed."""

    WAIT = 'other workers may leave trials to claim'
    OVER = 'nothing is left'


@dataclasses.dataclass(frozen=True)
class ClaimedTrial:
    """A trial that the processes of a worker share.

    Attributes:
      number: Number of the trial.
      point: Values of the trial.
      folder: Folder of its run.
      trial: Optuna's, on process 0, the only one that accesses the study; None on the others.
    """

    number: int
    point: space.Point
    folder: pathlib.Path
    trial: Trial | None = None


def work(study: Study, limit: int | None = None, step_timeout: float | None = None) -> Tally:
    """Run trials until none is left to claim, or `limit` trials are finished.

    While other workers are at trunks that branches need, or at trials of ASHA, this one waits.

    Args:
      study: Study from `open_study`.
      limit: Largest number of trials, at least 1.
      step_timeout: Time limit of a step in seconds, see `vit_jax.runtime.watchdog.Watchdog`.

    Raises:
      Preempted: after SIGTERM or SIGINT; the trial's state is saved, and any worker resumes it.
    """
    done = Tally()
    with Preemption() as preemption:
        while limit is None or done.finished < limit:
            with contextlib.ExitStack() as held:
                # The other processes of the worker wait for the claim.
                with Watchdog(step_timeout), intact(f'the study {study.name!r}'):
                    claim = held.enter_context(next_trial(study))
                if claim is Idle.OVER:
                    break
                moment = attend(study, claim, done, step_timeout)
            if preemption.reached():
                raise train.Preempted(f'stopped {moment}')
    return done


def attend(
    study: Study, claim: ClaimedTrial | Idle, done: Tally, step_timeout: float | None
) -> str:
    """Run the claimed trial, or wait without one; return the moment in words, for a message."""
    if isinstance(claim, Idle):
        if not done.has_waited and jax.process_index() == 0:
            print('waits for trials of other workers', flush=True)
        done.has_waited = True
        time.sleep(WAIT_SECONDS)
        return 'while it waited for other workers'
    failure = run(study, claim, step_timeout)
    if failure:
        done.failures.append(f'trial {claim.number}: {failure}')
    done.finished += failure is not None
    jax.clear_caches()  # the next trial may have another shape
    return f'after trial {claim.number}'


@contextlib.contextmanager
def next_trial(study: Study) -> Iterator[ClaimedTrial | Idle]:
    """Claim a trial on process 0 and broadcast it to all others."""
    first = jax.process_index() == 0
    with claimed(study) if first else contextlib.nullcontext() as trial:
        words: Any = trial and [trial.number, run_number(trial), suggest(study, trial)]
        if first and trial is None:
            words = (Idle.WAIT if more_to_come(study) else Idle.OVER).value
        words = processes.broadcast(words)
        if isinstance(words, str):
            yield Idle(words)
        else:
            number, run, point = words
            yield ClaimedTrial(number, point, study.run_folder(run), trial)


def run(study: Study, claim: ClaimedTrial, step_timeout: float | None = None) -> str | None:
    """Train a trial and report to the study; return the error if its config cannot run.

    A run that diverges counts as pruned, so that a search learns from it. An interrupted trial
    stays in the state running, and another worker continues it; so does one that ASHA pauses, for
    which None is returned.
    """
    if claim.trial:
        words = ' '.join(space.overrides(claim.point))
        print(f'trial {claim.number} of {len(study.trials())}: {words}', flush=True)
    try:
        value = train_trial(study, claim, step_timeout)
    except train.Pruned:
        if asha.from_sweep(study.sweep):
            pause(claim.trial)
            return None
        end(claim.trial, TrialState.PRUNED)
    except Diverged as e:
        store_attribute(claim.trial, 'diverged', str(e))
        end(claim.trial, TrialState.PRUNED)
    except train.Preempted:
        store_attribute(claim.trial, 'attempt', None)
        raise
    except (lock.InUse, lock.Taken, Stalled, Unavailable):
        raise  # the trial can go on, here or on another worker
    except paths.WriteError as e:
        with contextlib.suppress(UserError, OSError):
            store_attribute(claim.trial, 'attempt', None)
        raise paths.WriteError(f'trial {claim.number} is interrupted: {e}') from e
    except UserError as e:
        # A single process may have failed while the others continue to train.
        processes.barrier(f'trial {claim.number} failed', processes.BARRIER_SECONDS)
        fail(claim.trial, str(e))
        return str(e)
    except Exception as e:
        if not processes.reports_lost_peer(e):
            fail(claim.trial, f'{type(e).__name__}: {e}')
        raise
    else:
        end(claim.trial, TrialState.COMPLETE, value)
    return ''


def train_trial(study: Study, claim: ClaimedTrial, step_timeout: float | None) -> float:
    """Train a trial and return its final value.

    Raises:
      Diverged: if training diverges, or the final value is not a finite number.
    """
    config = study.config(claim.point)
    store_attribute(claim.trial, 'folder', str(claim.folder))
    store_attribute(claim.trial, 'config', config.to_dict())
    report = reporter(study, claim)
    results = train.train(
        config,
        claim.folder,
        report=report,
        step_timeout=step_timeout,
        allowed=study.allowed or (),
    )
    return final_value(results, study.sweep.metric)


def suggest(study: Study, trial: Trial) -> space.Point:
    """Return the trial's values: its present ones, the queued ones, or the search's."""
    return {name: _suggest(trial, name, d) for name, d in study.sweep.dimensions().items()}


def _suggest(trial: Trial, name: str, dimension: space.Dimension) -> Any:
    if isinstance(dimension, space.Choice):
        return trial.suggest_categorical(name, dimension.values)
    low, high, log = dimension.low, dimension.high, dimension.log
    if isinstance(low, int) and isinstance(high, int):
        return trial.suggest_int(name, low, high, log=log)
    return trial.suggest_float(name, low, high, log=log)


def reporter(study: Study, claim: ClaimedTrial) -> train.Report:
    """Make a callback that reports evaluations and returns whether the pruner ends the run.

    Evaluations that a resumed run repeats are skipped.
    """
    trial, metric = claim.trial, study.sweep.metric
    # The id that storages take has no public name.
    known = set(study.storage.get_trial(trial._trial_id).intermediate_values) if trial else set()

    def report_value(step: int, value: float) -> bool:
        assert trial is not None
        with _storing(trial):
            if step not in known:
                trial.report(value, step)
            if asha.from_sweep(study.sweep):
                return not promote(study, trial)
            return trial.should_prune()

    def report(step: int, results: dict[str, float]) -> bool:
        if (value := early_stopping.entry_metric(results, metric, 'sweep')) is None:
            return False  # the metric is evaluated at another interval
        return bool(processes.on_process_0(lambda: report_value(step, value)))

    return report


def final_value(results: dict[str, float], metric: str) -> float:
    """Return the metric of an evaluation.

    Raises:
      UserError: if the metric is missing.
      Diverged: if it is not a finite number.
    """
    if not math.isfinite(value := early_stopping.pick(results, metric, 'sweep')):
        raise Diverged(f'{metric} is {value}')
    return value


@contextlib.contextmanager
def claimed(study: Study) -> Iterator[Trial | None]:
    """Claim the first claimable trial that is free; None without one."""
    for frozen in claimable(study):
        with contextlib.ExitStack() as held:
            try:
                held.enter_context(lock.hold(study.claim_folder(frozen.number)))
            except lock.InUse:
                continue
            if (trial := take(study, frozen)) is not None:
                yield trial
                return
    yield None


def claimable(study: Study) -> Iterator[FrozenTrial]:
    """Yield trials that lost their worker, then paused ones to promote, then new ones.

    A branch is not among them before its trunk has reached the step that it starts from.
    """
    rule = asha.from_sweep(study.sweep)
    running = study.trials(TrialState.RUNNING)
    yield from (t for t in running if not (rule and rule.is_paused(t)))
    if rule:
        yield from rule.promotable(study.trials(), study.sweep.direction == 'maximize')
    for frozen in study.trials(TrialState.WAITING):
        if not asha.waits_for_trunk(frozen, study.trials(), study.run_folder):
            yield frozen


def more_to_come(study: Study) -> bool:
    """Return whether other workers' trials may release more to claim: branches, promotions.

    Paused trials that nothing can promote anymore are pruned here.
    """
    trials, waiting = study.trials(), study.trials(TrialState.WAITING)
    if any(asha.waits_for_trunk(frozen, trials, study.run_folder) for frozen in waiting):
        return True
    if (rule := asha.from_sweep(study.sweep)) is None:
        return False
    running = sorted(study.trials(TrialState.RUNNING), key=rule.is_paused)  # few paused are held
    if any(lock.is_held(study.claim_folder(frozen.number)) for frozen in running):
        return True
    for frozen in running:
        with contextlib.suppress(lock.InUse), lock.hold(study.claim_folder(frozen.number)):
            # The id that storages take has no public name.
            last = study.storage.get_trial(frozen._trial_id)
            if last.state == TrialState.RUNNING and rule.is_paused(last):
                end(Trial(study.load(0), frozen._trial_id), TrialState.PRUNED)
    return False


def take(study: Study, frozen: FrozenTrial) -> Trial | None:
    """Start or continue the trial; None if it ended or was taken before it was claimed.

    A trial whose workers died too often fails here.
    """
    state = study.storage.get_trial(frozen._trial_id).state
    if state.is_finished():
        return None
    if state == TrialState.WAITING and not study.storage.set_trial_state_values(
        frozen._trial_id, TrialState.RUNNING
    ):
        return None
    # So that a search depends on its seed and the known trials, not on the worker.
    trial = Trial(study.load(study.sweep.seed + frozen.number), frozen._trial_id)
    return trial if promote(study, trial) and count_attempt(study, trial) else None


def count_attempt(study: Study, trial: Trial) -> bool:
    """Count an attempt at the trial; after too many, fail the trial and return False.

    An attempt counts only if it ended abnormally without saving anything new: a long run on
    preemptible machines goes on, and one that kills its workers fails.
    """
    saved = max(run_folder.steps(study.run_folder(run_number(trial))), default=0)
    before = trial.user_attrs.get('attempt') or {'after': saved, 'count': 0}
    count = before['count'] + 1 if before['after'] == saved else 1
    if count > 1 + study.sweep.retries:
        fail(trial, f'its worker died {count - 1} times after step {saved}')
        return False
    trial.set_user_attr('attempt', {'after': saved, 'count': count})
    return True


def store_attribute(trial: Trial | None, name: str, value: Any) -> None:
    """Store an attribute of the trial; like `end` and `fail`, only on process 0."""
    if trial:
        with _storing(trial):
            trial.set_user_attr(name, value)


def _storing(trial: Trial) -> contextlib.AbstractContextManager[None]:
    return intact(f'the study {trial.study.study_name!r}')


def end(trial: Trial | None, state: TrialState, value: float | None = None) -> None:
    """Report the end of a trial to the study."""
    if trial:
        with _storing(trial):
            frozen = trial.study.tell(trial, value, state)
        number = '' if frozen.value is None else f' at {frozen.value:.4f}'
        print(f'trial {trial.number}: {state_name(frozen)}{number}', flush=True)


def promote(study: Study, trial: Trial) -> bool:
    """Promote a trial paused by ASHA if it is among the best; return whether it continues.

    A trial that is not paused always goes on.
    """
    rule, maximize = asha.from_sweep(study.sweep), study.sweep.direction == 'maximize'
    if rule is None:
        return True
    while rule.is_paused(frozen := study.storage.get_trial(trial._trial_id)):
        if all(t.number != trial.number for t in rule.promotable(study.trials(), maximize)):
            return False
        trial.set_user_attr(asha.PROMOTED, asha.promotions(frozen) + 1)
    return True


def pause(trial: Trial | None) -> None:
    """Leave a trial at its rung of ASHA, for any worker to promote."""
    store_attribute(trial, 'attempt', None)
    if trial:
        print(f'trial {trial.number}: paused', flush=True)


def fail(trial: Trial | None, reason: str) -> None:
    """Report the failure of a trial and its reason to the study."""
    store_attribute(trial, 'error', reason)
    end(trial, TrialState.FAIL)
