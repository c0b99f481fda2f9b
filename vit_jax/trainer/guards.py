"""Guards of a run: what every process must share, the lock of its folder, signals, a watchdog.

One context manager, in three stages: `guards` compares the processes and finds a complete run,
`Guard.lock` takes the folder once the run is built, `Guard.open_metrics` opens its output.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import hashlib
import json
import os
import pathlib
import socket
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import jax
from ml_collections import ConfigDict

import vit_jax
from vit_jax.checkpoints.checkpointer import Checkpointer
from vit_jax.config.load import to_json
from vit_jax.data.batches import as_facts
from vit_jax.data.dataset import Dataset
from vit_jax.data.vocabulary import Vocabulary
from vit_jax.errors import UserError
from vit_jax.inference import fine_tune
from vit_jax.interop.trained import TrainedModel
from vit_jax.runtime import environment, mesh, processes
from vit_jax.runtime.preemption import Preemption
from vit_jax.runtime.watchdog import Watchdog
from vit_jax.storage import lock, paths, run_folder
from vit_jax.trainer import workdir
from vit_jax.trainer.build import Training
from vit_jax.trainer.meter import Clock
from vit_jax.trainer.writer import Writer

if TYPE_CHECKING:
    from vit_jax.trainer.profile import Profile

WARM_UP = 2  # steps not traced: the first is compiled, the second may wait for the first
SHARED_SECONDS = 10.0  # for a file to appear on other hosts
Report = Callable[[int, dict[str, float]], bool]


@dataclasses.dataclass(frozen=True)
class Window:
    """Steps to trace.

    Attributes:
      count: How many.
      first: The first of them; None for the first that follow what a start compiles.
    """

    count: int
    first: int | None = None

    def steps(self, start: int, total: int) -> range:
        """Return the numbers of the traced steps in a run that continues after step `start`.

        Raises:
          UserError: if the run does not take them.
        """
        start_step = start + WARM_UP + 1 if self.first is None else self.first
        if start_step <= start or start_step + self.count - 1 > total:
            raise UserError(
                f'--profile: the run takes the steps {start + 1} to {total}, not {start_step} to '
                f'{start_step + self.count - 1}'
            )
        return range(start_step, start_step + self.count)


@dataclasses.dataclass(frozen=True)
class RunOptions:
    """Options of one start of a run, which its config does not hold.

    Attributes:
      stop_at: Step after which to save and stop, as if preempted there.
      restart: Start anew if the run has no intact checkpoint; its files are moved to
        `checkpoints/rejected/`. A run with an intact one resumes, so that a launcher that repeats
        the command loses nothing.
      extend: Continue a run of the same config with a shorter `total`.
      devices: Devices to use; all by default.
      report: Function called with the step and the results after evaluations, on every process;
        returns whether to end the run there.
      callbacks: Functions of the run's `trainer.loop.Loop`, called after each step, on every
        process, before the state is saved. They may read it, log by `write`, and `end` the run.
      step_timeout: Seconds, see `Watchdog`.
      allowed: Modules that the config of the run that this one starts from may name.
      strict: Fail if the newest checkpoint is damaged, even in a complete run, instead of going
        back to an older one.
      profile: Steps to trace into the folder's `profile/`.
      began: Unix time at which the process began, for the record of its time; now by default.
      adapt: Function that changes the built run before it starts, for rehearsals.
    """

    stop_at: int | None = None
    restart: bool = False
    extend: bool = False
    devices: Sequence[jax.Device] | None = None
    report: Report | None = None
    callbacks: Sequence[Callable[[Any], object]] = ()
    step_timeout: float | None = None
    allowed: Sequence[str] = ()
    strict: bool = False
    profile: Window | None = None
    began: float | None = None
    adapt: Callable[[Training], Training] | None = None


@contextlib.contextmanager
def guards(config: ConfigDict, folder: str | pathlib.Path, options: RunOptions) -> Iterator[Guard]:
    """Guard a run; every resource that the guard opens is closed at the end.

    Raises:
      UserError: for a mistake in the config or the folder, or if processes of the job differ in
        their config or code.
    """
    with contextlib.ExitStack() as stack:
        yield Guard(config, paths.absolute(folder), options, stack)


class Guard:
    """Guard of a run.

    Attributes:
      folder: Run folder.
      options: Options of this start.
      devices: Devices of the run.
      config: Config of the run, completed from the checkpoint of `config.init`.
      notes: Keys that were completed, a line each.
      checkpoint: The checkpoint of `config.init`, if it was read to complete the config.
      result: The final evaluation of a complete run; None while steps are left.
      clock: Record of the run's time.
      preemption, watchdog, checkpointer: Set by `lock`.
      writer: Set by `open_metrics`.
      profile: Set by `open_metrics` if steps are traced.
    """

    preemption: Preemption
    watchdog: Watchdog
    checkpointer: Checkpointer
    writer: Writer
    profile: Profile | None = None

    def __init__(
        self,
        config: ConfigDict,
        folder: pathlib.Path,
        options: RunOptions,
        stack: contextlib.ExitStack,
    ):
        self.folder, self.options, self._stack = folder, options, stack
        self.clock = Clock(options.began)
        self.devices = mesh.usable_devices() if options.devices is None else options.devices
        if jax.process_count() > 1:
            processes.require_same_facts(start_facts(config, options))
            require_shared(folder, complete=not (options.restart or options.extend))
        completed = fine_tune.complete_config(
            config, workdir.stored_config(folder), options.allowed
        )
        self.config = workdir.settle_warmup(completed.config, folder)
        self.notes = completed.notes
        self.checkpoint: TrainedModel | None = completed.checkpoint
        self.result = workdir.final_result(self.config, folder, options.extend)
        self._anew = options.restart and not workdir.has_intact_checkpoint(folder)
        if self._anew:
            self.result = None
        if self.result is None:
            run_folder.require_writable(folder)
        elif options.profile:
            raise UserError(f'--profile: {folder} is complete; give another --workdir')
        elif options.strict:
            workdir.require_intact(folder)

    def check(self, training: Training) -> Training:
        """Compare the data of all processes and of earlier starts; set old files aside to restart.

        The folder stays unchanged unless the run starts anew.
        """
        if jax.process_count() > 1:
            processes.share_cores()
            processes.require_same_facts(data_facts(training))
        workdir.check_data(training, self.folder)
        if self._anew:
            with lock.lock(self.folder):
                workdir.set_aside(self.folder)
        return self.options.adapt(training) if self.options.adapt else training

    def lock(self, training: Training) -> None:
        """Take the folder, watch signals and progress, and open the checkpoints.

        Sets `result` if another process has completed the run since.
        """
        folder, enter, existed = self.folder, self._stack.enter_context, self.folder.is_dir()
        enter(self.clock)
        self._check_lock = enter(lock.lock(folder))
        enter(workdir.clear_on_error(folder, existed, self._check_lock))
        self.preemption = enter(Preemption())
        self.watchdog = enter(Watchdog(self.options.step_timeout))
        checkpoints = folder / run_folder.CHECKPOINTS
        self.checkpointer = enter(
            Checkpointer(checkpoints, training.run.checkpoint, training.times.steps)
        )
        # Again, as another run may have been here since. Nothing was written so far.
        workdir.check_data(training, folder)
        self.result = workdir.final_result(self.config, folder, self.options.extend)

    def open_metrics(self, training: Training, step: int, evaluates_again: bool) -> None:
        """Open the metrics of the locked folder, and begin the record of the run's time there.

        Args:
          training: Run that starts.
          step: Step at which it starts.
          evaluates_again: Whether it repeats the evaluations of that step.
        """
        total, window = training.timetable.total, self.options.profile
        traced = window.steps(step, total) if window else range(0)
        with paths.writing(self.folder):
            self.writer = Writer(
                self.folder,
                total,
                step,
                training.data.plan.unit,
                training.config.to_dict(),
                failed=self.preemption.request,
                check_lock=self._check_lock,
                evaluates_again=evaluates_again,
                writers=training.run.writers,
            )
        self._stack.callback(lambda: self.writer.close(self.clock.close))
        if self.writer.enabled:
            with paths.writing(self.folder):
                self.clock.record(self.writer.mirror, self._check_lock, self.writer.say, step)
        if traced:
            from vit_jax.trainer.profile import Profile  # here, as few runs are traced

            self.profile = Profile(self.folder, traced, self.writer.say)
            self._stack.callback(self.profile.close)

    def require_own_folder(self, training: Training) -> None:
        """Check before a save that the folder is still this run's; see `workdir`."""
        workdir.require_own_folder(training, self.folder, self._check_lock, self.writer.say)


