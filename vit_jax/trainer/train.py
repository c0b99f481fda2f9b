"""One run, from its config to its last checkpoint.

facts      every process of the job must have the same config, code and data
fine_tune  keys that the config leaves open are taken from its checkpoint and the data
build      data, program, timetable, evaluations; nothing is compiled or written yet
origin     another run's checkpoint that a new run starts from, if the config names one
lock       the folder is this run's; signals and checkpoints are open
restore    the newest valid checkpoint, the origin, or a fresh state
loop       next batch -> step -> when due: log, evaluate, save
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
import pathlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import jax
from ml_collections import ConfigDict

import vit_jax
from vit_jax.checkpoints.checkpointer import Checkpointer
from vit_jax.config.load import to_json
from vit_jax.data.batches import as_facts
from vit_jax.data.dataset import Dataset
from vit_jax.data.vocabulary import Vocabulary
from vit_jax.errors import UserError, forbid_exit
from vit_jax.inference import fine_tune
from vit_jax.runtime import environment, mesh, processes
from vit_jax.runtime.preemption import Preemption
from vit_jax.runtime.watchdog import Watchdog
from vit_jax.storage import lock, paths, run_folder, times
from vit_jax.trainer import workdir
from vit_jax.trainer.build import Training, build
from vit_jax.trainer.loop import (
    Evaluated,
    Hooks,
    Preempted,
    Pruned,
    Report,
    count_broken_records,
    run_loop,
)
from vit_jax.trainer.meter import Clock
from vit_jax.trainer.profile import Profile, Window
from vit_jax.trainer.start import (
    Origin,
    ResumePoint,
    check_stop,
    describe,
    extension_note,
    find_origin,
    forget_result,
    hold_base,
    restore,
    write_history,
)
from vit_jax.trainer.workdir import write_config, write_result
from vit_jax.trainer.writer import Writer

__all__ = ['Preempted', 'Pruned', 'Report', 'Window', 'train']


@forbid_exit()
def train(
    config: ConfigDict,
    folder: str | pathlib.Path,
    *,
    stop_at: int | None = None,
    restart: bool = False,
    extend: bool = False,
    devices: Sequence[jax.Device] | None = None,
    report: Report | None = None,
    step_timeout: float | None = None,
    allowed: Sequence[str] = (),
    strict: bool = False,
    profile: Window | None = None,
    began: float | None = None,
    adapt: Callable[[Training], Training] | None = None,
) -> dict[str, float]:
    """Train to the end; resume the run in `folder` if there is one.

    Args:
      config: as from `config.load`.
      folder: the run folder; made if missing.
      stop_at: save and stop after this step, as if preempted there.
      restart: start anew if the run has no intact checkpoint; its files are moved to
        `checkpoints/rejected/`. A run that has one resumes, so that a launcher that repeats the
        command loses nothing.
      extend: continue a run of the same config with a shorter `total`.
      devices: all by default.
      report: called with the step and the results after evaluations, on every process; returns
        whether to end the run there.
      step_timeout: seconds, see `Watchdog`.
      allowed: modules that the config of the run that this one starts from may name.
      strict: fail if the newest checkpoint is damaged, also that of a complete run, instead of
        going back to an older one.
      profile: the steps to trace into the folder's `profile/`.
      began: Unix time at which the process began, for the record of its time; now by default.
      adapt: changes the built run before it starts, as a rehearsal does.

    Returns:
      The final evaluation, {name: value}, and the number of broken records if there are any. A run
      that `config.early_stop` ends is complete.

    Raises:
      UserError: for a mistake in the config or the folder; if processes of the job differ in their
        config, code or data; or as `mesh.usable_devices`.
      DamagedRun: if `strict` and the run is complete, but its newest checkpoint is damaged.
      Diverged: if the loss is not finite; the last good checkpoint stands.
      Preempted: after SIGTERM, SIGINT, SIGHUP, at `stop_at` or if the metrics can no longer be
        written; the state is saved.
      Pruned: if `report` ended the run before the last step.
    """
    folder, clock = paths.absolute(folder), Clock(began)
    if devices is None:
        devices = mesh.usable_devices()
    processes.require_same_facts(start_facts(config, stop_at, restart, extend))
    workdir.require_shared(folder, complete=not (restart or extend))
    completed = fine_tune.complete(config, workdir.stored_config(folder), allowed)
    config = completed.config
    result = workdir.final_result(config, folder, extend)
    anew = restart and not workdir.has_intact_checkpoint(folder)
    if result is not None and not anew:
        if profile:
            raise UserError(f'--profile: {folder} is complete; give another --workdir')
        if strict:
            workdir.require_intact(folder)
        return result
    training = prepare(config, folder, devices, anew)
    if adapt:
        training = adapt(training)
    if adapters := training.program.adapters:
        training = hold_base(training, adapters, allowed, completed.checkpoint)
    new = not workdir.has_checkpoint(folder)
    origin = find_origin(training, allowed, completed.checkpoint) if new else None
    existed, keep = folder.is_dir(), training.run.checkpoint
    with (
        clock,
        lock.lock(folder) as held,
        workdir.cleared_on_error(folder, existed, held),
        Preemption() as preemption,
        Watchdog(step_timeout) as watchdog,
        Checkpointer(folder / run_folder.CHECKPOINTS, keep, training.times.steps) as checkpointer,
    ):
        # Again, as another run may have been here since. Nothing was written so far.
        workdir.check_data(training, folder)
        if (result := workdir.final_result(config, folder, extend)) is not None:
            return result
        with clock.during(times.RESTORE):
            point = restore(training, checkpointer, origin, allowed, strict)
        check_stop(stop_at, point.step)
        notes = (*completed.notes, *write_start(training, folder, point, origin, extend))
        training.data.facts()  # reads records, for which no save may wait
        del origin, completed  # frees the memory
        window = profile.steps(point.step, training.timetable.total) if profile else range(0)
        with (
            open_metrics(training, folder, point, held, preemption, clock) as writer,
            contextlib.closing(Profile(folder, window, writer.say)) as tracer,
        ):
            hooks = Hooks(
                checkpointer,
                writer,
                watchdog,
                stop_requested=preemption.reached,
                stop_at=stop_at,
                report=report,
                profile=tracer,
                require_own=partial(workdir.require_own_folder, training, folder, held, writer.say),
                clock=clock,
            )
            writer.say('\n'.join((describe(training, folder, point), *notes)))
            return conclude(training, folder, run_loop(training, point, hooks), writer)


def prepare(
    config: ConfigDict, folder: pathlib.Path, devices: Sequence[jax.Device] | None, anew: bool
) -> Training:
    """Build the run; leave its folder unchanged unless the run starts anew."""
    run_folder.require_writable(folder)
    training = build(config, devices)
    if jax.process_count() > 1:
        processes.share_cores()
        processes.require_same_facts(data_facts(training))
    workdir.check_data(training, folder)
    if anew:
        with lock.lock(folder):
            workdir.set_aside(folder)
    return training


def write_start(
    training: Training,
    folder: pathlib.Path,
    point: ResumePoint,
    origin: Origin | None,
    extend: bool,
) -> tuple[str, ...]:
    """Write the config, and the history of a branch, into the folder; return notes for people."""
    training.data.source.record_broken(point.broken)
    notes = workdir.replaced_config_note(training, folder)
    if extend:
        notes += extension_note(training, folder, point.step)
    with paths.writing(folder):
        if origin is not None and point.step == origin.step:
            notes += origin.notes
            write_history(folder, origin)
        if extend:
            forget_result(folder)
        write_config(training, folder)
    return notes


def conclude(
    training: Training, folder: pathlib.Path, last: Evaluated, writer: Writer
) -> dict[str, float]:
    """Write the result of a complete run, and return it.

    Raises:
      Preempted: if metrics are missing from the folder, so that the run is not complete.
    """
    result = last.results | count_broken_records(training)
    if writer.trouble:
        raise Preempted(f'{writer.trouble}; the state is saved')
    if last.why:
        writer.say(last.why)
    write_result(folder, result, last.why)
    return result


@contextlib.contextmanager
def open_metrics(
    training: Training,
    folder: pathlib.Path,
    point: ResumePoint,
    held: lock.Check,
    preemption: Preemption,
    clock: Clock,
) -> Iterator[Writer]:
    """Open the metrics of a locked run folder, and begin the record of the run's time there."""
    with paths.writing(folder):
        writer = Writer(
            folder,
            training.timetable.total,
            point.step,
            training.data.unit,
            training.config.to_dict(),
            failed=preemption.request,
            held=held,
            evaluates_again=point.unevaluated,
            writers=training.run.writers,
        )
    if writer.enabled:
        with paths.writing(folder):
            clock.record(writer.mirror, held, writer.say, point.step)
    try:
        yield writer
    finally:
        writer.close(clock.close)


