"""The cost of planned runs: operations from shapes, time from the peak rate of a device.

Operations are counted as in table 6 of Dosovitskiy et al. 2021 (arXiv:2010.11929): two for a
multiply-accumulate, three times the forward pass for a training step, where it has a gradient, and
nothing for evaluations.
Its row for B/16, 7 epochs of 303 million images, has 224 exaFLOPs.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from vit_jax.errors import UserError
from vit_jax.profiling import flops

CORE = 'TPU v3'  # the papers count its core-days; JAX calls such a core a device


@dataclasses.dataclass(frozen=True)
class PlannedRun:
    """Runs to be trained, which cost the same.

    Attributes:
      point: its differences from others, {'model.width': 64}.
      parameters: of the model.
      steps: that it makes itself, without those of a run that it branches from.
      batch_size: examples of a step; an average if there are buckets.
      forward: FLOPs of the forward passes on one example, including the padding of its batch.
      train: FLOPs of these and the backward passes.
      count: number of runs that cost this much, or less if a search chooses their points.
      tokens: of the target in a step, on average and without padding; 0 without text.
    """

    point: Mapping[str, Any]
    parameters: int
    steps: int
    batch_size: float
    forward: float
    train: float
    count: int = 1
    tokens: float = 0

    @property
    def examples(self) -> float:
        """Number of examples that each run sees, with repetitions."""
        return self.steps * self.batch_size

    @property
    def flops(self) -> float:
        """FLOPs of all runs together, forward and backward."""
        return self.count * self.examples * self.train


@dataclasses.dataclass(frozen=True)
class Machine:
    """The device that trains, and its utilization.

    Attributes:
      device: as JAX names it, `TPU v3`.
      mfu: share of its peak that training reaches, in (0, 1].

    Raises:
      UserError: for a device with unknown peak, or a share out of range.
    """

    device: str
    mfu: float

    def __post_init__(self) -> None:
        if flops.peak_flops(self.device) is None:
            known = ', '.join(flops.PEAK_FLOPS)
            raise UserError(f'--device {self.device!r}: its peak is not known; there are {known}')
        if not 0 < self.mfu <= 1:
            raise UserError(f'--mfu {self.mfu}: must be more than 0 and at most 1')

    def device_hours(self, operations: float) -> float:
        """Hours of a JAX device, which is a core on TPU v2 and v3."""
        peak = flops.peak_flops(self.device)
        assert peak
        return operations / (peak * self.mfu) / 3600

    def chip_hours(self, operations: float) -> float:
        """Hours of a chip, as clouds bill them."""
        return self.device_hours(operations) * flops.chips(1, self.device)


def lines(runs: Sequence[PlannedRun], machine: Machine) -> list[list[str]]:
    """A table: headings, a line a run, and the sum."""
    core = Machine(CORE, machine.mfu)
    names = [
        name for name in dict.fromkeys(n for run in runs for n in run.point) if name != 'total'
    ]
    several, text = any(run.count > 1 for run in runs), any(run.tokens for run in runs)
    headings = [*_short_names(names), *(['runs'] if several else [])]
    headings += ['parameters', 'steps', 'examples', *(['tokens'] if text else [])]
    headings += ['GFLOPs', 'exaFLOPs', 'chip-hours', 'core-days']

    def costs(operations: float) -> list[str]:
        days = core.device_hours(operations) / 24
        return [_number(x) for x in (operations / 1e18, machine.chip_hours(operations), days)]

    table = [headings]
    for run in runs:
        point = [str(run.point.get(name, '')) for name in names]
        sizes = [f'{x:,.0f}' for x in (run.parameters, run.steps, run.examples)]
        sizes += [f'{run.steps * run.tokens:,.0f}'] if text else []
        count = [str(run.count)] if several else []
        forward = _number(run.forward / 1e9)
        table.append([*point, *count, *sizes, forward, *costs(run.flops)])
    total = costs(sum(run.flops for run in runs))
    table.append(['sum', *[''] * (len(headings) - len(total) - 1), *total])
    return table


def _short_names(names: Sequence[str]) -> list[str]:
    """`model.width` -> `width`, unless another name has the same ending."""
    leaves = [name.rpartition('.')[2] for name in names]
    return [
        leaf if leaves.count(leaf) == 1 else name for name, leaf in zip(names, leaves, strict=True)
    ]


def _number(value: float) -> str:
    return f'{value:,.0f}' if value >= 1000 else f'{value:.4g}'
