"""The record of what a run's time goes into, while it runs; `storage.times` reads it."""

from __future__ import annotations

import collections
import contextlib
import json
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import jax

from vit_jax.errors import UserError
from vit_jax.storage import lock, run_folder, times
from vit_jax.storage.run_folder import Mirror
from vit_jax.trainer.writer import Lines

OFTEN = 0.5  # seconds between lines of a run that is young
UPLOADED = 10.0  # where each is an upload; GCS takes one write a second of an object
SHARE = 1 / 1000  # of its age, between those of an older one
COMPILATION = '/jax/core/compile/'


class Clock:
    """Divides the time of this process into the parts of `storage.times`; a context manager.

    Nothing is written before `record`, and nothing at all on processes other than the first. What
    cannot be written, as on a full disk, does not end the run: it waits for the next line.

    Args:
      began: Unix time at which the process began; now by default.
    """

    def __init__(self, began: float | None = None):
        now = time.perf_counter()
        self._zero = time.time() - now
        self._since = now if began is None else began - self._zero
        self._part, self.step = times.START, 0
        self._seconds: dict[str, float] = collections.defaultdict(float)
        self._compiled: list[tuple[float, float]] = []
        self._waited = 0.0
        self._owner = threading.get_ident()
        self._began, self._written, self._due = self._since, now, float('inf')
        self._often = OFTEN
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
        self, mirror: Mirror, held: lock.Check, say: Callable[[str], None], step: int
    ) -> None:
        """Append to the record in a folder from now on.

        Args:
          mirror: of the folder.
          held: the check of its lock.
          say: prints a line for the user.
          step: of the first state.
        """
        mirror.fetch(run_folder.TIMES)
        self._mirror = mirror
        self._often = UPLOADED if mirror.uploads else OFTEN
        self._lines = Lines(mirror.folder / run_folder.TIMES, held, say)
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

    def waited(self, seconds: float) -> None:
        """Count seconds that have just passed as waiting for data."""
        self._waited += seconds

    def stepped(self, step: int) -> None:
        """Note that a step was started; the first one was compiled for it."""
        self.step = step
        if self._part != times.STEPS:
            self.enter(times.STEPS)
        if time.perf_counter() >= self._due:
            self.mark()

    def mark(self) -> None:
        """Write a line, after which the next ones are of later steps."""
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

    def _settle(self) -> None:
        """Add the time since the last call to its part, without that of other parts within it."""
        now = time.perf_counter()
        compiled = sum(ended - began for began, ended in self._compiled)
        self._seconds[times.COMPILE] += compiled
        self._seconds[times.DATA] += self._waited
        self._seconds[self._part] += max(now - self._since - compiled - self._waited, 0.0)
        self._since, self._waited = now, 0.0
        self._compiled.clear()

    def _heard(self, event: str, duration_secs: float, **_: Any) -> None:
        """Note a compilation by this thread; one within another counts once."""
        if not event.startswith(COMPILATION) or threading.get_ident() != self._owner:
            return
        now = time.perf_counter()
        began = max(now - duration_secs, self._since)
        while self._compiled and self._compiled[-1][0] >= began:
            self._compiled.pop()
        if self._compiled:
            began = max(began, self._compiled[-1][1])
        self._compiled.append((began, now))

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
        return max(self._often, SHARE * (time.perf_counter() - self._began))

    def _live(self) -> None:
        """Write a sign of life while there are no lines."""
        while not self._stop.wait(self._pause):
            if time.perf_counter() - self._written > self._pause:
                alive = round(time.perf_counter() + self._zero, 6)
                self._add({'alive': alive, 'part': self._part})
