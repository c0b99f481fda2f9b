"""The goals of a run, numbers of its evaluations, and the best steps, recorded in its checkpoints.

Every checkpoint records the best step up to its own, so that a run that resumes from it knows it
even without the run's other files.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from vit_jax.checkpoints import manifest
from vit_jax.errors import UserError, nearest
from vit_jax.storage import run_folder, step_folder

BEST: Literal['best'] = 'best'  # in place of a step's number
Step = int | Literal['best'] | None

BESTS, KEPT = 'bests', 'keep_best'  # a key of the metadata, and a key in its value
_KEY = 'config.checkpoint.keep_best'
DIRECTIONS = ('max', 'min')


@dataclasses.dataclass(frozen=True)
class Goal:
    """One number of one evaluation, to be maximized or minimized.

    Attributes:
      metric: an entry of `config.evals` and one of its numbers, as `test/accuracy`.
      lower: whether lower is better.
    """

    metric: str
    lower: bool = False

    def is_better(self, value: float, than: float | None, by: float = 0.0) -> bool:
        """Whether a value is better than another by more than `by`; NaN never is."""
        if math.isnan(value) or than is None:
            return not math.isnan(value)
        return (than - value if self.lower else value - than) > by

    def __str__(self) -> str:
        return f'{"lowest" if self.lower else "highest"} {self.metric}'


def parse_goal(text: str, where: str) -> Goal:
    """Parse `'test/accuracy'` or `'max:test/accuracy'` (higher is better) or `'min:test/loss'`.

    Args:
      text: of a config.
      where: its place, for the message.

    Raises:
      UserError: for another direction, or a name that is not ENTRY/NUMBER.
    """
    direction, colon, metric = text.rpartition(':')
    if colon and direction not in DIRECTIONS:
        raise UserError(f'{where}={text!r}: {nearest("direction", direction, DIRECTIONS)}')
    entry, _, number = metric.partition('/')
    if not (entry and number):
        raise UserError(
            f'{where}={text!r}: name an evaluation and its number, as test/accuracy, or '
            'min:test/loss where lower is better'
        )
    return Goal(metric, direction == 'min')


@dataclasses.dataclass(frozen=True, kw_only=True)
class EarlyStop:
    """`config.early_stop`: the run ends before its total if its evaluations no longer improve.

    Attributes:
      metric: a number of an evaluation, as `test/accuracy`, or `min:test/loss` if lower is better;
        empty for no early stop.
      patience: number of evaluations in a row that are no better than the best; the last of them
        ends the run.
      min_delta: least improvement that counts, in the units of the metric.
    """

    metric: str = ''
    patience: int = 5
    min_delta: float = 0.0

    def __post_init__(self) -> None:
        if self.metric:
            parse_goal(self.metric, 'config.early_stop.metric')
        if self.patience < 1:
            raise UserError(f'config.early_stop.patience={self.patience}: must be at least 1')
        if self.min_delta < 0:
            raise UserError(f'config.early_stop.min_delta={self.min_delta}: must be 0 or more')


@dataclasses.dataclass(frozen=True)
class Best:
    """The best result so far by some goal.

    Attributes:
      goal: as the config gives it, see `parse_goal`.
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
    goal, step, value = parse_goal(best.goal, _KEY), best.step, best.value
    if meta.get('unevaluated'):
        for line in run_folder.read_metrics(directory.parent):
            result = line.get(goal.metric)
            if line['step'] == newest and result is not None and goal.is_better(result, value):
                step, value = newest, result
    if step is None:
        raise UserError(f'{directory} has no best step yet: none with {goal.metric} is saved')
    return step
