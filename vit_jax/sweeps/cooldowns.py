"""Points of a sweep that share trunks: a run at a constant rate, cooled down at several lengths.

Hu et al., 2024 (arXiv:2404.06395, the WSD schedule), and Hägele et al., 2024 (arXiv:2405.18392): a
cooldown of a fifth of the run comes close to a cosine of the same length.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from vit_jax.errors import UserError
from vit_jax.sweeps import asha
from vit_jax.sweeps.space import Point

TOTAL, COOLDOWN, KEEP = 'total', 'optim.schedule.cooldown', 'checkpoint.keep_steps'
KEYS = (TOTAL, COOLDOWN, KEEP, asha.FROM, asha.STEP)


def cooldowns(
    points: Sequence[Point], lengths: Sequence[int], cooldown: float = 0.2
) -> list[Point]:
    """Train each point for several lengths, at the cost of the longest and all cooldowns.

    The longest run is the trunk. It keeps the steps at which the shorter ones branch off. The base
    config needs a schedule that does not depend on its end, such as a warm-up in steps and
    `constant`.

    Args:
      points: Values of other dimensions, see `space.grid`.
      lengths: Steps of the runs, rising.
      cooldown: Share of a run's steps in which its rate falls.

    Returns:
      The points of the trunks, then their branches.

    Raises:
      UserError: for lengths or a share that leave no step before a cooldown, or a point that sets
        its own length.
    """
    if not 0 < cooldown < 1 or not lengths:
        raise UserError(f'cooldowns: cooldown={cooldown} must be a share, and lengths not empty')
    if any(later <= earlier for earlier, later in itertools.pairwise(lengths)):
        raise UserError(f'cooldowns: lengths={tuple(lengths)} must rise')
    falls = [max(1, round(cooldown * length)) for length in lengths]
    starts = [length - fall for length, fall in zip(lengths, falls, strict=True)]
    if starts[0] < 1:
        raise UserError(f'cooldowns: lengths={tuple(lengths)}: no step is left before a cooldown')
    for point in points:
        if decided := [key for key in KEYS if key in point]:
            raise UserError(f'cooldowns: a point sets {decided[0]}, which its lengths decide')
    runs = [
        {
            TOTAL: f'{length} steps',
            COOLDOWN: f'{fall} steps',
            KEEP: '()',
            asha.FROM: '',
            asha.STEP: 0,
        }
        for length, fall in zip(lengths, falls, strict=True)
    ]
    trunks = [{**point, **runs[-1], KEEP: str(tuple(starts[:-1]))} for point in points]
    branches = [
        {**point, **run, asha.FROM: asha.trunk(number), asha.STEP: start}
        for number, point in enumerate(points)
        for run, start in zip(runs[:-1], starts[:-1], strict=True)
    ]
    return trunks + branches
