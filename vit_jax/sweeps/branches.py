"""Trials that branch off from the run of another trial, their trunk.

A point names its trunk by `branch.from='trial:3'`, the fourth point of its sweep, and
`branch.step`, which that run has to keep. A study replaces the former by the trunk's run folder.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from optuna.trial import FrozenTrial

from vit_jax.errors import UserError
from vit_jax.storage import paths, run_folder
from vit_jax.sweeps import space

FolderOf = Callable[[int], paths.Path]  # the run folder of a trial
FROM, STEP = 'branch.from', 'branch.step'
_TRUNK = 'trial:'


def trunk(number: int) -> str:
    """The value of `branch.from` for a branch of that trial."""
    return f'{_TRUNK}{number}'


def trunk_of(point: Mapping[str, Any]) -> int | None:
    """The number of the trial that a point branches off from; None without one."""
    found = re.fullmatch(rf'{_TRUNK}(\d+)', str(point.get(FROM, '')))
    return int(found[1]) if found else None


def require_trunks(sweep: space.Sweep) -> None:
    """Raise UserError for a branch whose trunk is not an earlier point."""
    for number, point in enumerate(sweep.points):
        name = str(point.get(FROM, ''))
        if not name.startswith(_TRUNK):
            continue
        found = trunk_of(point)
        if found is None or found >= number:
            raise UserError(
                f'sweep: {FROM}={name} of point {number}: a branch needs a trunk, the number of '
                f'an earlier point, from {trunk(0)} on'
            )
        if not point.get(STEP):
            raise UserError(f'sweep: point {number} branches off from {name}: give {STEP}, too')


def resolved(point: Mapping[str, Any], folder_of: FolderOf) -> space.Point:
    """The point with the run folder of its trunk, if it has one."""
    found = trunk_of(point)
    return dict(point) | ({} if found is None else {FROM: str(folder_of(found))})


def waits(trial: FrozenTrial, trials: Sequence[FrozenTrial], folder_of: FolderOf) -> bool:
    """Whether the trial is a branch whose trunk is still on its way to the step that it needs.

    A trunk that ended without it holds up nothing: the branch is then tried, and fails by name.
    """
    point = trial.params or trial.system_attrs.get('fixed_params', {})
    found = trunk_of(point)
    if found is None or point.get(STEP) in run_folder.steps(folder_of(found)):
        return False
    *_, last = (t for t in trials if t.user_attrs.get('run', t.number) == found)
    return not last.state.is_finished()
