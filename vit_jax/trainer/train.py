"""One run, from its config to its last checkpoint.

alike     every process of the job has the same config, code and data
build     data, program, timetable, evaluations; nothing is compiled or written yet
start     what a new run is to start from, if the config names another's checkpoint
restore   the newest valid checkpoint, or that start, or a fresh state
loop      next batch -> step -> when due: log, evaluate, save
"""

from __future__ import annotations

import dataclasses
import json
import pathlib
from collections.abc import Callable, Sequence

import jax
from ml_collections import ConfigDict

from vit_jax import step as step_lib
from vit_jax.checkpoints.checkpointer import Checkpointer
from vit_jax.config import load as config_lib
from vit_jax.profiling import benchmark, flops
from vit_jax.runtime import processes
from vit_jax.runtime.preemption import Preemption
from vit_jax.runtime.watchdog import Watchdog
from vit_jax.storage import lock, paths, run_folder
from vit_jax.trainer import alike
from vit_jax.trainer import build as build_lib
from vit_jax.trainer import start as start_lib
from vit_jax.trainer.build import Training
from vit_jax.trainer.meter import Meter
from vit_jax.trainer.writer import Writer


class Preempted(Exception):
    """The run was told to stop; its state is saved."""


class Pruned(Exception):
    """`report` ended the run before its last step."""


Report = Callable[[int, dict[str, float]], bool]


@dataclasses.dataclass(frozen=True)
class Surroundings:
    """What the loop tells of its progress, and what tells it to stop.

    Attributes:
      checkpointer: of the run folder.
      writer: what people see.
      watchdog: ends a process in which nothing is finished any more.
      stopping: whether to save and stop after this step.
      report: whether to end the run after these results.
    """

    checkpointer: Checkpointer
    writer: Writer
    watchdog: Watchdog
    stopping: Callable[[int], bool]
    report: Report


def train(
    config: ConfigDict,
    folder: str | pathlib.Path,
    *,
    stop_at: int | None = None,
    restart: bool = False,
    devices: Sequence[jax.Device] | None = None,
    report: Report | None = None,
    step_timeout: float | None = None,
    allowed: Sequence[str] = (),
) -> dict[str, float]:
    """Trains to the end, resuming whatever is in `folder`.

    Args:
      config: as from `config.load`.
      folder: the run folder; made if missing.
      stop_at: save and stop after this step, as if preempted there.
      restart: start anew if no intact checkpoint is left of the run; what there was is moved to
        `checkpoints/rejected/`. A run that has one resumes, so that whatever starts the same
        command again loses nothing.
      devices: all by default.
      report: gets the step and the results whenever evaluations were due, on every process; what it
        returns says whether the run ends there.
      step_timeout: seconds, see `Watchdog`.
      allowed: modules that the config of a run may name which this one starts from.

    Returns:
      The final evaluation, {name: value}.

    Raises:
      UserError: for a mistake in the config or the folder, or if processes of the job differ in
        their config, code or data.
      Diverged: if the loss is not finite; the last good checkpoint stands.
      Preempted: after SIGTERM, SIGINT or at `stop_at`; the state is saved.
      Pruned: if `report` said so before the last step.
    """
    folder = paths.absolute(folder)
    processes.require_alike(alike.of_start(config, stop_at, restart))
    result = start_lib.finished(config, folder)
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
        state, start, hardware_before = start_lib.restore(training, checkpointer, origin, allowed)
        start_lib.check_stop(stop_at, start)
        notes = start_lib.replaced(training, folder)
        if origin is not None and start == origin.step:
            notes += origin.notes
            start_lib.write_history(folder, origin)
        del origin  # frees the memory
        write_config(training, folder)
        writer = Writer(folder, training.timetable.total, start, training.data.unit)
        surroundings = Surroundings(
            checkpointer,
            writer,
            watchdog,
            stopping=lambda step: preemption.reached() or step == stop_at,
            report=report or (lambda step, results: False),
        )
        try:
            writer.say('\n'.join((describe(training, folder, start, hardware_before), *notes)))
            result = loop(training, state, start, surroundings)
            if jax.process_index() == 0:
                paths.write_text_atomic(folder / run_folder.RESULT, json.dumps(result) + '\n')
            return result
        finally:
            writer.close()


