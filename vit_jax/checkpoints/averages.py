"""Choice of a run's average: by `--average`, or as the best step was measured."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from vit_jax.checkpoints.best import KEPT, best_from_meta
from vit_jax.checkpoints.format import OTHERS
from vit_jax.config.run import Step, average_key, parse_goal
from vit_jax.errors import UserError

# Number of checkpoints whose first averages are averaged again, the decay of one of several
# averages, or NO_AVERAGE for the parameters themselves.
Average = int | float | str
NO_AVERAGE = 'none'


def checkpoint_count(average: Average) -> int:
    """Return the number of checkpoints that a choice reads."""
    return average if isinstance(average, int) else 1


def stored_path(average: Average, meta: Mapping[str, Any], checkpoint: str) -> tuple[str, ...]:
    """Return the place of the chosen parameters in a stored state; empty for the run's first.

    Args:
      average: Choice of an average.
      meta: Metadata of the checkpoint.
      checkpoint: The checkpoint, for the message.

    Raises:
      UserError: if the run does not keep this average.
    """
    if isinstance(average, int):
        return ()
    if average == NO_AVERAGE:
        return ('params',)
    step = meta.get('config', {}).get('step', {})
    settings = Step(ema_decay=step.get('ema_decay', Step.ema_decay))
    if average not in settings.ema_decays:
        decays = ', '.join(map(str, settings.ema_decays)) or 'none'
        raise UserError(
            f'average {average}: {checkpoint} has averages of the decays (config.step.ema_decay): '
            f'{decays}'
        )
    return () if average == settings.ema_decays[0] else (OTHERS, average_key(float(average)))


def measured_average(meta: Mapping[str, Any]) -> Average:
    """Return the average that the evaluation of `config.checkpoint.keep_best` measures."""
    best, config = best_from_meta(meta, KEPT), meta.get('config', {})
    if best is None:
        return 1
    entry = parse_goal(best.goal, 'config.checkpoint.keep_best').metric.partition('/')[0]
    decay = config.get('evals', {}).get(entry, {}).get('ema_decay')
    return 1 if decay is None else decay or NO_AVERAGE
