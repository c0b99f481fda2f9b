"""A rehearsal: all that a run needs is tried in a few minutes, before it waits in a queue.

extras       the packages that sources, evaluators and writers need
folder       a file is written, read and removed
data         the first, the last and ten random records of every split, after the transforms
start        a process trains, evaluates and saves until it is killed
resumption   another one restores the checkpoint and goes on
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import pathlib
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np
from ml_collections import ConfigDict

from vit_jax import extras
from vit_jax.config import load as config_lib
from vit_jax.config import schema
from vit_jax.data.dataset import open_dataset
from vit_jax.data.records import BrokenRecord
from vit_jax.errors import UserError
from vit_jax.inference import fine_tune
from vit_jax.storage import paths, run_folder, step_folder, times
from vit_jax.trainer.dry_run import TOO_LARGE, Facts, Request
from vit_jax.trainer.evaluate import entry_keywords

OK, FAILED, SKIPPED = 'ok', 'failed', 'not tried'
STEPS = 2  # after the resumption; the first one is slower
STEP_SEC = 'train/step_sec'
RECORDS = 10  # random ones of a split, beside the first and the last
SUFFIX = '.rehearsal'  # of the folder beside that of the run
MINUTES = 30.0  # for the first checkpoint
PROBE = b'vit_jax' * 2**17


class Row(NamedTuple):
    """The result of one trial.

    Attributes:
      name: of it.
      result: one of OK, FAILED and SKIPPED.
      seconds: that it took.
      note: what was found.
    """

    name: str
    result: str
    seconds: float
    note: str


class Failure(Exception):
    """A trial that failed; the message says why."""


def rehearse(
    config: ConfigDict,
    folder: str | os.PathLike[str],
    allowed: Sequence[str] = (),
    minutes: float = MINUTES,
) -> Iterator[Row]:
    """Try what a run needs, and leave nothing behind.

    Args:
      config: of the run, as from `config.load`.
      folder: of the run; it is not touched, but one beside it, which is removed in the end.
      allowed: modules that the config of a run may name which this one starts from.
      minutes: to wait for the first checkpoint, and for the resumption.

    Yields:
      A row for each trial, as it ends. After one that failed, others go on which do not need it.

    Raises:
      UserError: if the rehearsal's folder is there already.
    """
    scratch = paths.path(f'{os.fspath(paths.absolute(folder))}{SUFFIX}')
    if paths.files(scratch):
        raise UserError(
            f'{scratch} is of another rehearsal: wait for its end, or remove the folder if it was '
            'killed'
        )
    failed = []
    with _removed(scratch):
        for row in _without_steps(config, os.fspath(folder), scratch, allowed):
            failed += [row.name] if row.result == FAILED else []
            yield row
        if failed:
            yield Row('start', SKIPPED, 0.0, f'needs: {", ".join(failed)}')
            return
        with tempfile.TemporaryDirectory() as local:
            yield from DryRun(config, scratch, pathlib.Path(local), allowed, minutes).rows()


@contextlib.contextmanager
def _removed(scratch: paths.Path) -> Iterator[None]:
    """Remove the folder in the end, and those above it that it was made with."""
    local = () if paths.is_remote(scratch) else scratch.parents
    made = [parent for parent in local if not parent.exists()]
    try:
        yield
    finally:
        with contextlib.suppress(FileNotFoundError, NotADirectoryError):
            paths.remove(scratch)
        with contextlib.suppress(OSError):
            for parent in made:
                parent.rmdir()


def _without_steps(
    config: ConfigDict, folder: str, scratch: paths.Path, allowed: Sequence[str]
) -> Iterator[Row]:
    """The trials in this process, without devices."""
    yield _timed('extras', partial(_check_extras, config, folder))
    yield _timed('folder', partial(_check_folder, scratch))
    for name in config.get('writers', ()):
        yield _timed(f'writer {name}', partial(_check_writer, name))
    began = time.perf_counter()
    try:
        config = fine_tune.filled(config, None, allowed).config
    except UserError as error:
        yield Row('config', FAILED, time.perf_counter() - began, str(error))
        return
    for name, section, split in _sections(config):
        yield _timed(f'{name} {split}', partial(_check_data, config, section, split))


def _timed(name: str, trial: Callable[[], str]) -> Row:
    """The row of a trial, which returns a note; errors of the user's and of disks are failures."""
    began = time.perf_counter()
    try:
        note, result = trial(), OK
    except (UserError, Failure, BrokenRecord, OSError) as error:
        note, result = str(error) if isinstance(error, UserError) else paths.why(error), FAILED
    return Row(name, result, time.perf_counter() - began, note)