def start_facts(config: ConfigDict, options: RunOptions) -> dict[str, Any]:
    """Return the config and the code, which processes compare before any data are opened."""
    resolved = json.loads(to_json(config.copy_and_resolve_references()))
    return {
        **dict(_flat('config', resolved)),
        '--stop-at': options.stop_at,
        '--restart': options.restart,
        '--extend': options.extend,
        'the code of vit_jax': _code_digest(),
        **environment.package_versions(),
        **environment.numeric_settings(),
    }


def data_facts(training: Training) -> dict[str, Any]:
    """Facts about the data of training and all evaluations, by their keys in the config."""
    facts = _dataset_facts('config.data', training.data)
    facts['config.data: batches'] = as_facts(training.data.shapes)
    for name, evaluation in training.evaluations.items():
        key = f'config.evals.{name}'
        facts |= _dataset_facts(key, evaluation.data)
        facts[f'{key}: batches'] = evaluation.data.plan.eval_steps
        if evaluation.fit is not None:
            facts |= _dataset_facts(f'{key}.fit', evaluation.fit)
            facts[f'{key}.fit: batches'] = evaluation.fit.plan.eval_steps
        if evaluation.evaluator is not None:
            facts[f'{key}: files of its evaluator'] = evaluation.evaluator.digest()
    return facts


