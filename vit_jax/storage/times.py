"""Record of how a run spent its time, `times.jsonl`.

A training process first appends {"start": Unix time, "step": of its first state}. Each further line
{"at": Unix time, "step": last step begun, PART: seconds, ...} divides the time since the previous
line. During a long part, {"alive": Unix time, "part": PART} shows that the process is still alive;
after a kill it is its last sign of life.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Sequence
from typing import Any

from vit_jax.storage import paths, run_folder

START, COMPILE, RESTORE, DATA, STEPS = 'start', 'compile', 'restore', 'data', 'steps'
EVALUATION, SAVING = 'evaluation', 'saving'
LOST, BETWEEN, UNKNOWN = 'lost', 'between', 'unknown'
RECORDED = (START, COMPILE, RESTORE, DATA, STEPS, EVALUATION, SAVING)
MEANING = {
    STEPS: 'training steps that count',
    DATA: 'devices waiting for data, or for the threads that make them',
    EVALUATION: 'evaluations',
    SAVING: 'saving, and ending a process',
    START: 'imports, opening data and folders',
    RESTORE: 'reading a checkpoint, or initializing the state',
    COMPILE: 'tracing and compiling',
    LOST: 'work undone by a failure',
    BETWEEN: 'no process running',
    UNKNOWN: 'damaged record',
}

_LATEST = 1e11  # Unix time; also keeps sums finite

Seconds = dict[str, float]


@dataclasses.dataclass(frozen=True)
class Span:
    """A stretch of time.

    Attributes:
      began, ended: Unix times.
      parts: Seconds of each part, which add up to the span.
    """

    began: float
    ended: float
    parts: Seconds


@dataclasses.dataclass(frozen=True)
class Account:
    """Time of a run, from its first start to its last sign of life.

    Attributes:
      starts: Number of successive processes.
      spans: Spans in order.
    """

    starts: int
    spans: Sequence[Span]

    @property
    def seconds(self) -> Seconds:
        """Seconds of each part, summed over all spans."""
        totals = {name: math.fsum(s.parts.get(name, 0.0) for s in self.spans) for name in MEANING}
        return {name: total for name, total in totals.items() if name != UNKNOWN or total}

    @property
    def wall(self) -> float:
        """Seconds from the first start to the end."""
        return math.fsum(self.seconds.values())

    @property
    def goodput(self) -> float:
        """Share of time in training steps, without repeated ones."""
        return self.seconds[STEPS] / self.wall if self.wall else 0.0


@dataclasses.dataclass
class _Process:
    """A process of the run: its spans, each with the steps taken before and after it."""

    start: float
    step: int
    spans: list[tuple[int, int, Span]] = dataclasses.field(default_factory=list)
    alive: tuple[float, str] | None = None

    @property
    def end(self) -> float:
        return self.spans[-1][2].ended if self.spans else self.start

    @property
    def last_step(self) -> int:
        return self.spans[-1][1] if self.spans else self.step

    def add(self, ended: float, step: int, parts: Seconds) -> None:
        """Add a span from the end of the last one; time outside of its parts is unknown."""
        length, total = ended - self.end, math.fsum(parts.values())
        if length < 0:
            return
        if total > length or total > 0.999 * length:
            parts = {name: value * length / total for name, value in parts.items()}
        else:
            parts = {**parts, UNKNOWN: length - total}
        self.spans.append((self.last_step, step, Span(self.end, ended, parts)))

    def finish(self) -> None:
        """Add the time after the last line during which the process was still alive."""
        if self.alive and self.alive[0] > self.end:
            ended, part = self.alive
            self.add(ended, self.last_step, {part: ended - self.end})


def read(folder: paths.Path) -> Account | None:
    """Read the account of a run; None without a record, such as from earlier versions."""
    processes = _parse_processes(run_folder.read_lines(folder / run_folder.TIMES, _parse_line))
    return Account(len(processes), list(_join_spans(processes))) if processes else None


def _parse_line(text: str) -> dict[str, Any] | None:
    """Parse a line of the record; None if it is damaged."""
    try:
        line = paths.parse_json(text)
    except ValueError:
        return None
    if not isinstance(line, dict):
        return None
    numbers = [value for name, value in line.items() if name != 'part']
    if not all(type(x) in (int, float) and 0 <= x < _LATEST for x in numbers):
        return None
    if 'alive' in line:
        return line if line.get('part') in RECORDED else None
    has_valid_keys = {'at', 'start', 'step', *RECORDED} >= line.keys() and type(
        line.get('step')
    ) is int
    return line if has_valid_keys and ('start' in line) + ('at' in line) >= 1 else None


def _parse_processes(lines: Sequence[dict[str, Any]]) -> list[_Process]:
    processes: list[_Process] = []
    for line in lines:
        if 'start' in line and 'at' not in line:
            processes.append(_Process(line['start'], line['step']))
        elif not processes:
            continue  # the start line is damaged
        elif 'alive' in line:
            processes[-1].alive = line['alive'], line['part']
        else:
            parts = {name: line[name] for name in RECORDED if name in line}
            processes[-1].add(line['at'], line['step'], parts)
    for process in processes:
        process.finish()
    return processes


def _join_spans(processes: Sequence[_Process]) -> Iterator[Span]:
    """Yield the spans of all processes, with lost work marked, and the gaps between them."""
    later = [process.step for process in processes[1:]]
    for i, process in enumerate(processes):
        resumed_at = min(later[i:], default=None)
        for before, after, span in process.spans:
            yield span if resumed_at is None else _mark_lost(span, before, after, resumed_at)
        if i + 1 < len(processes) and (gap := processes[i + 1].start - process.end) > 0:
            yield Span(process.end, process.end + gap, {BETWEEN: gap})


def _mark_lost(span: Span, before: int, after: int, resumed_at: int) -> Span:
    """Count a span's work after step `resumed_at` as lost."""
    parts: Seconds = {LOST: 0.0}
    for name, seconds in span.parts.items():
        share = 0.0
        if name in (DATA, STEPS):  # time of the steps up to `after`, or of an unfinished step
            last = max(after, before + 1)
            share = (last - min(max(before, resumed_at), last)) / (last - before)
        elif name in (EVALUATION, SAVING):
            share = float(after > resumed_at)
        parts[name] = seconds * (1 - share)
        parts[LOST] += seconds * share
    return Span(span.began, span.ended, parts)


def bin_seconds(account: Account, bins: int) -> list[Seconds]:
    """Sum the seconds of each part in `bins` equal intervals of the total time."""
    start = min(span.began for span in account.spans)
    end = max(span.ended for span in account.spans)
    width = max(end - start, 1e-9) / bins
    totals: list[Seconds] = [{} for _ in range(bins)]
    for span in account.spans:
        low = min(int((span.began - start) / width), bins - 1)
        high = min(int((span.ended - start) / width), bins - 1)
        for i in range(low, high + 1):
            overlap = min(span.ended, start + (i + 1) * width) - max(span.began, start + i * width)
            share = max(overlap, 0.0) / max(span.ended - span.began, 1e-9)
            for name, seconds in span.parts.items():
                totals[i][name] = totals[i].get(name, 0.0) + seconds * share
    return totals
