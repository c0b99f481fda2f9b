"""Throughput of the data pipeline without a model, and time of its stages."""

from __future__ import annotations

import ast
import collections
import contextlib
import dataclasses
import math
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from vit_jax import signatures
from vit_jax.data import images
from vit_jax.data.batches import Batch
from vit_jax.data.dataset import Dataset
from vit_jax.data.read_ahead import Loading
from vit_jax.data.records import BrokenRecord, example_rng
from vit_jax.errors import UserError
from vit_jax.profiling.preflight import RunEstimate
from vit_jax.profiling.topology import Topology
from vit_jax.runtime import environment

EXAMPLES = 256  # whose stages are timed
SECONDS = 5.0  # that batches are timed for, at least
PARTS = 5  # of these, whose rates are compared


@dataclasses.dataclass(frozen=True)
class Throughput:
    """Throughput measured by `measure_throughput`.

    Attributes:
      first: First batch.
      first_sec: Seconds until the first batch, including the start of threads and processes.
      seconds: Time measured, after the batches that may have been ready were discarded.
      per_sec: Rates by unit, such as {'images': 1200.0}; empty for a single batch.
      slowest, fastest: Lowest and highest rate in `PARTS` of the time, as shares of the mean.
      loading: Workers that made the batches.
    """

    first: Batch
    first_sec: float
    seconds: float
    per_sec: dict[str, float]
    slowest: float
    fastest: float
    loading: Loading


def measure_throughput(
    data: Dataset, batches: int, report: Callable[[int], None] = lambda _: None
) -> Throughput:
    """Read training batches as fast as possible.

    Batches prepared during the wait for the first one are discarded; later ones are timed for at
    least `SECONDS`, in whole rounds of the workers, which finish batches at about the same time.

    Args:
      data: Data of the config.
      batches: Minimum number of batches, including discarded ones; 1 for only the first.
      report: Function called after each batch with its number, from 1.

    Raises:
      UserError: if batches cannot be made.
    """
    loading, start_time = data.reading(), time.perf_counter()
    with contextlib.closing(data.train_batches()) as batches_iter:
        first_batch = next(batches_iter)
        first_sec = time.perf_counter() - start_time
        report(1)
        if batches == 1:
            return Throughput(first_batch, first_sec, 0.0, {}, 1.0, 1.0, loading)
        for discarded in range(loading.held):
            next(batches_iter)
            report(2 + discarded)
        number = 1 + loading.held
        counts: collections.Counter[str] = collections.Counter()
        times, start = [0.0], time.perf_counter()
        while times[-1] < SECONDS or number < batches or (len(times) - 1) % loading.round:
            counts.update(data.count(next(batches_iter)))
            times.append(time.perf_counter() - start)
            number += 1
            report(number)
    per_sec = {name: n / times[-1] for name, n in counts.items()}
    return Throughput(
        first_batch, first_sec, times[-1], per_sec, *_spread(np.array(times)), loading
    )


def _spread(times: np.ndarray) -> tuple[float, float]:
    """Return the lowest and highest rate in `PARTS` of the time, as shares of the mean."""
    batches = len(times) - 1
    ends = np.unique(np.linspace(0, batches, PARTS + 1).round().astype(int))
    rates = np.diff(ends) / np.diff(times[ends]) * times[-1] / batches
    return float(rates.min()), float(rates.max())


def measure_stages(data: Dataset, examples: int, put: Callable[[Batch], Any]) -> dict[str, float]:
    """Time the stages of training examples one by one, in this thread.

    An image is decoded in the stage 'decode', or in a crop that decodes only its window.

    Args:
      data: Data of the config.
      examples: Number of examples, spread over the data; broken ones are ignored.
      put: Function that copies a batch to the devices.

    Returns:
      Seconds an example by stage: 'read', 'decode', each transform, 'batch', and 'copy'.

    Raises:
      UserError: if no batch can be made.
    """
    plan, source, spec = data.plan, data.source, data.shapes[-1].spec
    transforms = plan.examples.transforms
    names = [ast.unparse(node) for node in signatures.parse_transforms(transforms.spec)]
    seconds: collections.Counter[str] = collections.Counter()
    count = 0
    for number in np.linspace(0, len(source) - 1, examples).astype(int).tolist():
        clock = _Clock()
        try:
            record = source.encoded(number) if source.has_files else source[number]
            clock.ends('read')
            with images.decoding(
                on_demand=transforms.crop_first, drop_alpha=transforms.drops_alpha
            ):
                record = images.decode_record(record, source.record_name(number))
            clock.ends('decode')
            for name, step in zip(names, transforms.steps, strict=True):
                record = step(record, example_rng(plan.seed, number))
                clock.ends(name)
        except BrokenRecord:
            continue
        plan.join((record,), spec)
        clock.ends('batch')
        seconds.update(clock.seconds)
        count += 1
    if not count:
        raise UserError(f'{source.title}: none of {examples} examples can be read')
    batch = next(data.train_batches())
    put(batch)  # the first call does more than copy
    start_time = time.perf_counter()
    put(batch)
    copied = (time.perf_counter() - start_time) / max(int(np.count_nonzero(batch['mask'])), 1)
    return {**{name: total / count for name, total in seconds.items()}, 'copy': copied}


class _Clock:
    """Times of stages that follow one another."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self._last = time.perf_counter()

    def ends(self, stage: str) -> None:
        """End a stage and begin the next one."""
        end = time.perf_counter()
        self.seconds[stage] = self.seconds.get(stage, 0.0) + end - self._last
        self._last = end


@dataclasses.dataclass(frozen=True)
class Need:
    """Data rate that a host needs at some training speed.

    Attributes:
      name: Name of the speed.
      mfu: Model FLOPs utilization.
      seconds: Seconds of a step.
      per_host: Examples per second.
    """

    name: str
    mfu: float
    seconds: float
    per_host: float

    def cores(self, per_core: float) -> int:
        """CPU cores, each delivering `per_core` examples a second."""
        return math.ceil(self.per_host / per_core)


def needs(run: RunEstimate, slice_: Topology, mfu: float) -> list[Need]:
    """Compute the data rates needed at a run's bound and, if slower, at an MFU.

    Args:
      run: Run estimated from the compiled step.
      slice_: Slice that the step was compiled for.
      mfu: MFU of training, in (0, 1].
    """
    speeds = [('at the bound', run.mfu, run.seconds)]
    if mfu < run.mfu:
        speeds.append(('at the given', mfu, run.seconds * run.mfu / mfu))
    return [Need(n, m, sec, run.rows / sec / slice_.hosts) for n, m, sec in speeds]


def per_core(data: Dataset) -> float:
    """Measure training examples per second and core, with all cores of the machine in use.

    Args:
      data: Data of the config.

    Raises:
      UserError: if no batch can be made.
    """
    measured = measure_throughput(data, batches=2)
    (rate, *_), examples = measured.per_sec.values(), np.count_nonzero(measured.first['mask'])
    (number, *_) = data.count(measured.first).values()
    used = min(environment.available_cores(), measured.loading.round)
    return rate / number * float(examples) / used


def needs_record(needs: Sequence[Need], per_core: float, slice_: Topology) -> dict[str, Any]:
    """Convert data rates to JSON values."""
    return {
        'hosts': slice_.hosts,
        'per_core_per_sec': per_core,
        'needs': [dataclasses.asdict(n) | {'cores': n.cores(per_core)} for n in needs],
    }
