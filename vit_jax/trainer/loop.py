"""The loop of a run: next batch -> step -> when due: log, evaluate, save."""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Iterator, Sequence
from typing import Any, NoReturn

import jax
from jax.profiler import StepTraceAnnotation

from vit_jax.checkpoints.best import KEPT
from vit_jax.checkpoints.checkpointer import Checkpointer
from vit_jax.data.batches import Batch
from vit_jax.data.dataset import Dataset
from vit_jax.runtime import processes
from vit_jax.runtime.watchdog import Interrupted, Stopping
from vit_jax.step import TrainState
from vit_jax.storage import times
from vit_jax.trainer import evaluate
from vit_jax.trainer.build import Training
from vit_jax.trainer.early_stopping import Bests
from vit_jax.trainer.guards import Guard
from vit_jax.trainer.meter import (
    STARTING_THE_STEP,
    WAITING_FOR_DATA,
    WAITING_FOR_DEVICES,
    Meter,
)
from vit_jax.trainer.start import ResumePoint, utilization
from vit_jax.trainer.workdir import save
from vit_jax.trainer.writer import Writer


class Preempted(Exception):
    """A stop was requested; the state is saved."""


class Pruned(Exception):
    """`report` ended the run before its last step."""


class Verdict(enum.Enum):
    """Whether a run continues after evaluations."""

    GO_ON = 'go on'
    INTERRUPTED = 'a stop was requested before they were finished'
    PRUNED = 'report ends the run'
    ENDED = 'early stopping ends the run'


STOPS = (Verdict.INTERRUPTED, Verdict.PRUNED)  # another start may continue the run


@dataclasses.dataclass(frozen=True)
class Evaluated:
    """The evaluations after a step.

    Attributes:
      results: {'test/accuracy': ...}.
      bests: the best results so far, these included.
      verdict: whether the run continues.
      why: the reason for an early end; empty without one.
    """

    results: dict[str, float]
    bests: Bests
    verdict: Verdict = Verdict.GO_ON
    why: str = ''


def run_loop(training: Training, point: ResumePoint, hooks: Guard) -> Evaluated:
    """Take the steps from the resume point to the end.

    Raises:
      Diverged: if the loss is not finite.
      Preempted: if a stop was requested.
      Pruned: if `report` ends it before its last step.
    """
    timetable, start, state = training.timetable, point.step, point.state
    total, clock = timetable.total, hooks.clock
    max_skips = training.program.max_skips
    lr = jax.jit(timetable.lr)  # one program instead of one for each operation
    last = evaluate_first(training, point, hooks)
    if last.verdict is Verdict.ENDED:
        return last
    batches = training.data.train_batches(start, hooks.preemption.reached, total)
    clock.enter(times.COMPILE)
    apart = training.program.layout.mesh.devices.flat[0].platform != 'cpu'
    meter = Meter(start, lr, utilization(training), max_skips, clock, apart)
    for step in range(start + 1, total + 1):
        try:
            state = take_step(training, state, batches, step, meter, hooks)
        except Interrupted:
            stop_waiting(training, state, step - 1, meter, hooks, last)
        stopping = hooks.preemption.reached() or step == hooks.options.stop_at
        hooks.watchdog.beat(f'step {step}')
        if due(step, timetable.log, total) or stopping:
            log(training, step, meter, hooks.writer)
        if due_evals(training, step):
            with meter.paused(), clock.during(times.EVALUATION):
                last = evaluate_step(training, state, step, hooks, last.bests)
        # A run that `report` ends may be resumed later.
        stopping = stopping or last.verdict in STOPS
        ending = last.verdict is Verdict.ENDED
        if stopping or ending or due_save(training, step, last.bests, hooks.checkpointer):
            with meter.paused(), clock.during(times.SAVING):
                meter.check_finite()
                save_state(training, state, step, hooks, last)
        if ending:
            break
        if last.verdict in STOPS or (stopping and step < total):
            stop(last.verdict, step, total, hooks)
    clock.enter(times.SAVING)
    hooks.checkpointer.wait()
    return last


