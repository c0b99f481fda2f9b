"""The best evaluated step of a run, as recorded in its checkpoints.

Every checkpoint records the best step up to its own, so that a run that resumes from it knows it
even without the run's other files.
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

BEST: Literal['best'] = 'best'  # in place of a step's number
Step = int | Literal['best'] | None

BESTS, KEPT = 'bests', 'keep_best'  # a key of the metadata, and a key in its value
_KEY = 'config.checkpoint.keep_best'


@dataclasses.dataclass(frozen=True)
class Best:
    """The best result so far by some goal.

    Attributes:
      goal: as the config gives it, see `config.goal.parse`.
      step: of that result; None before the first.
      value: of the metric.
      since: number of later evaluations, none of which was better.
    """

    goal: str
    step: int | None = None
    value: float | None = None
    since: int = 0


def of_meta(meta: Mapping[str, Any], key: str) -> Best | None:
    """The best result that a checkpoint records under `key`, or None."""
    found = meta.get(BESTS, {}).get(key)
    return None if found is None else Best(**found)


def find(directory: Path) -> int:
    """The best evaluated step of the checkpoints in a run's folder, as the newest of them records.

    The newest checkpoint of a run that was stopped during an evaluation lacks its result: that is
    read from the log.

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
