"""Trials that pause at rungs, by ASHA, and trials that branch off from others.

ASHA is asynchronous successive halving: trials pause at rungs, and workers promote the best.

Li et al. 2020, "A System for Massively Parallel Hyperparameter Tuning", algorithm 2. Rung k is the
first evaluation at or after step min_resource * reduction_factor^k. A trial that reaches it stops
there with its state saved. Any worker continues it once it is among the best
1 / reduction_factor of all trials that have reached the rung so far. The storage records only
evaluations and promotions, so any worker may die at any time.

Optuna's successive halving and Hyperband do not pause trials: if fewer than `reduction_factor`
have reached a rung, the best of them continues at once, however bad it is.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from vit_jax.errors import UserError
from vit_jax.storage import paths, run_folder
from vit_jax.sweeps import space

# Sweep files and `scaling plan` read points without Optuna.
if TYPE_CHECKING:
    from optuna.trial import FrozenTrial

NAME = 'asha'
PROMOTED = 'promoted'  # attribute of a trial: the number of rungs that it may pass
FROM, STEP = 'branch.from', 'branch.step'
_TRUNK = 'trial:'

FolderOf = Callable[[int], paths.Path]  # the run folder of a trial


@dataclasses.dataclass(frozen=True)
class Asha:
    """Options of ASHA, from `pruner_options`.

    Attributes:
      min_resource: Step of the lowest rung.
      reduction_factor: Inverse of the share of trials that are promoted.

    Raises:
      UserError: for a value out of range.
    """

    min_resource: int
    reduction_factor: int = 4

    def __post_init__(self) -> None:
        for name, least in (('min_resource', 1), ('reduction_factor', 2)):
            value = getattr(self, name)
            if not isinstance(value, int) or value < least:
                raise UserError(f'sweep: pruner_options: {name}={value!r} must be at least {least}')

    def rungs(self, trial: FrozenTrial) -> list[float]:
        """Return the trial's value at each rung that it has reached."""
        values: list[float] = []
        for step, value in sorted(trial.intermediate_values.items()):
            while step >= self.min_resource * self.reduction_factor ** len(values):
                values.append(value)
        return values

    def is_paused(self, trial: FrozenTrial) -> bool:
        """Return whether the trial has reached a rung that it may not pass yet."""
        return len(self.rungs(trial)) > promotions(trial)

    def promotable(self, trials: Sequence[FrozenTrial], maximize: bool) -> list[FrozenTrial]:
        """List paused trials that may continue, highest rung first.

        If nothing else can run and no trial is complete, the best one of the highest rung
        continues, so that every study ends with a finished run.
        """
        from optuna.trial import TrialState

        rungs = {t.number: self.rungs(t) for t in trials if t.state != TrialState.FAIL}
        paused = [t for t in trials if t.state == TrialState.RUNNING and self.is_paused(t)]
        paused.sort(key=lambda t: (-promotions(t), _rank(rungs[t.number][promotions(t)], maximize)))

        def is_among_the_best(trial: FrozenTrial) -> bool:
            rung = promotions(trial)
            ranks = sorted((_rank(v[rung], maximize), n) for n, v in rungs.items() if len(v) > rung)
            best = ranks[: len(ranks) // self.reduction_factor]
            return trial.number in (number for _, number in best)

        candidates = [t for t in paused if is_among_the_best(t)]
        return candidates or (paused[:1] if self._is_over(trials) else [])

    def _is_over(self, trials: Sequence[FrozenTrial]) -> bool:
        """Return whether all trials are paused or ended, and none is complete."""
        from optuna.trial import TrialState

        states = {t.state for t in trials}
        active = any(t.state == TrialState.RUNNING and not self.is_paused(t) for t in trials)
        return not active and not states & {TrialState.WAITING, TrialState.COMPLETE}


def from_sweep(sweep: space.Sweep) -> Asha | None:
    """Return the sweep's ASHA; None for other pruners."""
    return Asha(**sweep.pruner_options) if sweep.pruner == NAME else None


def promotions(trial: FrozenTrial) -> int:
    """Return the number of rungs that the trial may pass."""
    return int(trial.user_attrs.get(PROMOTED, 0))


def _rank(value: float, maximize: bool) -> float:
    return math.inf if math.isnan(value) else -value if maximize else value


def trunk(number: int) -> str:
    """Return the value of `branch.from` for a branch of a trial."""
    return f'{_TRUNK}{number}'


def trunk_of(point: Mapping[str, Any]) -> int | None:
    """Return the number of the trial that a point branches from, or None."""
    match = re.fullmatch(rf'{_TRUNK}(\d+)', str(point.get(FROM, '')))
    return int(match[1]) if match else None


def readable(point: Mapping[str, Any]) -> space.Point:
    """Name the trunk of a point for people, who count trials from 1."""
    number = trunk_of(point)
    return dict(point) | ({} if number is None else {FROM: f'trial {number + 1}'})


def require_trunks(sweep: space.Sweep) -> None:
    """Raise UserError for a branch whose trunk is not an earlier point."""
    for number, point in enumerate(sweep.points):
        name = str(point.get(FROM, ''))
        if not name.startswith(_TRUNK):
            continue
        trunk_number = trunk_of(point)
        if trunk_number is None or trunk_number >= number:
            raise UserError(
                f'sweep: {FROM}={name} of trial {number + 1}: a branch needs a trunk, an earlier '
                f'point by its index, from {trunk(0)} on'
            )
        if not point.get(STEP):
            raise UserError(f'sweep: trial {number + 1} branches off from {name}: give {STEP}, too')


def resolve_trunk(point: Mapping[str, Any], folder_of: FolderOf) -> space.Point:
    """Insert the run folder of a point's trunk, if it has one."""
    trunk_number = trunk_of(point)
    return dict(point) | ({} if trunk_number is None else {FROM: str(folder_of(trunk_number))})


def waits_for_trunk(trial: FrozenTrial, trials: Sequence[FrozenTrial], folder_of: FolderOf) -> bool:
    """Return whether the trial is a branch whose trunk has not reached the branch step yet.

    If the trunk ended before that step, the branch starts and fails with an error.
    """
    point = trial.params or trial.system_attrs.get('fixed_params', {})
    trunk_number = trunk_of(point)
    if trunk_number is None or point.get(STEP) in run_folder.steps(folder_of(trunk_number)):
        return False
    *_, last = (t for t in trials if t.user_attrs.get('run', t.number) == trunk_number)
    return not last.state.is_finished()