def loop(
    training: Training, state: step_lib.TrainState, start: int, surroundings: Surroundings
) -> dict[str, float]:
    """Steps `start` to the end; see the module's docstring."""
    program, timetable = training.program, training.timetable
    checkpointer, writer, total = surroundings.checkpointer, surroundings.writer, timetable.total
    meter = Meter(start, timetable.lr, utilisation(training), program.max_skips)
    batches = training.data.train_batches(start)
    results = evaluate_due(training, state, start) if start == total else {}
    for step in range(start + 1, total + 1):
        with meter.waiting():
            batch = next(batches)
        meter.count(training.data.count(batch))
        state, metrics = program.train_step(state, program.layout.put_batch(batch))
        meter.add(step, metrics)
        writer.progress(step)
        checkpointer.check()
        stopping = surroundings.stopping(step)
        surroundings.watchdog.beat(f'step {step}')
        if due(step, timetable.log, total) or stopping:
            logged = meter.log()
            writer.write(step, logged)
            writer.show_train(step, logged)
        if due_evals(training, step):
            with meter.paused():
                results = evaluate_due(training, state, step)
                writer.write(step, {**results, **signatures(training, step)})
                writer.show_eval(step, results)
                writer.draw()
            surroundings.watchdog.beat(f'the evaluation after step {step}')
            if surroundings.report(step, results) and step < total:
                raise Pruned(f'ended after step {step}/{total}')
        if due(step, timetable.checkpoint, total) or stopping:
            with meter.paused():
                meter.check_finite()
                writer.flush()
                save(training, checkpointer, step, state)
            surroundings.watchdog.beat(f'the save of step {step}')
        if stopping and step < total:
            checkpointer.wait()
            raise Preempted(f'stopped after step {step}/{total}; the state is saved')
    checkpointer.wait()
    return results


def due(step: int, every: int, total: int) -> bool:
    """The one predicate for log, evaluate and save: every so often, and at the end."""
    return step == total or (every > 0 and step % every == 0)


def due_evals(training: Training, step: int) -> list[str]:
    """The entries of `config.evals` that are due after `step`."""
    timetable = training.timetable
    return [name for name, every in timetable.evals.items() if due(step, every, timetable.total)]


def evaluate_due(training: Training, state: step_lib.TrainState, step: int) -> dict[str, float]:
    """The results of all evaluations that are due after `step`: {'test/accuracy': ...}."""
    results: dict[str, float] = {}
    for name in due_evals(training, step):
        found = training.evaluations[name](state.variables)
        results |= {f'{name}/{k}': v for k, v in found.items()}
    return results


def signatures(training: Training, step: int) -> dict[str, str]:
    """How the numbers of the evaluations after `step` are made, of those that say so."""
    every = {name: training.evaluations[name].signature for name in due_evals(training, step)}
    return {f'{name}/signature': signature for name, signature in every.items() if signature}


def save(
    training: Training, checkpointer: Checkpointer, step: int, state: step_lib.TrainState
) -> None:
    """Starts an asynchronous save of everything that a resumed run needs."""
    program = training.program
    meta = {
        'config': training.config.to_dict(),
        'data': {'step': step},
        'hardware': program.hardware,
        **training.data.facts(),
    }
    checkpointer.save(step, program.layout.to_global(state), meta)


def write_config(training: Training, folder: pathlib.Path) -> None:
    """Puts the config, and what the data need beside it, into the run folder; on process 0."""
    if jax.process_index() == 0:
        paths.write_text_atomic(folder / run_folder.CONFIG, config_lib.to_json(training.config))
        training.data.save(folder)


def utilisation(training: Training) -> Callable[[float], float | None]:
    """Steps a second -> model FLOPs utilisation; None where the chip's peak is not known."""
    program = training.program
    mesh = program.layout.mesh
    kind = mesh.devices.flat[0].device_kind
    if flops.peak_flops(kind) is None:
        return lambda rate: None
    forward = sum(
        shape.rows * shape.share * benchmark.forward_flops(program.model, program.task, shape.spec)
        for shape in training.data.shapes
    )
    return lambda rate: flops.mfu(flops.TRAIN_TO_FORWARD * forward * rate, 1.0, mesh.size, kind)


def describe(training: Training, folder: pathlib.Path, start: int, hardware_before: str) -> str:
    """What runs and where, a few lines."""
    data, hardware = training.data, training.program.hardware
    count = sum(x.size for x in jax.tree.leaves(training.program.abstract_state.params))
    lines = [
        f'{training.config.model.name}: {count:,} parameters, {data.num_examples:,} examples, '
        f'{training.timetable.total:,} steps of {data.batch_size} {data.unit} on {hardware}',
        *data.notes,
        f'{f"resumes after step {start}" if start else "starts"} in {folder}',
    ]
    if hardware_before != hardware:
        lines.append(
            f'so far on {hardware_before}: the examples stay the same, numbers agree up to rounding'
        )
    signed = {name: e.signature for name, e in training.evaluations.items()}
    return '\n'.join([*lines, *(f'{name}: {text}' for name, text in signed.items() if text)])
