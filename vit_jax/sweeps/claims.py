"""A trial, from the claim of its worker to its end.

A claim is a lock in the shared folder, which ends with its process however that dies. A running
trial without a claim has lost its worker: the next worker that claims it continues the same trial
from its checkpoint. Claims do not use the storage, so they work with every one.
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
    """Claim a trial that lost its worker, else the next waiting one; None if there is neither."""
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
    return trial if count_attempt(study, trial) else None


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


def fail(trial: Trial | None, reason: str) -> None:
    """Report the failure of a trial and its reason to the study."""
    note(trial, 'error', reason)
    end(trial, TrialState.FAIL)
