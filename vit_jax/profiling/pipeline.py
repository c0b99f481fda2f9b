"""Throughput of the data pipeline alone, without a model."""

from __future__ import annotations

import collections
import dataclasses
import time
from collections.abc import Callable

from vit_jax.data.batches import Batch
from vit_jax.data.dataset import Dataset


@dataclasses.dataclass(frozen=True)
class Pace:
    """Throughput measured by `measure`.

    Attributes:
      first: the first batch.
      first_sec: seconds until the first batch, including the start of threads and processes.
      per_sec: rates of the data's counts, as {'images': 1200.0}; empty for a single batch.
    """

    first: Batch
    first_sec: float
    per_sec: dict[str, float]


def measure(data: Dataset, batches: int, seen: Callable[[int], None]) -> Pace:
    """Reads training batches as fast as they come.

    Args:
      data: of the config.
      batches: their number, at least 1.
      seen: called after each batch with its number, from 1.

    Raises:
      UserError: if batches cannot be made.
    """
    began = time.perf_counter()
    coming = data.train_batches()
    first = next(coming)
    start = time.perf_counter()
    seen(1)
    counts: collections.Counter[str] = collections.Counter()
    for number in range(2, batches + 1):
        counts.update(data.count(next(coming)))
        seen(number)
    elapsed = max(time.perf_counter() - start, 1e-9)
    return Pace(first, start - began, {name: n / elapsed for name, n in counts.items()})
