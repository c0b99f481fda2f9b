"""A profile of some steps: a trace in the run folder, and a table of where their time went.

Run as a program, it prints the operations of a trace.
"""

from __future__ import annotations

import collections
import dataclasses
import json
import pathlib
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping

import jax

from vit_jax.errors import UserError
from vit_jax.storage import paths, run_folder
from vit_jax.trainer.meter import STARTING_THE_STEP, WAITING_FOR_DATA, WAITING_FOR_DEVICES, Meter

WARM_UP = 2  # steps that are left out: the first is compiled, the second may wait for the first
LONGEST = 8  # operations in the table
Span = tuple[float, float]  # begin and end in nanoseconds


@dataclasses.dataclass(frozen=True)
class Window:
    """The steps to trace.

    Attributes:
      count: how many.
      first: the first of them; None for the first that follow what a start compiles.
    """

    count: int
    first: int | None = None

    def steps(self, start: int, total: int) -> range:
        """The numbers of the steps in a run that goes on after step `start`.

        Raises:
          UserError: if the run does not take them.
        """
        first = start + WARM_UP + 1 if self.first is None else self.first
        if first <= start or first + self.count - 1 > total:
            raise UserError(
                f'--profile: the run takes the steps {start + 1} to {total}, not {first} to '
                f'{first + self.count - 1}'
            )
        return range(first, first + self.count)


class Profile:
    """Traces some steps of process 0; on the other processes it does nothing.

    Args:
      folder: of the run; the trace is put into `profile/` there.
      steps: to trace; empty for none.
      say: called with the table.

    Attributes:
      steps: to trace here.
    """

    def __init__(self, folder: pathlib.Path, steps: range, say: Callable[[str], None]):
        self.steps = steps if jax.process_index() == 0 else range(0)
        self._folder, self._say = folder / run_folder.PROFILE, say
        self._spool: tempfile.TemporaryDirectory[str] | None = None
        self._began, self._taken = 0.0, 0
        self._parts: Mapping[str, float] = {}

    def before(self, step: int, meter: Meter) -> None:
        """Start the trace if this is the first of its steps."""
        if step != self.steps[0]:
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
        self._taken += 1
        if step == self.steps[-1]:
            with meter.part(WAITING_FOR_DEVICES):
                meter.check_finite()
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
        """The operations of the trace; none, with a line about it, if it cannot be read."""
        try:
            for file in folder.rglob('*.xplane.pb'):
                return read_trace(file)
        except UserError as error:
            self._say(str(error))
        return Operations(0.0, {})

    def _table(self, seconds: float, devices: Operations) -> Iterator[str]:
        first, rest = self.steps[0], seconds - sum(self._parts.values())
        yield (
            f'profile of the steps {first} to {first + self._taken - 1} in {self._folder}, for '
            'TensorBoard and https://ui.perfetto.dev'
        )
        yield self._line('a step', seconds, seconds)
        for name in (WAITING_FOR_DATA, STARTING_THE_STEP, WAITING_FOR_DEVICES):
            yield self._line(f'  {name}', self._parts[name], seconds)
        yield self._line('  the rest: logs, evaluations, saves', rest, seconds)
        if devices.ops:
            yield self._line('a device is busy', devices.busy, seconds)
        total = sum(devices.ops.values())
        for name, spent in list(devices.ops.items())[:LONGEST]:
            yield self._line(f'  {name[:34]}', spent, total)

    def _line(self, name: str, spent: float, whole: float) -> str:
        return f'{name:<36} {spent / self._taken * 1e3:10.2f} ms {spent / whole:6.1%}'


@dataclasses.dataclass(frozen=True)
class Operations:
    """The operations of a trace.

    Attributes:
      busy: seconds in which a device was busy, the mean of the devices.
      ops: seconds of all devices by kind of operation, the longest first; simultaneous operations
        count separately.
    """

    busy: float
    ops: Mapping[str, float]


def read_trace(file: pathlib.Path) -> Operations:
    """The operations of a trace of the profiler, `*.xplane.pb`; may be empty.

    Read in a process of its own, since JAX's reader aborts the process when it fails.

    Raises:
      UserError: if it cannot be read.
    """
    words = [sys.executable, '-m', 'vit_jax.trainer.profile', str(file)]
    done = subprocess.run(words, stdin=subprocess.DEVNULL, capture_output=True, text=True)
    if done.returncode:
        raise UserError(
            f'jax {jax.__version__} cannot read {file.name} (exit code {done.returncode}): '
            'open the trace with TensorBoard or https://ui.perfetto.dev'
        )
    return Operations(**json.loads(done.stdout))


def _parse_trace(file: pathlib.Path) -> Operations:
    spans: dict[str, list[Span]] = collections.defaultdict(list)
    ops: dict[str, float] = collections.defaultdict(float)
    for device, name, span in _events(jax.profiler.ProfileData.from_file(str(file))):
        spans[device].append(span)
        ops[name] += (span[1] - span[0]) / 1e9
    busy = [covered(found) / 1e9 for found in spans.values()]
    longest = sorted(ops.items(), key=lambda op: -op[1])
    return Operations(sum(busy) / len(busy) if busy else 0.0, dict(longest))


def _events(data: jax.profiler.ProfileData) -> Iterator[tuple[str, str, Span]]:
    """The device, kind and time of each operation, without loops, as their bodies are there too."""
    for plane in data.planes:
        for line in plane.lines:
            for event in line.events:
                stats = dict(event.stats)
                if 'hlo_op' not in stats and line.name != 'XLA Ops':
                    continue
                name = kind(str(stats.get('hlo_op', event.name)))
                if name not in ('while', 'conditional', 'call'):
                    device = f'{plane.name} {stats.get("device_ordinal", "")}'
                    yield device, name, (event.start_ns, event.end_ns)


def kind(name: str) -> str:
    """The kind of an operation from its name: `%dot_general.12 = f32[...]` -> `dot_general`."""
    bare = name.partition(' = ')[0].removeprefix('%').removeprefix('end: ')
    return re.sub(r'(\.(\d+|clone|remat\d*))+$', '', bare)


def covered(spans: Iterable[Span]) -> float:
    """The length of the union of spans."""
    total, end = 0.0, float('-inf')
    for first, last in sorted(spans):
        total += max(0.0, last - max(first, end))
        end = max(end, last)
    return total


if __name__ == '__main__':
    print(json.dumps(dataclasses.asdict(_parse_trace(pathlib.Path(sys.argv[1])))))
