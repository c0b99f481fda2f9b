"""One run, from its config to its last checkpoint.

agreement  every process of the job has the same config, code and data
build      data, program, timetable, evaluations; nothing is compiled or written yet
origin     what a new run is to start from, if the config names another's checkpoint
restore    the newest valid checkpoint, or that start, or a fresh state
loop       next batch -> step -> when due: log, evaluate, save: `loop`
"""

from __future__ import annotations

import pathlib
from collections.abc import Sequence

import jax
from ml_collections import ConfigDict

from vit_jax.checkpoints.checkpointer import Checkpointer
from vit_jax.errors import UserError
from vit_jax.runtime import processes
from vit_jax.runtime.preemption import Preemption
from vit_jax.runtime.watchdog import Watchdog
from vit_jax.storage import lock, paths, run_folder
from vit_jax.trainer import agreement, broken_records, extension, workdir
from vit_jax.trainer import build as build_lib
from vit_jax.trainer.describe import describe
from vit_jax.trainer.loop import Preempted, Pruned, Report, Surroundings, loop
from vit_jax.trainer.origin import find_origin, write_history
from vit_jax.trainer.ownership import Ownership
from vit_jax.trainer.profile import Profile, Window
from vit_jax.trainer.save import write_config, write_result
from vit_jax.trainer.start import check_stop, restore
from vit_jax.trainer.writer import Writer

__all__ = ['Preempted', 'Pruned', 'Report', 'Window', 'train']


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
) -> dict[str, float]:
    """Trains to the end, resuming whatever is in `folder`.

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

    Returns:
      The final evaluation, {name: value}, and the number of broken records if there were any. A run
      that `config.early_stop` has ended is complete.

    Raises:
      UserError: for a mistake in the config or the folder, or if processes of the job differ in
        their config, code or data.
      Diverged: if the loss is not finite; the last good checkpoint stands.
      Preempted: after SIGTERM, SIGINT, SIGHUP, at `stop_at` or if the metrics can no longer be
        written; the state is saved.
      Pruned: if `report` said so before the last step.
    """
    folder = paths.absolute(folder)
    processes.require_alike(agreement.of_start(config, stop_at, restart, extend))
    result = workdir.finished(config, folder, extend)
    anew = restart and not workdir.intact(folder)
    if result is not None and not anew:
        if profile:
            raise UserError(f'--profile: {folder} is complete; give another --workdir')
        return result
    paths.require_writable(folder)
    training = build_lib.build(config, devices)
    processes.require_alike(agreement.of_data(training.data))
    workdir.check_data(training, folder)
    existed = folder.is_dir()
    if anew:
        with lock.lock(folder):
            workdir.set_aside(folder)
    begun = workdir.begun(folder)
    origin = None if begun else find_origin(training, allowed)
    with (
        lock.lock(folder) as held,
        workdir.traceless(folder, existed),
        Preemption() as preemption,
        Watchdog(step_timeout) as watchdog,
        Checkpointer(folder / run_folder.CHECKPOINTS, **training.retention) as checkpointer,
    ):
        beginning = restore(training, checkpointer, origin, allowed, strict)
        training.data.source.note(beginning.broken)
        check_stop(stop_at, beginning.step)
        steps = profile.steps(beginning.step, training.timetable.total) if profile else range(0)
        notes = workdir.replaced(training, folder)
        if extend:
            notes += extension.note(training, folder, beginning.step)
        with paths.writing(folder):
            if origin is not None and beginning.step == origin.step:
                notes += origin.notes
                write_history(folder, origin)
            del origin  # frees the memory
            if extend:
                extension.forget_result(folder)
            write_config(training, folder)
            writer = Writer(
                folder,
                training.timetable.total,
                beginning.step,
                training.data.unit,
                training.config.to_dict(),
                failed=preemption.request,
                held=held,
            )
        surroundings = Surroundings(
            checkpointer,
            writer,
            watchdog,
            told=preemption.reached,
            stop_at=stop_at,
            report=report or (lambda step, results: False),
            profile=Profile(folder, steps, writer.say),
            require_own=Ownership(training, folder, held, writer.say).require,
        )
        try:
            writer.say('\n'.join((describe(training, folder, beginning), *notes)))
            last = loop(training, beginning, surroundings)
            result = last.results | broken_records.counts(training)
            if writer.trouble:
                raise Preempted(f'{writer.trouble}; the state is saved')
            if last.why:
                writer.say(last.why)
            write_result(folder, result, last.why)
            return result
        finally:
            surroundings.profile.close()
            writer.close()
