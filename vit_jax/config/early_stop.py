"""The section for stopping a run that no longer improves; a config may leave it out."""

from __future__ import annotations

import dataclasses

from vit_jax.config import goal
from vit_jax.errors import UserError


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
            goal.parse(self.metric, 'config.early_stop.metric')
        if self.patience < 1:
            raise UserError(f'config.early_stop.patience={self.patience}: must be at least 1')
        if self.min_delta < 0:
            raise UserError(f'config.early_stop.min_delta={self.min_delta}: must be 0 or more')
