"""Choice of the number of microbatches, by compiling the same step with several numbers.

More microbatches need less memory for temporaries, and may be small enough to stay in VMEM, which
lowers the bound.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from ml_collections import ConfigDict

from vit_jax.config import defaults
from vit_jax.errors import UserError
from vit_jax.profiling import preflight
from vit_jax.profiling.preflight import Report, Run
from vit_jax.profiling.topology import Topology

FEWEST = 8  # examples of a microbatch on a chip
STILL_LESS = 0.99  # of the previous bound, for more microbatches to be tried
# Of the bound without accumulation. Below 1, since bounds ignore the gaps between operations, which
# every microbatch adds.
WORTH = 0.9

Tried = Mapping[int, tuple[list[Report], Run]]


def numbers(config: ConfigDict, topology: Topology) -> list[int]:
    """The powers of two that divide a chip's examples and leave enough to each microbatch.

    Raises:
      UserError: if the batch is counted in tokens, or the chips do not share it equally.
    """
    if config.data.get('buckets'):
        raise UserError('--accum fit counts examples, and this config tokens')
    shards = topology.chips // defaults.arguments(config, 'parallel')['tensor']
    if config.batch_size % shards:
        raise UserError(
            f'config.batch_size={config.batch_size}: must be a multiple of {shards} chips'
        )
    a_chip = config.batch_size // shards
    powers = (2**i for i in range(a_chip.bit_length()))
    return [n for n in powers if a_chip % n == 0 and (n == 1 or a_chip // n >= FEWEST)]


def with_steps(config: ConfigDict, number: int) -> ConfigDict:
    """A copy of a config with `number` microbatches."""
    return preflight.apply(config, f'step.accum_steps={number}')


def trials(
    config: ConfigDict, topology: Topology, **options: Any
) -> Iterator[tuple[int, tuple[list[Report], Run]]]:
    """Each number of microbatches with its result of `preflight`, until the bound stops falling.

    The arguments are those of `preflight.preflight`.
    """
    before = None
    for number in numbers(config, topology):
        reports, run = preflight.preflight(with_steps(config, number), topology, **options)
        yield number, (reports, run)
        if all(report.fits for report in reports):
            if before is not None and run.seconds > STILL_LESS * before:
                return
            before = run.seconds


def choose(tried: Tried) -> tuple[int, str]:
    """The number of microbatches to take, and the reason.

    Raises:
      UserError: if the step fits with none of them.
    """
    fitting = {n: run.seconds for n, (reports, run) in tried.items() if reports[-1].fits}
    if not fitting:
        raise UserError('--accum fit: the step does not fit with any number of microbatches')
    fewest, best = min(fitting), min(fitting, key=lambda n: fitting[n])
    less = 1 - fitting[best] / fitting[fewest]
    if best > fewest and 1 - less <= WORTH:
        return best, f'step.accum_steps={best} pays: the bound falls by {less:.0%}'
    if fewest > 1:
        return fewest, f'step.accum_steps={fewest} is the first that fits, and more hardly pays'
    if best == 1:
        return 1, 'accumulation does not pay: it lowers no bound'
    how = f'by {less:.0%} with {best} microbatches'
    return 1, f'accumulation does not pay: it lowers the bound {how}'
