"""The numbers of an interval of training: means, norms, rates, and whether they are finite."""

from __future__ import annotations

import collections
import concurrent.futures
import contextlib
import math
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax
import numpy as np
import optax

from vit_jax.errors import UserError


class Diverged(UserError):
    """The loss, the gradients or the parameters are no longer finite."""

    exit_code = 3


class Meter:
    """Collects the metrics of steps that may still be running.

    Args:
      start: the step before the first.
      schedule: step -> learning rate.
      utilization: steps a second -> share of the chips' peak, or None.
      max_skips: steps in a row that may be not finite, see `step.make_train_step`; they are in no
        mean.
      waited: gets the seconds in which the devices had nothing to do but to wait for data.
    """

    def __init__(
        self,
        start: int,
        schedule: optax.Schedule,
        utilization: Callable[[float], float | None],
        max_skips: int = 0,
        waited: Callable[[float], None] = lambda seconds: None,
    ):
        self.step, self.schedule, self.utilization = start, schedule, utilization
        self.max_skips, self.skips_in_a_row = max_skips, 0
        self._waited = waited
        self.running: list[tuple[int, dict[str, Any]]] = []
        self._clock = concurrent.futures.ThreadPoolExecutor(1, 'steps-clock')
        self._last: dict[str, Any] | None = None  # of the newest step
        self._restart()

    def _restart(self) -> None:
        self.began, self.data_wait, self.pause, self.steps = time.perf_counter(), 0.0, 0.0, 0
        self.starved = 0.0
        self.done: list[dict[str, float]] = []
        self.skipped = 0
        self.seen: collections.Counter[str] = collections.Counter()

    @contextlib.contextmanager
    def waiting(self) -> Iterator[None]:
        """Counts as waiting for data; as starved, where the devices had nothing else to do."""
        began, finished = time.perf_counter(), None  # when the newest step has finished
        if self._last is not None and not all(x.is_ready() for x in self._last.values()):
            finished = self._clock.submit(_finish_time, [self._last])
        yield
        ended = time.perf_counter()
        self.data_wait += ended - began
        idle = ended - began
        if finished is not None:
            idle = max(0.0, ended - max(began, finished.result())) if finished.done() else 0.0
        if self._last is not None:
            self.starved += idle
        self._waited(idle)

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Counts as no training at all: evaluating, saving."""
        self._collect(0)
        began = time.perf_counter()
        yield
        self.pause += time.perf_counter() - began

    def add(self, step: int, metrics: dict[str, Any], counts: Mapping[str, int]) -> None:
        """Take the metrics of `step`; wait until at most two steps are in flight.

        Args:
          step: the step just started.
          metrics: of the step, on the devices.
          counts: of its batch, as {'images': 64}; see `Dataset.count`.
        """
        self.step, self.steps = step, self.steps + 1
        self.seen.update(counts)
        self.running.append((step, metrics))
        self._last = metrics
        jax.copy_to_host_async(metrics)
        self._collect(2)

    def _collect(self, keep: int) -> None:
        while len(self.running) > keep:
            step, metrics = self.running.pop(0)
            values = {k: float(np.asarray(v)) for k, v in metrics.items()}  # float(v) takes longer
            bad = [k for k, v in values.items() if not math.isfinite(v)]
            if not bad:
                self.done.append(values)
                self.skips_in_a_row = 0
                continue
            self.skipped, self.skips_in_a_row = self.skipped + 1, self.skips_in_a_row + 1
            if self.skips_in_a_row > self.max_skips:
                after = f' after {self.max_skips} skipped steps' if self.max_skips else ''
                raise Diverged(
                    f'step {step}: {bad[0]} is {values[bad[0]]}{after}; the run stops, and the '
                    'last checkpoint stands. Lower config.optim.lr, clip or warm up longer'
                )

    def check_finite(self) -> None:
        """Waits for all steps; raises Diverged if too many of them are not finite."""
        self._collect(0)

    def log(self) -> dict[str, float]:
        """Means over the steps since the last call, and the interval's rates.

        Without means, if all of them were skipped.
        """
        self._collect(0)
        elapsed = max(time.perf_counter() - self.began - self.pause, 1e-9)
        names = self.done[0] if self.done else ()
        means = {k: sum(m[k] for m in self.done) / len(self.done) for k in names}
        if self.max_skips:
            means['skipped'] = self.skipped
        means |= {
            'lr': float(self.schedule(self.step - 1)),
            **{f'{name}_per_sec': number / elapsed for name, number in self.seen.items()},
            'step_sec': elapsed / self.steps,
            'data_wait_sec': self.data_wait,
            'input_bound': self.starved / elapsed,
        }
        if (mfu := self.utilization(self.steps / elapsed)) is not None:
            means['mfu'] = mfu
        self._restart()
        return {f'train/{k}': v for k, v in means.items()}


def _finish_time(running: list[dict[str, Any]]) -> float:
    """Waits for a step, of which it keeps no array, and takes it out of the list.

    A failure of the step is raised where its metrics are read.
    """
    with contextlib.suppress(Exception):
        jax.block_until_ready(running.pop())
    return time.perf_counter()
