"""One run, from its config to its last checkpoint.

alike     every process of the job has the same config, code and data
build     data, program, timetable, evaluations; nothing is compiled or written yet
start     what a new run is to start from, if the config names another's checkpoint
restore   the newest valid checkpoint, or that start, or a fresh state
loop      next batch -> step -> when due: log, evaluate, save
"""

from __future__ import annotations

import dataclasses
import pathlib
from collections.abc import Callable, Sequence

import jax
from ml_collections import ConfigDict

from vit_jax import step as step_lib
from vit_jax.checkpoints.checkpointer import Checkpointer
from vit_jax.runtime import processes
from vit_jax.runtime.preemption import Preemption
from vit_jax.runtime.watchdog import Watchdog
from vit_jax.storage import lock, paths, run_folder
from vit_jax.trainer import alike, broken_records, extension
from vit_jax.trainer import build as build_lib
from vit_jax.trainer import start as start_lib
from vit_jax.trainer.build import Training
from vit_jax.trainer.describe import describe, utilisation
from vit_jax.trainer.due import due, due_evals, evaluate_due, signatures
from vit_jax.trainer.evaluate import Interrupted
from vit_jax.trainer.judge import Bests, is_best
from vit_jax.trainer.meter import Meter
from vit_jax.trainer.save import save, write_config, write_result
from vit_jax.trainer.writer import Writer


class Preempted(Exception):
    """The run was told to stop; its state is saved."""


class Pruned(Exception):
    """`report` ended the run before its last step."""


@dataclasses.dataclass(frozen=True)
class Evaluated:
    """What the evaluations after a step came to.

    Attributes:
      results: {'test/accuracy': ...}.
      bests: the best results so far, these included.
      pruned: whether `report` ends the run.
    """

    results: dict[str, float]
    bests: Bests
    pruned: bool = False


Report = Callable[[int, dict[str, float]], bool]


@dataclasses.dataclass(frozen=True)
class Surroundings:
    """What the loop tells of its progress, and what tells it to stop.

    Attributes:
      checkpointer: of the run folder.
      writer: what people see.
      watchdog: ends a process in which nothing is finished any more.
      told: whether the run was told to stop.
      stop_at: the step after which it stops anyhow, if any.
      report: whether to end the run after these results.
    """

    checkpointer: Checkpointer
    writer: Writer
    watchdog: Watchdog
    told: Callable[[], bool]
    stop_at: int | None
    report: Report


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
    processes.require_alike(alike.of_start(config, stop_at, restart, extend))
    result = start_lib.finished(config, folder, extend)
    anew = restart and not start_lib.intact(folder)
    if result is not None and not anew:
        return result
    paths.require_writable(folder)
    training = build_lib.build(config, devices)
    processes.require_alike(alike.of_data(training.data))
    start_lib.check_data(training, folder)
    existed = folder.is_dir()
    if anew:
        with lock.lock(folder):
            start_lib.set_aside(folder)
    begun = start_lib.begun(folder)
    origin = None if begun else start_lib.find_origin(training, allowed)
    with (
        lock.lock(folder),
        start_lib.traceless(folder, existed),
        Preemption() as preemption,
        Watchdog(step_timeout) as watchdog,
        Checkpointer(folder / run_folder.CHECKPOINTS, **training.retention) as checkpointer,
    ):
        beginning = start_lib.restore(training, checkpointer, origin, allowed, strict)
        training.data.examples.note(beginning.broken)
        start_lib.check_stop(stop_at, beginning.step)
        notes = start_lib.replaced(training, folder)
        if extend:
            notes += extension.note(training, folder, beginning.step)
        with paths.writing(folder):
            if origin is not None and beginning.step == origin.step:
                notes += origin.notes
                start_lib.write_history(folder, origin)
            del origin  # frees the memory
            if extend:
                extension.forget_result(folder)
            write_config(training, folder)
            writer = Writer(
                folder,
                training.timetable.total,
                beginning.step,
                training.data.unit,
                failed=preemption.request,
            )
        surroundings = Surroundings(
            checkpointer,
            writer,
            watchdog,
            told=preemption.reached,
            stop_at=stop_at,
            report=report or (lambda step, results: False),
        )
        try:
            writer.say('\n'.join((describe(training, folder, beginning), *notes)))
            last = loop(training, beginning, surroundings)
            result = last.results | broken_records.counts(training)
            if writer.trouble:
                raise Preempted(f'{writer.trouble}; the state is saved')
            if why := training.judge.reason(last.bests):
                writer.say(why)
            write_result(folder, result, why)
            return result
        finally:
            writer.close()


