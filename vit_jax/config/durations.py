"""Durations: parsing '300 epochs' or '5%', and converting them to steps of a run."""

from __future__ import annotations

import dataclasses
import math

from ml_collections import ConfigDict

from vit_jax.errors import UserError
from vit_jax.signatures import Duration

MAX_STEPS = 2**31 - 1  # the state counts them in an int32
MAX_EVAL_SHARE = 10  # evaluations take at most one tenth of the time
TRAIN_TO_EVAL = 3  # a backward pass costs about two forward passes
UNITS = {'step': 'steps', 'epoch': 'epochs', 'example': 'examples', '%': '%'}


def parse_duration(text: str | int, where: str = 'duration') -> tuple[float, str]:
    """`'300 epochs'` -> (300.0, 'epochs'). Units: steps (the default), epochs, examples, %.

    Raises:
      UserError: if `text` is not a duration, or is negative.
    """
    number, *words = str(text).replace('%', ' %').split() or ['0']
    unit = UNITS.get(' '.join(words).removesuffix('s')) if words else 'steps'
    try:
        amount = float(number.replace('_', ''))
    except ValueError:
        amount = math.nan
    if unit is None or not 0 <= amount < math.inf:
        raise UserError(f"{where}={text!r}: write '100 steps', '30 epochs', '1e6 examples' or '5%'")
    return amount, unit


@dataclasses.dataclass(frozen=True, kw_only=True)
class Every:
    """`config.every`: intervals of logging, evaluation and checkpoints; empty for never.

    Attributes:
      log: training metrics.
      eval: evaluations in `config.evals` without an interval of their own; None for a tenth of the
        run, or less often to keep them below a tenth of the time, assuming that evaluating an
        example costs a third of training on it.
      checkpoint: the state.
      examples: pictures or tables for the writers, with results of the first evaluation of
        `config.evals`: a few examples with their predictions, and the attention in the first of
        them; also with its last results.
    """

    log: Duration = '1%'
    eval: Duration | None = None
    checkpoint: Duration = '10%'
    examples: Duration = '25%'

    def __post_init__(self) -> None:
        if parse_duration(self.log)[0] <= 0:
            raise UserError(f'config.every.log={self.log!r}: must be positive')


@dataclasses.dataclass(frozen=True)
class Durations:
    """Converts durations to steps of this run; `batch_size` counts examples."""

    batch_size: float
    epoch_size: int
    total_steps: int = 0

    def steps(self, text: str | int, where: str = 'duration') -> int:
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
        """The default steps between evaluations of this many examples; see `Every`."""
        cheap = MAX_EVAL_SHARE * examples / (TRAIN_TO_EVAL * self.batch_size)
        return max(self.steps('10%'), math.ceil(cheap))


def from_config(config: ConfigDict, batch_size: float, epoch_size: int) -> Durations:
    """The run's durations; `.total_steps` is `config.total` in steps.

    Args:
      config: of the run.
      batch_size: examples in a step, for durations in examples.
      epoch_size: examples in an epoch, for durations in epochs.

    Raises:
      UserError: if the state of a run cannot count that many steps.
    """
    bare = Durations(batch_size, epoch_size)
    steps = bare.steps(config.total, 'config.total')
    if steps > MAX_STEPS:
        raise UserError(f'config.total={config.total!r}: {steps:.3g} steps are more than 2**31 - 1')
    return dataclasses.replace(bare, total_steps=steps)
