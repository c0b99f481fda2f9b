"""Best evaluated step of a run, as its checkpoints record it."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from vit_jax.checkpoints import manifest
from vit_jax.config.run import parse_goal
from vit_jax.errors import UserError
from vit_jax.storage import run_folder

BESTS, KEPT = 'bests', 'keep_best'  # a key of the metadata, and a key of its value
_KEY = 'config.checkpoint.keep_best'


@dataclasses.dataclass(frozen=True)
class Best:
    """Best result so far.

    Attributes:
      goal: Goal as in the config, see `run.parse_goal`.
      step: Step of that result; None before the first.
      value: Value of the metric.
      since: Number of later evaluations, none of them better.
    """

    goal: str
    step: int | None = None
    value: float | None = None
    since: int = 0


def best_from_meta(meta: Mapping[str, Any], key: str) -> Best | None:
    """Return the best result that a checkpoint records under `key`, or None."""
    entry = meta.get(BESTS, {}).get(key)
    return None if entry is None else Best(**entry)


def find_best(directory: Path) -> int:
    """Return the best evaluated step of a run according to its newest checkpoint.

    If a run was stopped during an evaluation, its newest checkpoint lacks the result, which is
    then read from the log.

    Raises:
      UserError: if the run keeps no best step, or has not evaluated one yet.
    """
    newest, _ = manifest.newest_intact(directory, (run_folder.META,))
    meta = {} if newest is None else run_folder.read_meta(directory / str(newest))
    best = best_from_meta(meta, KEPT)
    steps = ', '.join(map(str, run_folder.finished_steps(directory))) or 'none'
    if newest is None or best is None:
        raise UserError(
            f'{directory} has no best step (finished steps: {steps}): train with {_KEY}'
        )
    goal, step, best_value = parse_goal(best.goal, _KEY), best.step, best.value
    if meta.get('unevaluated'):
        for line in run_folder.read_metrics(directory.parent):
            result = line.get(goal.metric)
            if line['step'] == newest and result is not None and goal.is_better(result, best_value):
                step, best_value = newest, result
    if step is None:
        raise UserError(
            f'{directory} has no best step yet (finished steps: {steps}): '
            f'{goal.metric} was not evaluated'
        )
    return step
