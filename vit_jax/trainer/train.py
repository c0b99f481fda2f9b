"""One run, from its config to its last checkpoint.

agreement  every process of the job has the same config, code and data
fine_tune  what the config leaves to the checkpoint that it starts from, and to the data
build      data, program, timetable, evaluations; nothing is compiled or written yet
origin     another run's checkpoint that a new run starts from, if the config names one
open_run   the folder is locked; signals, checkpoints and metrics are open
restore    the newest valid checkpoint, or that origin, or a fresh state
loop       next batch -> step -> when due: log, evaluate, save
"""

from __future__ import annotations

import pathlib
from collections.abc import Callable, Sequence

import jax
from ml_collections import ConfigDict

from vit_jax.errors import UserError, staying
from vit_jax.inference import fine_tune
from vit_jax.runtime import mesh, processes
from vit_jax.storage import lock, paths, run_folder, times
from vit_jax.trainer import agreement, broken_records, extension, workdir
from vit_jax.trainer.build import Training, build
from vit_jax.trainer.clock import Clock
from vit_jax.trainer.describe import describe
from vit_jax.trainer.loop import Evaluated, Preempted, Pruned, Report, loop
from vit_jax.trainer.open_run import opened
from vit_jax.trainer.origin import Origin, find_origin, write_history
from vit_jax.trainer.profile import Window
from vit_jax.trainer.save import write_config, write_result
from vit_jax.trainer.start import Beginning, check_stop, restore
from vit_jax.trainer.writer import Writer

__all__ = ['Preempted', 'Pruned', 'Report', 'Window', 'train']


@staying()
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
    """Train to the end, resuming whatever is in `folder`.

    Args:
      config: as from `config.load`.
      folder: the run folder; made if missing.
      stop_at: save and stop after this step, as if preempted there.
      restart: start anew if no intact checkpoint is left of the run; what there was is moved to
        `checkpoints/rejected/`. A run that has one resumes, so that whatever starts the same
        command again loses nothing.
      extend: let a run of the same config but another `total` go on to this one's.
      devices: all by default.
      report: gets the step and the results whenever evaluations were due, on every process; what it
        returns says whether the run ends there.
      step_timeout: seconds, see `Watchdog`.
      allowed: modules that the config of a run may name which this one starts from.
      strict: refuse to go back to an older checkpoint where the newest is damaged.
      profile: the steps to trace into the folder's `profile/`.
      began: Unix time at which the process began, for the record of its time; now by default.
      adapt: changes what is built of the config before it runs, as a rehearsal does.

    Returns:
      The final evaluation, {name: value}, and the number of broken records if there were any. A run
      that `config.early_stop` has ended is complete.

    Raises:
      UserError: for a mistake in the config or the folder, if processes of the job differ in their
        config, code or data, or as `mesh.usable_devices`.
      Diverged: if the loss is not finite; the last good checkpoint stands.
      Preempted: after SIGTERM, SIGINT, SIGHUP, at `stop_at` or if the metrics can no longer be
        written; the state is saved.
      Pruned: if `report` said so before the last step.
    """
    folder, clock = paths.absolute(folder), Clock(began)
    if devices is None:
        devices = mesh.usable_devices()
    processes.require_alike(agreement.of_start(config, stop_at, restart, extend))
    workdir.require_shared(folder, complete=not (restart or extend))
    filled = fine_tune.filled(config, workdir.stored_config(folder), allowed)
    config = filled.config
    result = workdir.finished(config, folder, extend)
    anew = restart and not workdir.intact(folder)
    if result is not None and not anew:
        if profile:
            raise UserError(f'--profile: {folder} is complete; give another --workdir')
        return result
    training = prepare(config, folder, devices, anew)
    if adapt:
        training = adapt(training)
    begun = workdir.begun(folder)
    origin = None if begun else find_origin(training, allowed, filled.checkpoint)
    with clock, opened(training, folder, step_timeout) as run:
        with clock.during(times.RESTORE):
            beginning = restore(training, run.checkpointer, origin, allowed, strict)
        check_stop(stop_at, beginning.step)
        notes = (*filled.notes, *write_start(training, folder, beginning, origin, extend))
        training.data.facts()  # reads records, for which no save may wait
        del origin, filled  # frees the memory
        window = profile.steps(beginning.step, training.timetable.total) if profile else range(0)
        with run.hooks(training, beginning, window, stop_at, report, clock) as hooks:
            hooks.writer.say('\n'.join((describe(training, folder, beginning), *notes)))
            return conclude(training, folder, loop(training, beginning, hooks), hooks.writer)


def prepare(
    config: ConfigDict, folder: pathlib.Path, devices: Sequence[jax.Device] | None, anew: bool
) -> Training:
    """Build the run; its folder is left as it is, unless the run starts anew."""
    run_folder.require_writable(folder)
    training = build(config, devices)
    if jax.process_count() > 1:
        processes.require_alike(agreement.of_data(training))
    workdir.check_data(training, folder)
    if anew:
        with lock.lock(folder):
            workdir.set_aside(folder)
    return training


def write_start(
    training: Training,
    folder: pathlib.Path,
    beginning: Beginning,
    origin: Origin | None,
    extend: bool,
) -> tuple[str, ...]:
    """Write the config, and the history of a branch, into the folder; return notes for people."""
    training.data.source.note(beginning.broken)
    notes = workdir.replaced(training, folder)
    if extend:
        notes += extension.note(training, folder, beginning.step)
    with paths.writing(folder):
        if origin is not None and beginning.step == origin.step:
            notes += origin.notes
            write_history(folder, origin)
        if extend:
            extension.forget_result(folder)
        write_config(training, folder)
    return notes


def conclude(
    training: Training, folder: pathlib.Path, last: Evaluated, writer: Writer
) -> dict[str, float]:
    """Write the result of a complete run, and return it.

    Raises:
      Preempted: if metrics are missing from the folder, so that the run is not complete.
    """
    result = last.results | broken_records.counts(training)
    if writer.trouble:
        raise Preempted(f'{writer.trouble}; the state is saved')
    if last.why:
        writer.say(last.why)
    write_result(folder, result, last.why)
    return result
