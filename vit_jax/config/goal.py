"""The goal of a run, a number of its evaluations, and the stop once that no longer improves."""

from __future__ import annotations

import dataclasses
import math

from vit_jax.errors import UserError, nearest

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


def parse(text: str, where: str) -> Goal:
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
            parse(self.metric, 'config.early_stop.metric')
        if self.patience < 1:
            raise UserError(f'config.early_stop.patience={self.patience}: must be at least 1')
        if self.min_delta < 0:
            raise UserError(f'config.early_stop.min_delta={self.min_delta}: must be 0 or more')