def _check_extras(config: ConfigDict, folder: str) -> str:
    needed = sorted(extras.of_config(config.to_dict()) | extras.of_words([folder]))
    if lacking := [name for name in needed if not extras.is_installed(name)]:
        raise Failure(f"pip install 'vit_jax[{','.join(lacking)}]'")
    return ', '.join(needed) or 'none needed'


def _check_writer(name: str) -> str:
    schema.writer_class(name).require_access()
    return 'its service can be reached, as far as one knows without writing to it'


def _check_folder(scratch: paths.Path) -> str:
    """Write a megabyte, read it and remove it."""
    paths.require_writable(scratch)
    file = scratch / f'probe-{uuid.uuid4().hex}'
    with paths.reaching(scratch):
        paths.make_folder(scratch)
        paths.write_atomic(file, PROBE)
        if file.read_bytes() != PROBE:
            raise Failure(f'{file} is read with other bytes than were written')
        file.unlink()
    return f'{len(PROBE) / 1e6:.1f} MB written, read and removed'


def _sections(config: ConfigDict) -> Iterator[tuple[str, ConfigDict, str]]:
    """Names, sections and splits of all data, each that is read the same way once."""
    seen = set()
    entries = [('data', config.data), *((f'evals.{n}', s) for n, s in config.evals.items())]
    for name, section in entries:
        for split in filter(None, (section.get('split'), section.get('fit'))):
            key = repr((section.get('source'), split, section.get('transforms')))
            if key not in seen:
                seen.add(key)
                yield name, section, split


def _check_data(config: ConfigDict, section: ConfigDict, split: str) -> str:
    """Read the first, the last and random examples of a split, through the transforms."""
    data = open_dataset(**entry_keywords(config, section, split=split), seed=config.seed)
    examples, rng = data.plan.examples, np.random.default_rng(config.seed)
    chosen = {0, len(examples) - 1, *rng.integers(len(examples), size=RECORDS).tolist()}
    began = time.perf_counter()
    for index in sorted(chosen):
        record = examples.read(index, config.seed, index)
    each = (time.perf_counter() - began) / len(chosen)
    fields = ', '.join(_described(name, value) for name, value in record.items())
    return f'{len(chosen)} of {len(examples):,} records, {1e3 * each:.1f} ms each: {fields}'


def _described(name: str, value: Any) -> str:
    shape = 'x'.join(map(str, np.shape(value)))
    return f'{name} {shape}' if shape else name


def of_command(name: str, command: Sequence[str]) -> tuple[Row, str]:
    """The row of a command of its own, and what it printed."""
    began = time.perf_counter()
    done = subprocess.run(command, env=_same_modules(), capture_output=True, text=True, check=False)
    seconds = time.perf_counter() - began
    reason = (done.stderr.strip().splitlines() or ['it does not fit'])[-1].removeprefix('error: ')
    if done.returncode:
        return Row(name, FAILED, seconds, reason), done.stdout
    return Row(name, OK, seconds, 'it fits'), done.stdout


def _same_modules() -> dict[str, str]:
    """The environment of a process that imports the same modules as this one."""
    return {**os.environ, 'PYTHONPATH': os.pathsep.join(filter(None, sys.path))}


