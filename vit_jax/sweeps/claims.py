"""A trial, from the claim of its worker to its end.

A claim is a lock in the shared folder, which ends with its process however that dies. A running
trial without a claim has lost its worker, or is paused at a rung of ASHA: the next worker that
claims it continues the same trial from its checkpoint. Claims do not use the storage, so they work
with every one.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from optuna.trial import FrozenTrial, Trial, TrialState

from vit_jax.storage import lock, run_folder
from vit_jax.sweeps import asha, branches
from vit_jax.sweeps.study import Study, run_number, state_name


@contextlib.contextmanager
def claimed(study: Study) -> Iterator[Trial | None]:
    """Claim the first of `candidates` that is free; None if there is none."""
    for frozen in candidates(study):
        with contextlib.ExitStack() as held:
            try:
                held.enter_context(lock.hold(study.claim_folder(frozen.number)))
            except lock.InUse:
                continue
            if (trial := take(study, frozen)) is not None:
                yield trial
                return
    yield None


def candidates(study: Study) -> Iterator[FrozenTrial]:
    """Trials that lost their worker, then paused ones to be promoted, then new ones.

    A branch is no candidate before its trunk has reached the step that it branches off from.
    """
    rule = asha.of_sweep(study.sweep)
    running = study.trials(TrialState.RUNNING)
    yield from (t for t in running if not (rule and rule.is_paused(t)))
    if rule:
        yield from rule.promotable(study.trials(), study.sweep.direction == 'maximize')
    yield from (t for t in study.trials(TrialState.WAITING) if not waits_for_trunk(study, t))


def waits_for_trunk(study: Study, frozen: FrozenTrial) -> bool:
    """Whether the trial is a branch whose trunk has not got there."""
    return branches.waits(frozen, study.trials(), study.run_folder)


def more_to_come(study: Study) -> bool:
    """Whether trials that other workers are at may leave some to claim: branches, promotions.

    Paused trials that nothing can promote any more are pruned here.
    """
    if any(waits_for_trunk(study, frozen) for frozen in study.trials(TrialState.WAITING)):
        return True
    rule, running = asha.of_sweep(study.sweep), study.trials(TrialState.RUNNING)
    if rule is None:
        return False
    if any(lock.holder(study.claim_folder(frozen.number)) for frozen in running):
        return True
    for frozen in running:
        with contextlib.suppress(lock.InUse), lock.hold(study.claim_folder(frozen.number)):
            # Storages take an id of the trial that Optuna's trials have under no public name.
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
    # So the search depends on its seed and the known trials, not on the worker.
    trial = Trial(study.load(study.sweep.seed + frozen.number), frozen._trial_id)
    return trial if promote(study, trial) and count_attempt(study, trial) else None


def count_attempt(study: Study, trial: Trial) -> bool:
    """Count an attempt at the trial; after too many, fail the trial and return False.

    An attempt counts only if it ended abnormally without saving anything new, so that a long run
    on preemptible machines is not given up, but one that kills its workers is.
    """
    saved = max(run_folder.steps(study.run_folder(run_number(trial))), default=0)
    before = trial.user_attrs.get('attempt') or {'after': saved, 'count': 0}
    count = before['count'] + 1 if before['after'] == saved else 1
    if count > 1 + study.sweep.retries:
        fail(trial, f'its worker died {count - 1} times after step {saved}')
        return False
    trial.set_user_attr('attempt', {'after': saved, 'count': count})
    return True


def note(trial: Trial | None, name: str, value: Any) -> None:
    """Store an attribute of the trial; like `end` and `fail`, on process 0 alone."""
    if trial:
        trial.set_user_attr(name, value)


def end(trial: Trial | None, state: TrialState, value: float | None = None) -> None:
    """Report the end of a trial to the study."""
    if trial:
        frozen = trial.study.tell(trial, value, state)
        number = '' if frozen.value is None else f' at {frozen.value:.4f}'
        print(f'trial {trial.number}: {state_name(frozen)}{number}', flush=True)


def promote(study: Study, trial: Trial) -> bool:
    """Let a trial that ASHA paused go on if it is among the best; return whether it does.

    A trial that is not paused goes on anyway.
    """
    rule, maximize = asha.of_sweep(study.sweep), study.sweep.direction == 'maximize'
    if rule is None:
        return True
    while rule.is_paused(frozen := study.storage.get_trial(trial._trial_id)):
        if all(t.number != trial.number for t in rule.promotable(study.trials(), maximize)):
            return False
        trial.set_user_attr(asha.PROMOTED, asha.promotions(frozen) + 1)
    return True


def pause(trial: Trial | None) -> None:
    """Leave a trial at its rung of ASHA, for any worker to promote."""
    note(trial, 'attempt', None)
    if trial:
        print(f'trial {trial.number}: paused', flush=True)


def fail(trial: Trial | None, reason: str) -> None:
    """Report the failure of a trial and its reason to the study."""
    note(trial, 'error', reason)
    end(trial, TrialState.FAIL)
