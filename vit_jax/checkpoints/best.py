"""The best evaluated step of a run: goals of `keep_best` and early stopping, and their record."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from vit_jax.checkpoints import manifest
from vit_jax.errors import UserError, nearest
from vit_jax.storage import run_folder

BEST: Literal['best'] = 'best'  # in place of a step's number
Step = int | Literal['best'] | None

BESTS, KEPT = 'bests', 'keep_best'  # a key of the metadata, and a key of its value
_KEY = 'config.checkpoint.keep_best'
_DIRECTIONS = ('max', 'min')


@dataclasses.dataclass(frozen=True)
class Goal:
    """A metric of an evaluation, to be maximized or minimized.

    Attributes:
      metric: an entry of `config.evals` and its metric, as `test/accuracy`.
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
      text: a value in a config.
      where: its key, for the message.

    Raises:
      UserError: for another direction, or a name that is not ENTRY/METRIC.
    """
    direction, colon, metric = text.rpartition(':')
    if colon and direction not in _DIRECTIONS:
        raise UserError(f'{where}={text!r}: {nearest("direction", direction, _DIRECTIONS)}')
    entry, _, name = metric.partition('/')
    if not (entry and name):
        raise UserError(
            f'{where}={text!r}: name an evaluation and its metric, as test/accuracy, or '
            'min:test/loss if lower is better'
        )
    return Goal(metric, direction == 'min')


@dataclasses.dataclass(frozen=True, kw_only=True)
class EarlyStop:
    """`config.early_stop`: the run ends before its total if its evaluations no longer improve.

    Attributes:
      metric: of an evaluation, as `test/accuracy`, or `min:test/loss` if lower is better; empty for
        no early stop.
      patience: number of successive evaluations without improvement that ends the run.
      min_delta: smallest improvement that counts, in units of the metric.
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
    """The best result so far.

    Attributes:
      goal: as in the config, see `parse_goal`.
      step: of that result; None before the first.
      value: of the metric.
      since: number of later evaluations, none of them better.
    """

    goal: str
    step: int | None = None
    value: float | None = None
    since: int = 0


def best_from_meta(meta: Mapping[str, Any], key: str) -> Best | None:
    """The best result that a checkpoint records under `key`, or None."""
    found = meta.get(BESTS, {}).get(key)
    return None if found is None else Best(**found)


def find_best(directory: Path) -> int:
    """The best evaluated step in a run's `checkpoints`, as recorded by the newest checkpoint.

    If a run was stopped during an evaluation, its newest checkpoint lacks the result, which is
    then read from the log.

    Raises:
      UserError: if the run keeps no best step, or has not evaluated one yet.
    """
    newest, _ = manifest.newest_intact(directory, (run_folder.META,))
    meta = {} if newest is None else run_folder.read_meta(directory / str(newest))
    best = best_from_meta(meta, KEPT)
    if newest is None or best is None:
        raise UserError(f'{directory} keeps no best step: train with {_KEY}')
    goal, step, value = parse_goal(best.goal, _KEY), best.step, best.value
    if meta.get('unevaluated'):
        for line in run_folder.read_metrics(directory.parent):
            result = line.get(goal.metric)
            if line['step'] == newest and result is not None and goal.is_better(result, value):
                step, value = newest, result
    if step is None:
        raise UserError(f'{directory} has no best step yet: no saved step has {goal.metric}')
    return step