def stop_waiting(
    training: Training,
    state: TrainState,
    step: int,
    meter: Meter,
    hooks: Guard,
    last: Evaluated,
) -> NoReturn:
    """Save the state after `step` while the next one waits for data; raise Preempted."""
    if meter.steps:
        log(training, step, meter, hooks.writer)
    hooks.clock.enter(times.SAVING)
    meter.check_finite()
    save_state(training, state, step, hooks, last)
    why = 'the training data had stalled'
    raise Preempted(end_of_stop(step, training.timetable.total, hooks, why))


def evaluate_first(training: Training, point: ResumePoint, hooks: Guard) -> Evaluated:
    """Run the evaluations of the step at which the run resumes, if any are left."""
    start, total, bests = point.step, training.timetable.total, point.bests
    if not (point.unevaluated or start == total or training.judge.has_ended(bests)):
        return Evaluated({}, bests)
    known = not point.unevaluated
    with hooks.clock.during(times.EVALUATION):
        last = evaluate_step(training, point.state, start, hooks, bests, known)
    if last.verdict in STOPS:
        stop(last.verdict, start, total, hooks)
    return last


def stop(verdict: Verdict, step: int, total: int, hooks: Guard) -> NoReturn:
    """Raise Pruned or Preempted once the state after `step` is saved."""
    if verdict is Verdict.PRUNED:
        raise Pruned(f'ended after step {step}/{total}')
    hooks.clock.enter(times.SAVING)
    raise Preempted(end_of_stop(step, total, hooks))


def end_of_stop(step: int, total: int, hooks: Guard, why: str = '') -> str:
    """Wait until the state after `step` is saved; return the last line of a run that stops there.

    Args:
      step, total: the last step taken, and the last one of a complete run.
      hooks: of the run.
      why: the reason for an unusual stop, such as stalled data.
    """
    hooks.checkpointer.wait()
    reasons = ''.join(f'{reason}: ' for reason in (hooks.writer.trouble, why) if reason)
    return f'{reasons}stopped after step {step}/{total}; the state is saved'


def take_step(
    training: Training,
    state: TrainState,
    batches: Iterator[Batch],
    step: int,
    meter: Meter,
    hooks: Guard,
) -> TrainState:
    """Update the state by the next batch; `meter` gets the metrics once the devices have them."""
    program, profile = training.program, hooks.profile
    if profile is not None and step in profile.steps:
        profile.before(step, meter)
    with meter.waiting(), meter.part(WAITING_FOR_DATA):
        batch = next(batches)
    # TensorBoard identifies the steps of a trace by their annotation.
    annotation = StepTraceAnnotation('train', step_num=step)
    with annotation, meter.part(STARTING_THE_STEP), meter.starting():
        state, metrics = program.train_step(state, program.layout.put_batch(batch))
    hooks.clock.stepped(step)
    with meter.part(WAITING_FOR_DEVICES):
        meter.add(step, metrics, training.data.count(batch))
    if profile is not None and step in profile.steps:
        profile.after(step, meter)
    hooks.writer.progress(step)
    hooks.checkpointer.check()
    return state


def log(training: Training, step: int, meter: Meter, writer: Writer) -> None:
    """Write the means of the steps since the last call."""
    seen = {f'train/{name}/seen': share for name, share in training.data.seen(step).items()}
    means: dict[str, Any] = {**meter.log(), **seen}
    writer.write(step, means)
    writer.show_train(step, means)
    share_broken_records(training.data)


def evaluate_step(
    training: Training,
    state: TrainState,
    step: int,
    hooks: Guard,
    bests: Bests,
    known: bool = False,
) -> Evaluated:
    """Run the evaluations that are due after `step`, judge, write and report them.

    If the results end the run early, all other evaluations are due as well. If they are `known`, an
    earlier start has judged, written and reported them; `bests` are the best results before.
    """
    names, judge = due_evals(training, step), training.judge
    try:
        results = evaluate_due(training, state, names, hooks.preemption.reached)
        after = bests if known else judge.after(bests, step, results)
        if early := judge.has_ended(after):
            rest = [name for name in training.evaluations if name not in names]
            results |= evaluate_due(training, state, rest, hooks.preemption.reached)
            names += rest
    except Interrupted:
        return Evaluated({}, bests, Verdict.INTERRUPTED)
    over = step == training.timetable.total
    verdict, why = Verdict.ENDED if early else Verdict.GO_ON, '' if over else judge.reason(after)
    if not known:
        show(training, state, step, hooks, names, results, early or over)
        if hooks.options.report and hooks.options.report(step, results) and not (early or over):
            verdict = Verdict.PRUNED
    return Evaluated(results, after, verdict, why)


