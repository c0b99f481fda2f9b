"""Measurements of a training run: the metrics of its steps, and a record of its time.

`Meter` collects metrics and rates between two logs; `Clock` records what the run's time goes into,
for `storage.times`.
"""

from __future__ import annotations

import collections
import concurrent.futures
import contextlib
import json
import math
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax
import numpy as np
import optax

from vit_jax.errors import UserError
from vit_jax.storage import lock, run_folder, times
from vit_jax.storage.run_folder import Mirror
from vit_jax.trainer.writer import Lines

# Seconds between two lines of the record of time.
MIN_INTERVAL = 0.5
MIN_UPLOAD_INTERVAL = 10.0  # if each line is an upload; GCS takes one write a second of an object
INTERVAL_SHARE = 1 / 1000  # of the age of an older run
COMPILATION = '/jax/core/compile/'

# The parts of a step; a profile shows them.
WAITING_FOR_DATA = 'waiting for data'
STARTING_THE_STEP = 'starting the step'
WAITING_FOR_DEVICES = 'waiting for the devices'


class Diverged(UserError):
    """Loss, the gradients or the parameters are no longer finite."""

    exit_code = 3


class Meter:
    """Collect the metrics of steps that may still be running.

    Args:
      start: Step before the first.
      schedule: Learning rate as a function of the step.
      utilization: Share of the chips' peak FLOPs that one step a second takes; None if unknown.
      max_skips: Most steps in a row that may be not finite, see `step.make_train_step`; they are
        left out of the means.
      clock: Record of the seconds in which the devices only waited for data.
      has_own_cores: Whether the devices compute on other cores than this process, unlike CPUs.

    Attributes:
      parts: Seconds of each part of the steps so far.
      completed: Number of steps whose metrics have arrived.
    """

    def __init__(
        self,
        start: int,
        schedule: optax.Schedule,
        utilization: float | None = None,
        max_skips: int = 0,
        clock: Clock | None = None,
        has_own_cores: bool = False,
    ):
        self._has_own_cores, self._started, self._shortest = has_own_cores, 0.0, math.inf
        self.step, self.schedule, self.utilization = start, schedule, utilization
        self.max_skips, self.skips_in_a_row = max_skips, 0
        self.clock = clock or Clock()
        self.running: list[tuple[int, dict[str, Any]]] = []
        self._waiter = concurrent.futures.ThreadPoolExecutor(1, 'steps-clock')
        self._last: dict[str, Any] | None = None  # of the newest step
        self.parts: dict[str, float] = collections.defaultdict(float)
        self.completed = 0
        self._restart()

    def _restart(self) -> None:
        self.began, self.data_wait, self.pause, self.steps = time.perf_counter(), 0.0, 0.0, 0
        self.starved, self.locked = 0.0, 0.0
        self._compiled = self.clock.compile_seconds
        self.done: list[dict[str, float]] = []
        self.skipped = 0
        self.seen: collections.Counter[str] = collections.Counter()

    @contextlib.contextmanager
    def waiting(self) -> Iterator[None]:
        """Count the time inside as waiting for data, and as starved if the devices are idle."""
        start_time, finished = time.perf_counter(), None  # when the newest step has finished
        if self._last is not None and not self._is_idle():
            finished = self._waiter.submit(_finish_time, [self._last])
        with jax.profiler.TraceAnnotation(WAITING_FOR_DATA):
            yield
        ended = time.perf_counter()
        self.parts[WAITING_FOR_DATA] += ended - start_time
        self.data_wait += ended - start_time
        idle = ended - start_time
        if finished is not None:
            when = math.inf
            if finished.done():
                when = finished.result()
                self._shortest = min(self._shortest, when - self._started)
            elif self._is_idle():  # the other thread waits for Python's lock
                when = self._started + self._shortest
            idle = max(0.0, ended - max(start_time, when))
        if self._last is not None:
            self.starved += idle
        self.clock.waited += idle

    @contextlib.contextmanager
    def starting(self, step: int) -> Iterator[None]:
        """Name the start of `step` in a trace.

        Count waits inside for Python's lock or a core, while devices are idle, as starved.

        Threads that make batches hold them: this one starts the step late. On CPUs such waits
        cannot be distinguished from waits for the step itself.
        """
        counts = self._has_own_cores and self._last is not None and self._is_idle()
        compiled, spent = (self.clock.compile_seconds, time.thread_time()) if counts else (0.0, 0.0)
        start_time = time.perf_counter()
        # TensorBoard identifies the steps of a trace by their annotation.
        with (
            jax.profiler.StepTraceAnnotation('train', step_num=step),
            jax.profiler.TraceAnnotation(STARTING_THE_STEP),
        ):
            yield
        self._started = time.perf_counter()
        self.parts[STARTING_THE_STEP] += self._started - start_time
        if counts and self.clock.compile_seconds == compiled:
            wait = max(0.0, self._started - start_time - (time.thread_time() - spent))
            self.locked, self.starved = self.locked + wait, self.starved + wait
            self.clock.waited += wait

    def _is_idle(self) -> bool:
        """Return whether the newest step has finished, whose metrics are all made together."""
        return self._last is None or next(iter(self._last.values())).is_ready()

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Leave the time inside, of an evaluation or a save, out of the rates."""
        self.check_finite()
        start_time, compiled = time.perf_counter(), self.clock.compile_seconds
        yield
        self.pause += time.perf_counter() - start_time
        self._compiled += self.clock.compile_seconds - compiled

    def add(self, step: int, metrics: dict[str, Any], counts: Mapping[str, int]) -> None:
        """Take the metrics of `step`; wait until at most two steps are in flight.

        Args:
          step: Step just started.
          metrics: Metrics of the step, on the devices.
          counts: Counts over its batch, such as {'images': 64}; see `Dataset.count`.
        """
        self.step, self.steps = step, self.steps + 1
        self.seen.update(counts)
        self.running.append((step, metrics))
        self._last = metrics
        start_time = time.perf_counter()
        with jax.profiler.TraceAnnotation(WAITING_FOR_DEVICES):
            jax.copy_to_host_async(metrics)
            self.check_finite(keep=2)
        self.parts[WAITING_FOR_DEVICES] += time.perf_counter() - start_time

    def check_finite(self, keep: int = 0) -> None:
        """Wait until at most `keep` steps run; raise Diverged if too many are not finite."""
        while len(self.running) > keep:
            step, metrics = self.running.pop(0)
            values = {k: float(np.asarray(v)) for k, v in metrics.items()}  # float(v) takes longer
            self.completed += 1
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

    def log(self) -> dict[str, float]:
        """Means over the steps since the last call, and the interval's rates without compilation.

        The means are missing if all steps were skipped.
        """
        self.check_finite()
        idle = self.pause + self.clock.compile_seconds - self._compiled
        elapsed = max(time.perf_counter() - self.began - idle, 1e-9)
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
            'lock_bound': self.locked / elapsed,
        }
        if self.utilization is not None:
            means['mfu'] = self.utilization * self.steps / elapsed
        self._restart()
        return {f'train/{k}': v for k, v in means.items()}


def _finish_time(running: list[dict[str, Any]]) -> float:
    """Wait for the step in the list, and remove it so that no array is kept alive.

    A failure of the step is raised when its metrics are read.
    """
    with contextlib.suppress(Exception):
        jax.block_until_ready(running.pop())
    return time.perf_counter()


class Clock:
    """Divide the time of this process into the parts of `storage.times`; a context manager.

    Nothing is written before `record`, and only process 0 writes. A line that cannot be written, as
    on a full disk, does not end the run; it is written with the next one.

    Args:
      began: Unix time at which the process began; now by default.

    Attributes:
      waited: Seconds of the current part in which the devices waited for data.
    """

    def __init__(self, began: float | None = None):
        now = time.perf_counter()
        self._zero = time.time() - now
        self._since = now if began is None else began - self._zero
        self._part, self.step = times.START, 0
        self._seconds: dict[str, float] = collections.defaultdict(float)
        self._compiled: list[tuple[float, float]] = []
        self._compiled_before = 0.0
        self.waited = 0.0
        self._owner = threading.get_ident()
        self._began, self._written, self._due = self._since, now, float('inf')
        self._often = MIN_INTERVAL
        self._lines: Lines | None = None
        self._mirror: Mirror | None = None
        self._guard, self._stop = threading.Lock(), threading.Event()

    def __enter__(self) -> Clock:
        jax.monitoring.register_event_duration_secs_listener(self._heard)
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
        jax.monitoring.unregister_event_duration_listener(self._heard)

    def record(
        self, mirror: Mirror, check_lock: lock.Check, say: Callable[[str], None], step: int
    ) -> None:
        """Append to the record in a folder from now on.

        Args:
          mirror: Mirror of the folder.
          check_lock: Check of the folder's lock.
          say: Function that prints a line for the user.
          step: Step of the first state.
        """
        mirror.fetch(run_folder.TIMES)
        self._mirror = mirror
        self._often = MIN_UPLOAD_INTERVAL if mirror.uploads else MIN_INTERVAL
        self._lines = Lines(mirror.folder / run_folder.TIMES, check_lock, say)
        self.step = step
        self._add({'start': round(self._began + self._zero, 6), 'step': step})
        self.mark()
        threading.Thread(target=self._live, name='times', daemon=True).start()

    def enter(self, part: str) -> None:
        """Count the time from now on as another part."""
        self._settle()
        self._part = part
        if self._since >= self._due:
            self.mark()

    @contextlib.contextmanager
    def during(self, part: str) -> Iterator[None]:
        """Count the time inside as another part."""
        before = self._part
        self.enter(part)
        try:
            yield
        finally:
            self.enter(before)

    def stepped(self, step: int) -> None:
        """Note that a step was started; the first one was compiled for it."""
        self.step = step
        if self._part != times.STEPS:
            self.enter(times.STEPS)
        if time.perf_counter() >= self._due:
            self.mark()

    def mark(self) -> None:
        """Write a line with the time since the last one."""
        if self._lines is None:
            return
        self._settle()
        spent = {name: round(seconds, 6) for name, seconds in self._seconds.items() if seconds}
        self._seconds.clear()
        self._add({'at': round(self._since + self._zero, 6), 'step': self.step, **spent})
        self._due = self._written + self._pause

    def close(self) -> None:
        """Write the last line."""
        self._stop.set()
        if self._lines is None:
            return
        self.mark()
        with self._guard, contextlib.suppress(OSError, UserError):
            lines, self._lines = self._lines, None
            lines.close()

    @property
    def compile_seconds(self) -> float:
        """Seconds of compilation so far, which `enter` and `stepped` update."""
        return self._compiled_before + sum(
            ended - start_time for start_time, ended in self._compiled
        )

    def _settle(self) -> None:
        """Add the time since the last call to its part, without compilation and waiting."""
        now = time.perf_counter()
        compiled = sum(ended - start_time for start_time, ended in self._compiled)
        remaining = max(now - self._since - compiled - self.waited, 0.0)
        self._compiled_before += compiled + (remaining if self._part == times.COMPILE else 0.0)
        self._seconds[times.COMPILE] += compiled
        self._seconds[times.DATA] += self.waited
        self._seconds[self._part] += remaining
        self._since, self.waited = now, 0.0
        self._compiled.clear()

    def _heard(self, event: str, duration_secs: float, **_: Any) -> None:
        """Note a compilation by this thread; nested ones count once."""
        if not event.startswith(COMPILATION) or threading.get_ident() != self._owner:
            return
        now = time.perf_counter()
        start_time = max(now - duration_secs, self._since)
        while self._compiled and self._compiled[-1][0] >= start_time:
            self._compiled.pop()
        if self._compiled:
            start_time = max(start_time, self._compiled[-1][1])
        self._compiled.append((start_time, now))

    def _add(self, line: dict[str, Any]) -> None:
        with self._guard:
            if self._lines is None:
                return
            self._lines.add(json.dumps(line))
            with contextlib.suppress(OSError, lock.Taken):
                self._lines.write()
            self._written = time.perf_counter()
        assert self._mirror is not None
        self._mirror.publish()

    @property
    def _pause(self) -> float:
        """Seconds between lines, so that the record of a long run stays small."""
        return max(self._often, INTERVAL_SHARE * (time.perf_counter() - self._began))

    def _live(self) -> None:
        """Write a line now and then while no part ends."""
        while not self._stop.wait(self._pause):
            if time.perf_counter() - self._written > self._pause:
                alive = round(time.perf_counter() + self._zero, 6)
                self._add({'alive': alive, 'part': self._part})
