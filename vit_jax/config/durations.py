"""Durations in steps of a run: '300 epochs' or '5%', which `run.parse_duration` reads."""

from __future__ import annotations

import dataclasses
import math

from vit_jax.config.run import Duration, parse_duration
from vit_jax.errors import UserError

MAX_STEPS = 2**31 - 1  # the state counts them in an int32
MAX_EVAL_SHARE = 10  # evaluations take at most one tenth of the time
TRAIN_TO_EVAL = 3  # a backward pass costs about two forward passes


@dataclasses.dataclass(frozen=True)
class Durations:
    """Converts durations to steps of this run; `batch_size` counts examples."""

    batch_size: float
    epoch_size: int
    total_steps: int = 0

    @classmethod
    def of(cls, total: Duration, batch_size: float, epoch_size: int) -> Durations:
        """The durations of a run of length `total`.

        Args:
          total: `config.total`.
          batch_size: examples in a step, for durations in examples.
          epoch_size: examples in an epoch, for durations in epochs.

        Raises:
          UserError: if the state of a run cannot count that many steps.
        """
        steps = cls(batch_size, epoch_size).steps(total, 'config.total')
        if steps > MAX_STEPS:
            raise UserError(f'config.total={total!r}: {steps:.3g} steps are more than 2**31 - 1')
        return cls(batch_size, epoch_size, steps)

    def steps(self, text: Duration, where: str = 'duration') -> int:
        """The number of steps, at least 1 unless the duration is empty or zero.

        Raises:
          UserError: for text that is not a duration, or a share of an unknown total.
        """
        amount, unit = parse_duration(text, where)
        if unit == '%' and not self.total_steps:
            raise UserError(f'{where}={text!r}: the total cannot be given in % of itself')
        scale = {
            'steps': 1.0,
            'epochs': self.epoch_size / self.batch_size,
            'examples': 1 / self.batch_size,
            '%': self.total_steps / 100,
        }[unit]
        return max(1, round(amount * scale)) if amount else 0

    def between_evals(self, examples: int) -> int:
        """The default steps between evaluations of this many examples; see `run.Every`."""
        cheap = MAX_EVAL_SHARE * examples / (TRAIN_TO_EVAL * self.batch_size)
        return max(self.steps('10%'), math.ceil(cheap))