class DryRun:
    """The first steps of a run in processes of their own, one of which is killed.

    Attributes:
      request: of the process that trains next.
      facts: of the run on this machine, once a process has found them.
    """

    def __init__(
        self,
        config: ConfigDict,
        scratch: paths.Path,
        local: pathlib.Path,
        allowed: Sequence[str],
        minutes: float,
    ):
        """Start nothing yet; `local` is an empty folder, the others are as for `rehearse`."""
        self._scratch, self._local, self._seconds = scratch, local, 60 * minutes
        content = json.loads(config_lib.to_json(config))
        facts = str(local / 'facts.json')
        self.request = Request(content, os.fspath(scratch), facts, tuple(allowed))
        self.facts: Facts | None = None

    def rows(self) -> Iterator[Row]:
        """Train until a checkpoint is there, kill the process, and go on."""
        began = time.perf_counter()
        code = self._train()
        note = ''
        if self._is_too_large(code):
            note, self.request = f'{self._reason()}; tried', self.request._replace(small=True)
            with contextlib.suppress(FileNotFoundError):
                paths.remove(self._scratch)
            code = self._train()
        seconds = time.perf_counter() - began
        if code == TOO_LARGE:
            yield Row('start', SKIPPED, seconds, f'{self._reason()}: rehearse where it will run')
            return
        if code != 0 and not (code is None and step_folder.finished(self._checkpoints)):
            late = f'no checkpoint after {self._seconds / 60:g} minutes'
            yield Row('start', FAILED, seconds, late if code is None else self._reason())
            return
        yield Row('start', OK, seconds, f'{note} {self._described()}'.strip())
        yield from self._resume()

    def _resume(self) -> Iterator[Row]:
        """Go on from the checkpoint; the rows of what the last process did."""
        began, since = time.perf_counter(), time.time()
        step = step_folder.finished(self._checkpoints)[-1]
        assert self.facts is not None
        last = min(step + STEPS, self.facts.total)
        if last == step:
            yield Row('resumption', SKIPPED, 0.0, f'the run is over after step {step}')
            since, taken = 0.0, step
        else:
            taken = last - step
            self.request = self.request._replace(last=last)
            if (code := self._train()) != 0:
                reason = self._reason() if code is not None else 'it did not end in time'
                yield Row('resumption', FAILED, time.perf_counter() - began, reason)
                return
            restored = f'restored in {self._spent(since)[times.RESTORE]:.1f} s'
            note = f'killed, then from step {step} to {last}; {restored}'
            yield Row('resumption', OK, time.perf_counter() - began, note)
            yield self._pace()
        # Both came after each step.
        saving, evaluation = (
            self._spent(since)[part] / taken for part in (times.SAVING, times.EVALUATION)
        )
        size = f'{self.facts.state_bytes / 1e6:,.1f} MB a checkpoint'
        yield Row('saving', OK, saving, size)
        names = ', '.join(self.facts.evaluations)
        yield Row('evaluations', OK, evaluation, f'one batch each: {names or "none"}')

    def _pace(self) -> Row:
        """The last step, and the hours of all at its pace."""
        assert self.facts is not None
        lines = run_folder.read_metrics(self._scratch)
        logged = [line[STEP_SEC] for line in lines if STEP_SEC in line]
        seconds, note = logged[-1], 'of the smallest batch'
        if not self.request.small:
            hours = seconds * self.facts.total / 3600
            note = f'at this pace, all {self.facts.total:,} take {hours:.2g} hours on this machine'
        return Row('step', OK, seconds, note)

    def _train(self) -> int | None:
        """Run the request in a process, which is killed once it has saved if it is not to end.

        Returns:
          Its exit code; None if it was killed.
        """
        with (self._local / 'output').open('wb') as output:
            request = self._local / 'request.json'
            request.write_text(json.dumps(self.request._asdict()))
            words = [sys.executable, '-m', 'vit_jax.trainer.dry_run', str(request)]
            pipes: dict[str, Any] = {'stdin': subprocess.PIPE, 'stdout': output}
            pipes['stderr'] = subprocess.STDOUT
            process = subprocess.Popen(words, env=_same_modules(), **pipes)
            try:
                code = self._wait(process)
            finally:
                process.kill()
                process.communicate()
        with contextlib.suppress(OSError, ValueError):
            self.facts = Facts(**json.loads(pathlib.Path(self.request.facts).read_bytes()))
        return code

    def _wait(self, process: subprocess.Popen[bytes]) -> int | None:
        """The exit code; None once a checkpoint is there, or the time is over."""
        pause = 2.0 if paths.is_remote(self._scratch) else 0.1
        until = time.perf_counter() + self._seconds
        while time.perf_counter() < until:
            with contextlib.suppress(subprocess.TimeoutExpired):
                return process.wait(pause)
            if self.request.last is None and step_folder.finished(self._checkpoints):
                return None
        return None

    def _is_too_large(self, code: int | None) -> bool:
        return code == TOO_LARGE or (code != 0 and 'RESOURCE_EXHAUSTED' in self._output())

    def _output(self) -> str:
        return (self._local / 'output').read_text(errors='replace')

    def _reason(self) -> str:
        """The last line that the process wrote."""
        lines = [line.strip() for line in self._output().splitlines() if line.strip()]
        return lines[-1].removeprefix('error: ') if lines else 'the process ended without a word'

    def _described(self) -> str:
        assert self.facts is not None
        facts = self.facts
        return (
            f'{facts.batch_size:,} {facts.unit} a step on {facts.hardware}, '
            f'compiled in {self._spent()[times.COMPILE]:.1f} s; {facts.total:,} steps in all'
        )

    def _spent(self, since: float = 0.0) -> Mapping[str, float]:
        """Seconds of each part of the run's time, in processes that began at `since` or later."""
        account = times.read(self._scratch)
        spans = [span for span in account.spans if span.began >= since] if account else []
        return {name: math.fsum(s.parts.get(name, 0.0) for s in spans) for name in times.RECORDED}

    @property
    def _checkpoints(self) -> paths.Path:
        return self._scratch / run_folder.CHECKPOINTS
