"""A trial, from the claim of its worker to its end.

A claim is a lock in the shared folder, which ends with its process however that dies. A trial
that is said to run but is claimed by nobody lost its worker: whoever claims it next continues
the same trial from its checkpoint. This needs nothing of the storage, so that it holds for all.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from optuna.trial import FrozenTrial, Trial, TrialState

from vit_jax.storage import lock, run_folder
from vit_jax.sweeps.study import Study, run_number, state_name


@contextlib.contextmanager
def claimed(study: Study) -> Iterator[Trial | None]:
    """Claim a trial that lost its worker, or else the next that waits; None if there is neither."""
    for state in (TrialState.RUNNING, TrialState.WAITING):
        for frozen in study.trials(state):
            with contextlib.ExitStack() as held:
                try:
                    held.enter_context(lock.hold(study.claim_folder(frozen.number)))
                except lock.InUse:
                    continue
                if (trial := take(study, frozen)) is not None:
                    yield trial
                    return
    yield None


def take(study: Study, frozen: FrozenTrial) -> Trial | None:
    """Start or continue the trial; None if it ended or was taken before it was claimed.

    One whose workers died too often fails here.
    """
    state = study.storage.get_trial(frozen._trial_id).state
    if state.is_finished():
        return None
    if state == TrialState.WAITING and not study.storage.set_trial_state_values(
        frozen._trial_id, TrialState.RUNNING
    ):
        return None
    # A search then depends on its seed and on what is known, not on who runs the trial.
    trial = Trial(study.load(study.sweep.seed + frozen.number), frozen._trial_id)
    return trial if count_attempt(study, trial) else None


def count_attempt(study: Study, trial: Trial) -> bool:
    """Count an attempt at the trial; after too many, fail the trial and return False.

    Only those count that end neither in order nor with anything new saved, so that a long run
    on machines that come and go is not given up, but one that kills its workers is.
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
    """Tell the study how a trial ended."""
    if trial:
        frozen = trial.study.tell(trial, value, state)
        number = '' if frozen.value is None else f' at {frozen.value:.4f}'
        print(f'trial {trial.number}: {state_name(frozen)}{number}', flush=True)


def fail(trial: Trial | None, reason: str) -> None:
    """Tell the study that a trial failed, and why."""
    note(trial, 'error', reason)
    end(trial, TrialState.FAIL)
