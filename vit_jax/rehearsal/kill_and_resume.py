"""Final trials of a rehearsal: start a run, kill it after its first save, and resume it."""

from __future__ import annotations

import contextlib
import json
import math
import os
import pathlib
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from ml_collections import ConfigDict

from vit_jax.config.load import to_json
from vit_jax.rehearsal.dry_run import OUT_OF_MEMORY, TOO_LARGE, Facts, Request
from vit_jax.storage import paths, run_folder, times

STEPS = 2  # after the resumption; the first one is slower
STEP_SEC = 'train/step_sec'
OK, FAILED, SKIPPED = 'ok', 'failed', 'not tried'


class Row(NamedTuple):
    """Result of one trial.

    Attributes:
      name: Name of the trial.
      result: One of OK, FAILED and SKIPPED.
      seconds: Duration.
      note: Details, or the reason of a failure.
    """

    name: str
    result: str
    seconds: float
    note: str


class DryRun:
    """First steps of a run in separate processes, one of which is killed.

    Attributes:
      request: Request of the process that trains next.
      facts: Facts of the run on this machine, once a process has written them.
    """

    def __init__(
        self,
        config: ConfigDict,
        scratch: paths.Path,
        local: pathlib.Path,
        allowed: Sequence[str],
        minutes: float,
    ):
        """Prepare, without starting a process; `local` is an empty folder, see also `rehearse`."""
        self._scratch, self._local, self._seconds = scratch, local, 60 * minutes
        content = json.loads(to_json(config))
        facts = str(local / 'facts.json')
        self.request = Request(content, os.fspath(scratch), facts, tuple(allowed))
        self.facts: Facts | None = None

    def rows(self) -> Iterator[Row]:
        """Train until a checkpoint exists, kill the process, and resume."""
        start_time = time.perf_counter()
        code = self._train()
        note = ''
        if self._is_too_large(code):
            note, self.request = f'{self._reason()}; tried', self.request._replace(small=True)
            with contextlib.suppress(FileNotFoundError):
                paths.remove(self._scratch)
            code = self._train()
        seconds = time.perf_counter() - start_time
        if code == TOO_LARGE:
            yield Row('start', SKIPPED, seconds, f'{self._reason()}: rehearse where it will run')
            return
        if code != 0 and not (code is None and run_folder.finished_steps(self._checkpoints)):
            timed_out = f'no checkpoint after {self._seconds / 60:g} minutes'
            yield Row('start', FAILED, seconds, timed_out if code is None else self._reason())
            return
        yield Row('start', OK, seconds, f'{note} {self._summarize()}'.strip())
        yield from self._resume()

    def _resume(self) -> Iterator[Row]:
        """Resume from the checkpoint; yield the rows of the last process."""
        start_time, resumed_at = time.perf_counter(), time.time()
        step = run_folder.finished_steps(self._checkpoints)[-1]
        assert self.facts is not None
        last = min(step + STEPS, self.facts.total)
        if last == step:
            yield Row('resumption', SKIPPED, 0.0, f'the run is over after step {step}')
            resumed_at, seconds_by_part = 0.0, step
        else:
            seconds_by_part = last - step
            self.request = self.request._replace(last=last)
            if (code := self._train()) != 0:
                reason = self._reason() if code is not None else 'it did not end in time'
                yield Row('resumption', FAILED, time.perf_counter() - start_time, reason)
                return
            restored = f'restored in {self._time_spent(resumed_at)[times.RESTORE]:.1f} s'
            note = f'killed, then from step {step} to {last}; {restored}'
            yield Row('resumption', OK, time.perf_counter() - start_time, note)
            yield self._pace()
        # Both came after each step.
        saving, evaluation = (
            self._time_spent(resumed_at)[part] / seconds_by_part
            for part in (times.SAVING, times.EVALUATION)
        )
        size = f'{self.facts.state_bytes / 1e6:,.1f} MB a checkpoint'
        yield Row('saving', OK, saving, size)
        names = ', '.join(self.facts.evaluations)
        yield Row('evaluations', OK, evaluation, f'one batch each: {names or "none"}')

    def _pace(self) -> Row:
        """Describe the time of the last step, and the hours of all steps at this speed."""
        assert self.facts is not None
        lines = run_folder.read_metrics(self._scratch)
        logged_steps = [line[STEP_SEC] for line in lines if STEP_SEC in line]
        seconds, note = logged_steps[-1], 'of the smallest batch'
        if not self.request.small:
            hours = seconds * self.facts.total / 3600
            note = f'at this pace, all {self.facts.total:,} take {hours:.2g} hours on this machine'
        return Row('step', OK, seconds, note)

    def _train(self) -> int | None:
        """Run the request in a process; kill it after its save if the request has no last step.

        Returns:
          Its exit code; None if it was killed.
        """
        with (self._local / 'output').open('wb') as output:
            request = self._local / 'request.json'
            request.write_text(json.dumps(self.request._asdict()))
            args = [sys.executable, '-m', 'vit_jax.rehearsal.dry_run', str(request)]
            pipes: dict[str, Any] = {'stdin': subprocess.PIPE, 'stdout': output}
            pipes['stderr'] = subprocess.STDOUT
            process = subprocess.Popen(args, env=same_modules(), **pipes)
            try:
                code = self._wait(process)
            finally:
                process.kill()
                process.communicate()
        with contextlib.suppress(OSError, ValueError):
            self.facts = Facts(**json.loads(pathlib.Path(self.request.facts).read_bytes()))
        return code

    def _wait(self, process: subprocess.Popen[bytes]) -> int | None:
        """Wait for the exit code; None once a checkpoint exists, or after the time limit."""
        pause = 2.0 if paths.is_remote(self._scratch) else 0.1
        until = time.perf_counter() + self._seconds
        while time.perf_counter() < until:
            with contextlib.suppress(subprocess.TimeoutExpired):
                return process.wait(pause)
            if self.request.last is None and run_folder.finished_steps(self._checkpoints):
                return None
        return None

    def _is_too_large(self, code: int | None) -> bool:
        return code in (TOO_LARGE, OUT_OF_MEMORY)

    def _output(self) -> str:
        return (self._local / 'output').read_text(errors='replace')

    def _reason(self) -> str:
        """Return the last line that the process wrote."""
        lines = [line.strip() for line in self._output().splitlines() if line.strip()]
        return lines[-1].removeprefix('error: ') if lines else 'the process ended without a word'

    def _summarize(self) -> str:
        assert self.facts is not None
        facts = self.facts
        return (
            f'{facts.batch_size:,} {facts.unit} a step on {facts.hardware}, '
            f'compiled in {self._time_spent()[times.COMPILE]:.1f} s; {facts.total:,} steps in all'
        )

    def _time_spent(self, since: float = 0.0) -> Mapping[str, float]:
        """Sum the run's seconds by part, over processes started at `since` or later."""
        account = times.read(self._scratch)
        spans = [span for span in account.spans if span.began >= since] if account else []
        return {name: math.fsum(s.parts.get(name, 0.0) for s in spans) for name in times.RECORDED}

    @property
    def _checkpoints(self) -> paths.Path:
        return self._scratch / run_folder.CHECKPOINTS


def run_command(name: str, command: Sequence[str]) -> tuple[Row, str]:
    """Run a command; return its row and its output."""
    start_time = time.perf_counter()
    process = subprocess.run(
        command, env=same_modules(), capture_output=True, text=True, check=False
    )
    seconds = time.perf_counter() - start_time
    reason = (process.stderr.strip().splitlines() or ['it does not fit'])[-1].removeprefix(
        'error: '
    )
    if process.returncode:
        return Row(name, FAILED, seconds, reason), process.stdout
    return Row(name, OK, seconds, 'it fits'), process.stdout


def same_modules() -> dict[str, str]:
    """Return the environment of a process that imports the same modules as this one."""
    return {**os.environ, 'PYTHONPATH': os.pathsep.join(filter(None, sys.path))}