def _dataset_facts(key: str, data: Dataset) -> dict[str, Any]:
    """Facts about a data set; long ones are replaced by digests."""
    facts = {
        'examples': len(data.source),
        'classes': _digest(json.dumps(data.info.class_names).encode()),
        'vocabulary': data.vocab.digest if isinstance(data.vocab, Vocabulary) else None,
        'arrays': {name: [list(s.shape), s.dtype.name] for name, s in data.spec.items()},
        'names and labels': data.listing.examples,
        'sizes of files': data.listing.contents,
    }
    return {f'{key}: {name}': fact for name, fact in facts.items()}


def _flat(name: str, value: Any) -> Iterator[tuple[str, Any]]:
    if not isinstance(value, Mapping):
        yield name, value
        return
    for key, inner in value.items():
        yield from _flat(f'{name}.{key}', inner)


@functools.cache
def _code_digest() -> str:
    """Return a digest of the package's Python files, as a checkout may differ from its version."""
    root = pathlib.Path(vit_jax.__file__).parent
    files = sorted((path.relative_to(root).as_posix(), path) for path in root.rglob('*.py'))
    return _digest(b''.join(name.encode() + path.read_bytes() for name, path in files))


def _digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()[:12]


def require_shared(folder: pathlib.Path, complete: bool) -> None:
    """Check that every process of the job sees the same run folder.

    Process 0 writes a file with a random name, which the others have to find there.

    Args:
      folder: The run folder, of this process.
      complete: Whether to compare the result of a complete run if process 0 finds one, instead of
        writing a file.

    Raises:
      UserError: on every process if one does not see the file.
    """
    with contextlib.ExitStack() as cleanup:
        sign: list[str] = []
        processes.on_process_0(lambda: sign.extend(_sign(folder, complete, cleanup)))
        name, content = processes.broadcast(sign)
        identity = [jax.process_index(), socket.gethostname(), str(folder)]
        sees = jax.process_index() == 0 or _sees(folder / name, content)
        if missing := processes.gather(None if sees else identity):
            process, host, path = missing[0]
            more = f' ({len(missing)} processes do not)' if len(missing) > 1 else ''
            writer = processes.broadcast(identity)
            raise UserError(
                f'--workdir: process {process} on {host} does not see in {path} what process 0 on '
                f'{writer[1]} writes to {writer[2]}{more}: give all one folder that they share, on '
                'a network file system or in a bucket'
            )


def _sign(folder: pathlib.Path, complete: bool, cleanup: contextlib.ExitStack) -> tuple[str, str]:
    """Name and text of a file that is only in this folder; removed when `cleanup` closes."""
    result = paths.read_text(folder / run_folder.RESULT, errors='replace')
    if complete and result is not None:
        return run_folder.RESULT, result
    name = f'.shared-{uuid.uuid4().hex}'
    with paths.writing(folder):
        if not paths.is_remote(folder) and not folder.is_dir():
            folder.mkdir(parents=True)
            cleanup.callback(workdir.remove_if_empty, folder)
        paths.write_text_atomic(folder / name, name)
    cleanup.callback((folder / name).unlink, missing_ok=True)
    return name, name


def _sees(file: pathlib.Path, content: str) -> bool:
    """Return whether the file appears; clients of network file systems may see it seconds later."""
    end = time.monotonic() + (0 if paths.is_remote(file) else SHARED_SECONDS)
    while True:
        with contextlib.suppress(OSError):  # such as a stale handle
            if paths.read_text(file, errors='replace') == content:
                return True
        if time.monotonic() > end:
            return False
        for parent in (file.parent.parent, file.parent):
            with contextlib.suppress(OSError):  # listing a folder renews NFS's copy of it
                os.listdir(parent)
        time.sleep(0.2)
