"""How fast data are read, without any model."""

from __future__ import annotations

import collections
import dataclasses
import time
from collections.abc import Callable

from vit_jax.data.batches import Batch
from vit_jax.data.dataset import Dataset


@dataclasses.dataclass(frozen=True)
class Pace:
    """What `measure` finds.

    Attributes:
      first: the first batch.
      first_sec: seconds until it was there, in which threads and processes start.
      per_sec: what the data count, as {'images': 1200.0}; empty if there was one batch only.
    """

    first: Batch
    first_sec: float
    per_sec: dict[str, float]


def measure(data: Dataset, batches: int, seen: Callable[[int], None]) -> Pace:
    """Reads batches of training as fast as they come.

    Args:
      data: of the config.
      batches: how many, at least 1.
      seen: called after each with its number, from 1.

    Raises:
      UserError: if they cannot be made.
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
