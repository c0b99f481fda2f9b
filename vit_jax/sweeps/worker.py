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
from vit_jax.sweeps.study import Study, intact, run_number, state_name, trial_title
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
    """Reason for not claiming a trial."""

    WAIT = 'other workers may leave trials to claim'
    OVER = 'nothing is left'


@dataclasses.dataclass(frozen=True)
class ClaimedTrial:
    """A trial that the processes of a worker share.

    Attributes:
      number: Number of the trial, from 0.
      point: Values of the trial.
      folder: Folder of its run.
      trial: Optuna's, on process 0, the only one that accesses the study; None on the others.
    """

    number: int
    point: space.Point
    folder: pathlib.Path
    trial: Trial | None = None


def work(study: Study, limit: int | None = None, step_timeout: float | None = None) -> Tally:
    """Run trials until none can be claimed, or `limit` trials are finished.

    Waits while other workers run trunks that branches need, or trials of ASHA.

    Args:
      study: Study from `open_study`.
      limit: Largest number of trials, at least 1.
      step_timeout: Time limit of a step in seconds, see `vit_jax.runtime.watchdog.Watchdog`.

    Raises:
      Preempted: after SIGTERM or SIGINT; the trial's state is saved, and any worker resumes it.
    """
    tally = Tally()
    with Preemption() as preemption:
        while limit is None or tally.finished < limit:
            with contextlib.ExitStack() as claim_context:
                # The other processes of the worker wait for the claim.
                with Watchdog(step_timeout), intact(f'the study {study.name!r}'):
                    claim = claim_context.enter_context(next_trial(study))
                if claim is Idle.OVER:
                    break
                progress = attend(study, claim, tally, step_timeout)
            if preemption.should_stop():
                raise train.Preempted(f'stopped {progress}')
    return tally


def attend(
    study: Study, claim: ClaimedTrial | Idle, tally: Tally, step_timeout: float | None
) -> str:
    """Run the claimed trial, or wait without one; describe the progress for a message."""
    if isinstance(claim, Idle):
        if not tally.has_waited and jax.process_index() == 0:
            print('waiting for trials of other workers', flush=True)
        tally.has_waited = True
        time.sleep(WAIT_SECONDS)
        return 'while it waited for other workers'
    failure = run(study, claim, step_timeout)
    if failure:
        tally.failures.append(f'trial {claim.number + 1}: {failure}')
    tally.finished += failure is not None
    jax.clear_caches()  # the next trial may have a different shape
    return f'after trial {claim.number + 1}'


@contextlib.contextmanager
def next_trial(study: Study) -> Iterator[ClaimedTrial | Idle]:
    """Claim a trial on process 0 and broadcast it to all others."""
    is_first = jax.process_index() == 0
    with claim_trial(study) if is_first else contextlib.nullcontext() as trial:
        message: Any = trial and [trial.number, run_number(trial), suggest(study, trial)]
        if is_first and trial is None:
            message = (Idle.WAIT if more_to_come(study) else Idle.OVER).value
        message = processes.broadcast(message)
        if isinstance(message, str):
            yield Idle(message)
        else:
            number, run, point = message
            yield ClaimedTrial(number, point, study.run_folder(run), trial)


def run(study: Study, claim: ClaimedTrial, step_timeout: float | None = None) -> str | None:
    """Train a trial and report to the study; return the error if its config cannot run.

    A run that diverges counts as pruned, so that a search learns from it. A trial that is
    interrupted, or paused by ASHA (then None is returned), stays in the state running, and any
    worker continues it.
    """
    if claim.trial:
        point_text = ' '.join(space.overrides(asha.readable(claim.point)))
        print(f'trial {claim.number + 1} of {len(study.trials())}: {point_text}', flush=True)
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
        raise  # the trial can continue, here or on another worker
    except paths.WriteError as e:
        with contextlib.suppress(UserError, OSError):
            store_attribute(claim.trial, 'attempt', None)
        raise paths.WriteError(f'trial {claim.number + 1} is interrupted: {e}') from e
    except UserError as e:
        # A single process may have failed while the others continue to train.
        processes.barrier(f'trial {claim.number + 1} failed', processes.BARRIER_SECONDS)
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
    """Return the trial's values: assigned before, queued, or suggested by the search."""
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
    reported_steps = (
        set(study.storage.get_trial(trial._trial_id).intermediate_values) if trial else set()
    )

    def report_value(step: int, value: float) -> bool:
        assert trial is not None
        with _convert_storage_errors(trial):
            if step not in reported_steps:
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
def claim_trial(study: Study) -> Iterator[Trial | None]:
    """Claim the first free trial that can run; yield None without one."""
    for frozen in claimable(study):
        with contextlib.ExitStack() as stack:
            try:
                stack.enter_context(lock.hold(study.claim_folder(frozen.number)))
            except lock.InUse:
                continue
            if (trial := take(study, frozen)) is not None:
                yield trial
                return
    yield None


def claimable(study: Study) -> Iterator[FrozenTrial]:
    """Yield trials that lost their worker, then paused ones to promote, then new ones.

    A branch is omitted until its trunk has reached the branch step.
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
    """Return whether running trials may release others to claim: branches or promotions.

    Also prune paused trials that can no longer be promoted.
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
    """Start or continue the trial; None if it ended or another worker has taken it.

    A trial whose workers died too often fails.
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

    An attempt counts only if it ended abnormally without saving anything new. So a long run on
    preemptible machines continues, and one that kills its workers fails.
    """
    saved_step = max(run_folder.steps(study.run_folder(run_number(trial))), default=0)
    previous_attempts = trial.user_attrs.get('attempt') or {'after': saved_step, 'count': 0}
    count = previous_attempts['count'] + 1 if previous_attempts['after'] == saved_step else 1
    if count > 1 + study.sweep.retries:
        fail(trial, f'its worker died {count - 1} times after step {saved_step}')
        return False
    trial.set_user_attr('attempt', {'after': saved_step, 'count': count})
    return True


def store_attribute(trial: Trial | None, name: str, value: Any) -> None:
    """Store an attribute of the trial; like `end` and `fail`, only on process 0."""
    if trial:
        with _convert_storage_errors(trial):
            trial.set_user_attr(name, value)


def _convert_storage_errors(trial: Trial) -> contextlib.AbstractContextManager[None]:
    return intact(f'the study {trial.study.study_name!r}')


def end(trial: Trial | None, state: TrialState, value: float | None = None) -> None:
    """Report the end of a trial to the study."""
    if trial:
        with _convert_storage_errors(trial):
            frozen = trial.study.tell(trial, value, state)
        number = '' if frozen.value is None else f' at {frozen.value:.4f}'
        print(f'{trial_title(trial)}: {state_name(frozen)}{number}', flush=True)


def promote(study: Study, trial: Trial) -> bool:
    """Promote a trial paused by ASHA if it is among the best; return whether it continues.

    A trial that is not paused always continues.
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
    """Pause a trial at its rung of ASHA, for any worker to promote."""
    store_attribute(trial, 'attempt', None)
    if trial:
        print(f'{trial_title(trial)}: paused', flush=True)


def fail(trial: Trial | None, reason: str) -> None:
    """Report the failure of a trial and its reason to the study."""
    store_attribute(trial, 'error', reason)
    end(trial, TrialState.FAIL)
