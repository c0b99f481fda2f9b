"""Operations of a profiler trace, by kind.

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
from collections.abc import Iterable, Iterator, Mapping

import jax

from vit_jax.errors import UserError

Span = tuple[float, float]  # begin and end in nanoseconds


@dataclasses.dataclass(frozen=True)
class Operations:
    """Operations of a trace.

    Attributes:
      busy: Seconds in which a device was busy, averaged over devices.
      ops: Seconds of all devices by kind of operation, the longest first; simultaneous operations
        count separately.
    """

    busy: float
    ops: Mapping[str, float]


def read_trace(file: pathlib.Path) -> Operations:
    """Read the operations of a profiler trace, `*.xplane.pb`; may be empty.

    A separate process reads it because JAX's reader aborts the process when it fails.

    Raises:
      UserError: if the trace cannot be read.
    """
    command = [sys.executable, '-m', 'vit_jax.profiling.trace', str(file)]
    process = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True)
    if process.returncode:
        raise UserError(
            f'jax {jax.__version__} cannot read {file.name} (exit code {process.returncode}): '
            'open the trace with TensorBoard or https://ui.perfetto.dev'
        )
    return Operations(**json.loads(process.stdout))


def _parse_trace(file: pathlib.Path) -> Operations:
    spans: dict[str, list[Span]] = collections.defaultdict(list)
    ops: dict[str, float] = collections.defaultdict(float)
    for device, name, span in _events(jax.profiler.ProfileData.from_file(str(file))):
        spans[device].append(span)
        ops[name] += (span[1] - span[0]) / 1e9
    busy = [union_length(intervals) / 1e9 for intervals in spans.values()]
    longest = sorted(ops.items(), key=lambda op: -op[1])
    return Operations(sum(busy) / len(busy) if busy else 0.0, dict(longest))


def _events(data: jax.profiler.ProfileData) -> Iterator[tuple[str, str, Span]]:
    """Yield device, kind and time of each operation, except loops, whose bodies are included."""
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
    """Return the kind of an operation by name: `%dot_general.12 = f32[...]` -> `dot_general`."""
    bare = name.partition(' = ')[0].removeprefix('%').removeprefix('end: ')
    return re.sub(r'(\.(\d+|clone|remat\d*))+$', '', bare)


def union_length(spans: Iterable[Span]) -> float:
    """Compute the total length of the union of spans."""
    total, end = 0.0, float('-inf')
    for start, stop in sorted(spans):
        total += max(0.0, stop - max(start, end))
        end = max(end, stop)
    return total


if __name__ == '__main__':
    print(json.dumps(dataclasses.asdict(_parse_trace(pathlib.Path(sys.argv[1])))))