def save_state(
    training: Training,
    state: TrainState,
    step: int,
    hooks: Guard,
    last: Evaluated,
) -> None:
    """Flush the logs to the folder, then start saving the state after `step`."""
    hooks.writer.flush()
    hooks.require_own_folder(training)
    unevaluated = last.verdict is Verdict.INTERRUPTED
    save(training, hooks.checkpointer, step, state, last.bests, unevaluated=unevaluated)
    hooks.clock.mark()
    hooks.watchdog.beat(f'the save of step {step}')


def show(
    training: Training,
    state: TrainState,
    step: int,
    hooks: Guard,
    names: list[str],
    results: dict[str, float],
    ends: bool,
) -> None:
    """Write results, and examples if due; `ends` if no further results follow."""
    writer = hooks.writer
    signatures = {f'{name}/signature': training.evaluations[name].signature for name in names}
    writer.write(step, {**results, **{name: text for name, text in signatures.items() if text}})
    headlines = {name: training.evaluations[name].headline for name in names}
    writer.show_eval(step, evaluate.line(headlines, results))
    writer.draw()
    hooks.watchdog.beat(f'the evaluation after step {step}')
    if due_examples(training, step, names, ends):
        assert training.examples is not None
        training.examples.show(training.program.eval_steps, state.variables, step, writer)
        hooks.watchdog.beat(f'the examples shown after step {step}')


def due(step: int, every: int, total: int) -> bool:
    """Whether to log, evaluate or save: every `every` steps, and at the end."""
    return step == total or (every > 0 and step % every == 0)


def due_save(training: Training, step: int, bests: Bests, checkpointer: Checkpointer) -> bool:
    """Whether to save the state after `step`: if scheduled, to be kept, or after a lost save.

    `bests` are the results up to `step`.
    """
    timetable = training.timetable
    is_best = KEPT in bests and bests[KEPT].step == step
    kept = step in checkpointer.keep_steps or is_best or checkpointer.is_lost
    return kept or due(step, timetable.checkpoint, timetable.total)


def due_evals(training: Training, step: int) -> list[str]:
    """The entries of `config.evals` that are due after `step`."""
    timetable = training.timetable
    return [name for name, every in timetable.evals.items() if due(step, every, timetable.total)]


def due_examples(training: Training, step: int, names: Sequence[str], last: bool) -> bool:
    """Whether examples are due with the results of these evaluations.

    `last` says whether the results end the run.
    """
    timetable, examples = training.timetable, training.examples
    if examples is None or not timetable.examples or examples.entry not in names:
        return False
    every = timetable.evals[examples.entry]
    before = (step - 1) // every * every if every else 0
    return last or step // timetable.examples > before // timetable.examples


def evaluate_due(
    training: Training,
    state: TrainState,
    names: Sequence[str],
    stop_requested: Stopping,
) -> dict[str, float]:
    """The results of the evaluations that are due: {'test/accuracy': ...}.

    Raises:
      Interrupted: if a stop is requested between two batches or while waiting for one.
    """
    now = {name: training.evaluations[name] for name in names}
    results = evaluate.run(training.program.eval_steps, now, state.variables, stop_requested)
    for one in now.values():
        share_broken_records(one.data)
    return results


def share_broken_records(data: Dataset) -> None:
    """Share with every process the broken records that the others have found.

    Raises:
      UserError: on every process, if there are too many in total.
    """
    for found in processes.gather(list(data.source.pop_broken().items())):
        data.source.record_broken(dict(found))


def count_broken_records(training: Training) -> dict[str, float]:
    """The number of broken records of each data set that has any."""
    opened = {'train': training.data, **{k: e.data for k, e in training.evaluations.items()}}
    counts = {name: len(data.source.broken) for name, data in opened.items()}
    return {f'{name}/broken_records': float(count) for name, count in counts.items() if count}
