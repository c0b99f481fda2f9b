"""The loop of a run: next batch -> step -> when due: log, evaluate, save."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

from vit_jax import step as step_lib
from vit_jax.checkpoints.checkpointer import Checkpointer
from vit_jax.runtime.watchdog import Watchdog
from vit_jax.trainer import broken_records, profile
from vit_jax.trainer.build import Training
from vit_jax.trainer.describe import utilisation
from vit_jax.trainer.due import due, due_evals, due_examples, evaluate_due, signatures
from vit_jax.trainer.evaluate import Interrupted
from vit_jax.trainer.judge import Bests, is_best
from vit_jax.trainer.meter import Meter
from vit_jax.trainer.profile import Profile
from vit_jax.trainer.save import save
from vit_jax.trainer.start import Beginning
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
      why: why they end it before its last step; empty if they do not.
    """

    results: dict[str, float]
    bests: Bests
    pruned: bool = False
    why: str = ''


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
      profile: of some of the steps.
      require_own: raises UserError if the folder is no longer this run's to write to.
    """

    checkpointer: Checkpointer
    writer: Writer
    watchdog: Watchdog
    told: Callable[[], bool]
    stop_at: int | None
    report: Report
    profile: Profile
    require_own: Callable[[], None]


def loop(training: Training, beginning: Beginning, surroundings: Surroundings) -> Evaluated:
    """Steps from the beginning to the end.

    Raises:
      Diverged: if the loss is not finite.
      Preempted: if the run was told to stop.
      Pruned: if `report` ends it before its last step.
    """
    program, timetable, judge = training.program, training.timetable, training.judge
    checkpointer, writer, total = surroundings.checkpointer, surroundings.writer, timetable.total
    state, start, tracer = beginning.state, beginning.step, surroundings.profile
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
        tracer.before(step, meter)
        with meter.waiting(), tracer.part(profile.DATA):
            batch = next(batches)
        meter.count(training.data.count(batch))
        with tracer.part(profile.START):
            state, metrics = program.train_step(state, program.layout.put_batch(batch))
        with tracer.part(profile.DEVICES):
            meter.add(step, metrics)
        tracer.after(step, meter)
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
                surroundings.require_own()
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
    judge, last = training.judge, step == training.timetable.total
    try:
        results = evaluate_due(training, state, names, told)
        if not known:
            bests = judge.after(bests, step, results)
        if early := judge.has_ended(bests):
            rest = [name for name in training.evaluations if name not in names]
            results |= evaluate_due(training, state, rest, told)
            names += rest
    except Interrupted:
        return None
    why = '' if last else judge.reason(bests)
    if known:
        return Evaluated(results, bests, why=why)
    writer.write(step, {**results, **signatures(training, names)})
    writer.show_eval(step, results)
    writer.draw()
    surroundings.watchdog.beat(f'the evaluation after step {step}')
    ends = early or last
    if due_examples(training, step, names, ends):
        assert training.examples is not None
        steps = training.program.eval_steps
        training.examples.show(steps, state.variables, step, writer)
        surroundings.watchdog.beat(f'the examples shown after step {step}')
    pruned = surroundings.report(step, results) and not ends
    return Evaluated(results, bests, pruned, why)
