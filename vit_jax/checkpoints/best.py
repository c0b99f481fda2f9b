"""The best evaluated step of a run: what its checkpoints say of it, and where it is read.

Every checkpoint tells the best step up to its own, so that a run that resumes from it knows what
it knew, whatever has become of its other files.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from vit_jax.checkpoints import manifest
from vit_jax.config import goal as goal_lib
from vit_jax.errors import UserError
from vit_jax.storage import run_folder, step_folder

BEST: Literal['best'] = 'best'  # names that step, where the number of a step may stand
Step = int | Literal['best'] | None

BESTS, KEPT = 'bests', 'keep_best'  # keys of what a checkpoint tells, and in there
_KEY = 'config.checkpoint.keep_best'


@dataclasses.dataclass(frozen=True)
class Best:
    """The best result so far by some goal.

    Attributes:
      goal: as the config gives it, see `config.goal.parse`.
      step: that had it; None before the first.
      value: of the metric.
      since: how many evaluations after it were no better.
    """

    goal: str
    step: int | None = None
    value: float | None = None
    since: int = 0


def of_meta(meta: Mapping[str, Any], key: str) -> Best | None:
    """What a checkpoint tells of the best result, by `key`; None if it tells nothing."""
    found = meta.get(BESTS, {}).get(key)
    return None if found is None else Best(**found)


def find(directory: Path) -> int:
    """The best evaluated step of the checkpoints in a run's folder, as the newest of them tells.

    That of a run which was stopped during an evaluation cannot tell its result: the log does.

    Raises:
      UserError: if the run keeps none, or has evaluated none yet.
    """
    newest, _ = manifest.newest_intact(directory, (step_folder.META,))
    meta = {} if newest is None else step_folder.read_meta(directory / str(newest))
    best = of_meta(meta, KEPT)
    if newest is None or best is None:
        raise UserError(f'{directory} keeps no best step: train with {_KEY}')
    goal, step, value = goal_lib.parse(best.goal, _KEY), best.step, best.value
    if meta.get('unevaluated'):
        for line in run_folder.read_metrics(directory.parent):
            result = line.get(goal.metric)
            if line['step'] == newest and result is not None and goal.is_better(result, value):
                step, value = newest, result
    if step is None:
        raise UserError(f'{directory} has no best step yet: none with {goal.metric} is saved')
    return step