def start_facts(
    config: ConfigDict, stop_at: int | None, restart: bool, extend: bool
) -> dict[str, Any]:
    """The config and the code, which processes compare before any data are opened."""
    resolved = json.loads(to_json(config.copy_and_resolve_references()))
    return {
        **dict(_flat('config', resolved)),
        '--stop-at': stop_at,
        '--restart': restart,
        '--extend': extend,
        'the code of vit_jax': _code(),
        **environment.package_versions(),
        **environment.numeric_settings(),
    }


def data_facts(training: Training) -> dict[str, Any]:
    """Facts about the data of training and all evaluations, by their keys in the config."""
    facts = _facts('config.data', training.data)
    facts['config.data: batches'] = as_facts(training.data.shapes)
    for name, one in training.evaluations.items():
        where = f'config.evals.{name}'
        facts |= _facts(where, one.data)
        facts[f'{where}: batches'] = one.data.plan.eval_steps
        if one.fit is not None:
            facts |= _facts(f'{where}.fit', one.fit)
            facts[f'{where}.fit: batches'] = one.fit.plan.eval_steps
        if one.evaluator is not None:
            facts[f'{where}: files of its evaluator'] = one.evaluator.digest()
    return facts


def _facts(where: str, data: Dataset) -> dict[str, Any]:
    """Facts about a data set; long ones are replaced by digests."""
    facts = {
        'examples': len(data.source),
        'classes': _digest(json.dumps(data.info.class_names).encode()),
        'vocabulary': data.vocab.digest if isinstance(data.vocab, Vocabulary) else None,
        'arrays': {name: [list(s.shape), s.dtype.name] for name, s in data.spec.items()},
        'names and labels': data.listing.examples,
        'sizes of files': data.listing.contents,
    }
    return {f'{where}: {name}': fact for name, fact in facts.items()}


def _flat(name: str, value: Any) -> Iterator[tuple[str, Any]]:
    if not isinstance(value, Mapping):
        yield name, value
        return
    for key, inner in value.items():
        yield from _flat(f'{name}.{key}', inner)


@functools.cache
def _code() -> str:
    """A digest of the package's Python files, as a checkout may differ from its version."""
    root = pathlib.Path(vit_jax.__file__).parent
    files = sorted((path.relative_to(root).as_posix(), path) for path in root.rglob('*.py'))
    return _digest(b''.join(name.encode() + path.read_bytes() for name, path in files))


def _digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()[:12]
