"""Examples that each host of a TPU slice has to deliver, and the CPU cores that it takes."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax

from vit_jax.data.dataset import Dataset
from vit_jax.profiling import pipeline
from vit_jax.profiling.preflight import Run
from vit_jax.profiling.topology import Topology


@dataclasses.dataclass(frozen=True)
class Need:
    """The demand of a host at one speed of training.

    Attributes:
      name: of the speed.
      mfu: model FLOPs utilization.
      seconds: of a step.
      per_host: examples a second.
    """

    name: str
    mfu: float
    seconds: float
    per_host: float

    def cores(self, per_core: float) -> int:
        """CPU cores, each delivering `per_core` examples a second."""
        return math.ceil(self.per_host / per_core)


def needs(run: Run, slice_: Topology, mfu: float) -> list[Need]:
    """The demands at the bound of a run and, if that is slower, at an MFU.

    Args:
      run: of the step that was compiled.
      slice_: that it was compiled for.
      mfu: that training reaches, in (0, 1].
    """
    speeds = [('at the bound', run.mfu, run.seconds)]
    if mfu < run.mfu:
        speeds.append(('at the given', mfu, run.seconds * run.mfu / mfu))
    return [Need(n, m, sec, run.rows / sec / slice_.hosts) for n, m, sec in speeds]


def per_core(data: Dataset, put: Callable[[Any], Any]) -> float:
    """Training examples a second that one core of this machine delivers.

    Args:
      data: of the config.
      put: copies a batch to the devices.

    Raises:
      UserError: if no batch can be made.
    """
    seconds = pipeline.measure_stages(
        data, pipeline.EXAMPLES, lambda b: jax.block_until_ready(put(b))
    )
    return 1 / sum(seconds.values())


def record(found: Sequence[Need], per_core: float, slice_: Topology) -> dict[str, Any]:
    """The numbers as JSON."""
    return {
        'hosts': slice_.hosts,
        'per_core_per_sec': per_core,
        'needs': [dataclasses.asdict(n) | {'cores': n.cores(per_core)} for n in found],
    }