def loop(
    training: Training, beginning: start_lib.Beginning, surroundings: Surroundings
) -> Evaluated:
    """Steps from the beginning to the end; see the module's docstring."""
    program, timetable, judge = training.program, training.timetable, training.judge
    checkpointer, writer, total = surroundings.checkpointer, surroundings.writer, timetable.total
    state, start = beginning.state, beginning.step
    meter = Meter(start, timetable.lr, utilisation(training), program.max_skips)
    batches = training.data.train_batches(start)
    last: Evaluated | None = Evaluated({}, beginning.bests)
    bests = beginning.bests
    if beginning.unevaluated or start == total or judge.has_ended(bests):
        known = not beginning.unevaluated
        last = evaluate_and_tell(training, state, start, surroundings, bests, known)
        if last is None:
            raise Preempted(f'stopped after step {start}/{total}; the state is saved')
        if last.pruned:
            raise Pruned(f'ended after step {start}/{total}')
        if judge.has_ended(bests := last.bests):
            return last
    for step in range(start + 1, total + 1):
        with meter.waiting():
            batch = next(batches)
        meter.count(training.data.count(batch))
        state, metrics = program.train_step(state, program.layout.put_batch(batch))
        meter.add(step, metrics)
        writer.progress(step)
        checkpointer.check()
        stopping = surroundings.told() or step == surroundings.stop_at
        surroundings.watchdog.beat(f'step {step}')
        if due(step, timetable.log, total) or stopping:
            logged = meter.log()
            writer.write(step, logged)
            writer.show_train(step, logged)
            broken_records.share(training.data)
        ending = False
        if due_evals(training, step):
            with meter.paused():
                last = evaluate_and_tell(training, state, step, surroundings, bests)
            bests = last.bests if last else bests
            ending = judge.has_ended(bests)
        stopping = stopping or last is None
        saving = stopping or ending or is_best(bests, step)
        if due(step, timetable.checkpoint, total) or saving:
            with meter.paused():
                meter.check_finite()
                writer.flush()
                save(training, checkpointer, step, state, bests, unevaluated=last is None)
            surroundings.watchdog.beat(f'the save of step {step}')
        if last is not None and last.pruned:
            raise Pruned(f'ended after step {step}/{total}')
        if ending:
            break
        if last is None or (stopping and step < total):
            checkpointer.wait()
            why = f'{writer.trouble}: ' if writer.trouble else ''
            raise Preempted(f'{why}stopped after step {step}/{total}; the state is saved')
    checkpointer.wait()
    assert last is not None
    return last


def evaluate_and_tell(
    training: Training,
    state: step_lib.TrainState,
    step: int,
    surroundings: Surroundings,
    bests: Bests,
    known: bool = False,
) -> Evaluated | None:
    """What is due after `step`, written and reported; None if the run was told to stop meanwhile.

    Where the results end the run early, all other evaluations are due as well.

    Args:
      training: of the run.
      state: after `step`.
      step: the number of updates made.
      surroundings: of the loop.
      bests: the best results before.
      known: whether an earlier start has judged, written and reported it.
    """
    writer, told, names = surroundings.writer, surroundings.told, due_evals(training, step)
    try:
        results = evaluate_due(training, state, names, told)
        if not known:
            bests = training.judge.after(bests, step, results)
        if early := training.judge.has_ended(bests):
            rest = [name for name in training.evaluations if name not in names]
            results |= evaluate_due(training, state, rest, told)
            names += rest
    except Interrupted:
        return None
    if known:
        return Evaluated(results, bests)
    writer.write(step, {**results, **signatures(training, names)})
    writer.show_eval(step, results)
    writer.draw()
    surroundings.watchdog.beat(f'the evaluation after step {step}')
    pruned = surroundings.report(step, results) and step < training.timetable.total and not early
    return Evaluated(results, bests, pruned)
