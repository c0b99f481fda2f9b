"""A profile of some steps: a trace in the run folder, and a table of where their time went."""

from __future__ import annotations

import pathlib
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping

import jax

from vit_jax.errors import UserError
from vit_jax.profiling.trace import Operations, read_trace
from vit_jax.storage import paths, run_folder
from vit_jax.trainer.meter import STARTING_THE_STEP, WAITING_FOR_DATA, WAITING_FOR_DEVICES, Meter

LONGEST = 8  # operations in the table


class Profile:
    """Traces some steps of process 0; on the other processes it does nothing.

    Args:
      folder: Run folder; the trace is put into `profile/` there.
      steps: Steps to trace; empty for none.
      say: Called with the table.

    Attributes:
      steps: Steps left to trace.
    """

    def __init__(self, folder: pathlib.Path, steps: range, say: Callable[[str], None]):
        self.steps = steps if jax.process_index() == 0 else range(0)
        self._folder, self._say = folder / run_folder.PROFILE, say
        self._spool: tempfile.TemporaryDirectory[str] | None = None
        self._began, self._taken = 0.0, 0
        self._parts: Mapping[str, float] = {}

    def before(self, step: int, meter: Meter) -> None:
        """Start the trace if this is the first of its steps."""
        if not self.steps or step != self.steps[0]:
            return
        with meter.paused():
            self._spool = tempfile.TemporaryDirectory(prefix='vit_jax-')
            options = jax.profiler.ProfileOptions()
            options.python_tracer_level = 0  # every Python call would be an event, and cost time
            jax.profiler.start_trace(
                self._spool.name, create_perfetto_trace=True, profiler_options=options
            )
            meter.parts.clear()
            self._began, self._parts = time.perf_counter(), meter.parts

    def after(self, step: int, meter: Meter) -> None:
        """End the trace if this was the last of its steps, and print where its time went."""
        if step not in self.steps:
            return
        self._taken += 1
        if step == self.steps[-1]:
            start_time = time.perf_counter()
            meter.check_finite()
            meter.parts[WAITING_FOR_DEVICES] += time.perf_counter() - start_time
            with meter.paused():
                self._end()

    def close(self) -> None:
        """End the trace if the run stops within it."""
        if self._spool is not None and self._taken:
            self._end()
        elif self._spool is not None:
            jax.profiler.stop_trace()
            self._spool.cleanup()

    def _end(self) -> None:
        assert self._spool is not None
        with self._spool as local:
            seconds = time.perf_counter() - self._began
            jax.profiler.stop_trace()
            devices = self._read(pathlib.Path(local))
            try:
                with paths.writing(self._folder):
                    paths.copy(pathlib.Path(local), self._folder)
            except UserError as error:  # the run is worth more than its profile
                self._say(str(error))
        self._spool = None
        self._say('\n'.join(self._table(seconds, devices)))

    def _read(self, folder: pathlib.Path) -> Operations:
        """Return the operations of the trace; none, with a line about it, if it cannot be read."""
        try:
            for file in folder.rglob('*.xplane.pb'):
                return read_trace(file)
        except UserError as error:
            self._say(str(error))
        return Operations(0.0, {})

    def _table(self, seconds: float, devices: Operations) -> Iterator[str]:
        start, remaining = self.steps[0], seconds - sum(self._parts.values())
        yield (
            f'profile of the steps {start} to {start + self._taken - 1} in {self._folder}, for '
            'TensorBoard and https://ui.perfetto.dev'
        )
        yield self._line('a step', seconds, seconds)
        for name in (WAITING_FOR_DATA, STARTING_THE_STEP, WAITING_FOR_DEVICES):
            yield self._line(f'  {name}', self._parts[name], seconds)
        yield self._line('  the rest: logs, evaluations, saves', remaining, seconds)
        if devices.ops:
            yield self._line('a device is busy', devices.busy, seconds)
        total = sum(devices.ops.values())
        for name, spent in list(devices.ops.items())[:LONGEST]:
            yield self._line(f'  {name[:34]}', spent, total)

    def _line(self, name: str, spent: float, whole: float) -> str:
        return f'{name:<36} {spent / self._taken * 1e3:10.2f} ms {spent / whole:6.1%}'
