"""Loop of a run: next batch -> step -> when due: log, evaluate, draw, save, stop."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple

import jax

from vit_jax.checkpoints.best import KEPT
from vit_jax.data.dataset import Dataset
from vit_jax.runtime import memory, processes
from vit_jax.runtime.watchdog import Interrupted, Stopping
from vit_jax.step import TrainState
from vit_jax.storage import times
from vit_jax.trainer import evaluate
from vit_jax.trainer.build import Training
from vit_jax.trainer.guards import Guard
from vit_jax.trainer.meter import Meter
from vit_jax.trainer.remarks import Remarks
from vit_jax.trainer.start import ResumePoint, utilization
from vit_jax.trainer.workdir import save


class Ended(Exception):
    """Why a run ends; raised once its state is saved."""


class Complete(Ended):
    """Goal of `config.early_stop` is reached; the message is the reason, if steps were left."""


class Preempted(Ended):
    """A stop was requested; the state is saved."""


class Pruned(Ended):
    """`report` ended the run before its last step."""


class Outcome(NamedTuple):
    """End of a complete run.

    Attributes:
      results: Final evaluation, {'test/accuracy': ...}.
      why: Reason for an early end; empty without one.
    """

    results: dict[str, float]
    why: str = ''


class Loop:
    """Takes the steps of a run, and after each of them the actions that are due.

    Args:
      training: Run to train.
      point: State at which it starts or resumes.
      guard: Guard of its folder, with its clock, checkpoints and metrics.

    Attributes:
      state: State after `step`.
      step: Number of steps taken.
      bests: Best results so far.
      results: Results of the newest evaluations.
      evaluated: Names of the evaluations just run, whose results are not yet drawn or reported.
      unevaluated: Whether a stop interrupted the evaluations after `step`.
      ending: What ends the run, once decided.
      actions: Actions after each step, in their order.
      remarks: Lines about an unusual run.
    """

    def __init__(self, training: Training, point: ResumePoint, guard: Guard):
        self.training, self.guard, self.total = training, guard, training.timetable.total
        self.state, self.step, self.bests = point.state, point.step, point.bests
        self.results: dict[str, float] = {}
        self.evaluated: list[str] = []
        self.unevaluated = False
        self.ending: Ended | None = None
        guard.clock.enter(times.COMPILE)
        lr = jax.jit(training.program.lr)  # one program instead of one for each operation
        mesh, skips = training.program.layout.mesh, training.program.max_skips
        on_chips = mesh.devices.flat[0].platform != 'cpu'
        self.meter = Meter(
            self.step,
            lr,
            utilization=utilization(training) if on_chips else None,
            max_skips=skips,
            clock=guard.clock,
            has_own_cores=on_chips,
        )
        self.remarks = Remarks(training)
        stopping = guard.preemption.should_stop
        self.batches = training.data.train_batches(self.step, stopping, self.total)
        self._resumes_unevaluated, self._judged_step = point.unevaluated, point.step
        self.actions: list[Callable[[], object]] = [self.log, self.evaluate, self.draw]
        for callback in guard.options.callbacks:
            self.actions.append(functools.partial(callback, self))
        self.actions += [self.save, self.stop]

    def run(self) -> Outcome:
        """Take the steps to the end.

        Raises:
          OutOfMemory: if a step, an evaluation or a save does not fit into memory.
          Diverged: if the loss is not finite.
          Preempted: if a stop was requested.
          Pruned: if `report` ends it before its last step.
        """
        reason = ''
        with memory.report_exhaustion(lambda: self.meter.completed > 0):
            try:
                self.evaluate_again()
                while self.step < self.total:
                    self.take_step()
                    for act in self.actions:
                        act()
            except Complete as ending:
                reason = str(ending)
        self.guard.clock.enter(times.SAVING)
        self.guard.checkpointer.wait()
        return Outcome(self.results, reason)

    def take_step(self) -> None:
        """Update the state by the next batch, unless a stop is requested while waiting for it."""
        self.evaluated = []
        step, guard, meter = self.step + 1, self.guard, self.meter
        program, profile = self.training.program, guard.profile
        if profile is not None:
            profile.before(step, meter)
        try:
            with meter.waiting():
                batch = next(self.batches)
        except Interrupted:
            self.ending = self.preempted('the training data had stalled: ')
            return
        with meter.starting(step):
            self.state, metrics = program.train_step(self.state, program.layout.feed(batch))
        self.step = step
        guard.clock.stepped(step)
        meter.add(step, metrics, self.training.data.count(batch))
        if profile is not None:
            profile.after(step, meter)
        guard.writer.progress(step)
        guard.checkpointer.check()
        guard.watchdog.beat(f'step {step}')
        if guard.preemption.should_stop() or step == guard.options.stop_at:
            self.ending = self.preempted() if step < self.total else None

    def log(self) -> None:
        """Write the means of the steps since the last call."""
        training, step, writer = self.training, self.step, self.guard.writer
        is_due = due(step, training.timetable.log, self.total) or self.ending is not None
        if not is_due or not self.meter.steps:
            return
        shares = {f'train/{name}/seen': share for name, share in training.data.seen(step).items()}
        means = {**self.meter.log(), **shares}
        writer.write(step, means)
        writer.show_train(step, means)
        self._remark(self.remarks.about_pace(step, means['train/step_sec']))
        if jax.process_count() > 1:
            share_broken_records(training.data)

    def evaluate(self) -> None:
        """Run the evaluations that are due, judge them, and write their results."""
        if self._judged_step == self.step:  # no step since, as the data stalled
            return
        self._judged_step, self.evaluated = self.step, due_evals(self.training, self.step)
        if self.evaluated:
            with self._pause_meter(times.EVALUATION):
                self._evaluate()

    def evaluate_again(self) -> None:
        """Run the evaluations of the step at which the run resumes, if any are left."""
        judge = self.training.judge
        has_ended = self.step == self.total or judge.has_ended(self.bests)
        if not (self._resumes_unevaluated or has_ended):
            return
        self.evaluated = due_evals(self.training, self.step)
        with self.guard.clock.during(times.EVALUATION):
            self._evaluate(repeats=not self._resumes_unevaluated)
        self.draw()
        self.stop()

    def _evaluate(self, repeats: bool = False) -> None:
        """Run and judge the evaluations of `evaluated`; an early end makes all others due as well.

        Results of an evaluation that `repeats` one of an earlier start are neither judged nor
        written again.
        """
        training, names, judge = self.training, self.evaluated, self.training.judge
        stopping, self.evaluated = self.guard.preemption.should_stop, []
        try:
            results = evaluate_due(training, self.state, names, stopping)
            bests = self.bests if repeats else judge.after(self.bests, self.step, results)
            if has_ended := judge.has_ended(bests):
                remaining = [name for name in training.evaluations if name not in names]
                results |= evaluate_due(training, self.state, remaining, stopping)
                names += remaining
        except Interrupted:
            self.unevaluated, self.ending = True, self.preempted()
            return
        self.results, self.bests = results, bests
        if has_ended:
            self.ending = Complete('' if self.step == self.total else judge.reason(bests))
        if repeats:
            return
        self.evaluated, evaluations = names, {name: training.evaluations[name] for name in names}
        signatures = {
            f'{name}/signature': e.signature for name, e in evaluations.items() if e.signature
        }
        headlines = {name: e.headline for name, e in evaluations.items()}
        self.guard.writer.write(self.step, {**results, **signatures})
        self.guard.writer.show_eval(self.step, evaluate.line(headlines, results))
        self._remark(self.remarks.about_accuracy(self.step, results))

    def _remark(self, line: str) -> None:
        if line:
            self.guard.writer.say(line)

    def draw(self) -> None:
        """Draw curves with the new results, and examples if due; then report the results."""
        training, step, writer = self.training, self.step, self.guard.writer
        if not self.evaluated:
            return
        is_last = step == self.total or isinstance(self.ending, Complete)
        with self._pause_meter(times.EVALUATION):
            writer.draw()
            self.guard.watchdog.beat(f'the evaluation after step {step}')
            if training.examples and due_examples(training, step, self.evaluated, is_last):
                steps = training.program.eval_steps
                decay = training.evaluations[training.examples.entry].ema_decay
                training.examples.show(steps, self.state.variables_at(decay), step, writer)
                self.guard.watchdog.beat(f'the examples shown after step {step}')
            report = self.guard.options.report
            if report and report(step, self.results) and not is_last:
                self.ending = Pruned(f'ended after step {step}/{self.total}')

    def save(self) -> None:
        """Save the state if due, best, to be kept, lost or the last; flush the logs before."""
        training, guard, step = self.training, self.guard, self.step
        is_best = KEPT in self.bests and self.bests[KEPT].step == step
        is_kept = step in guard.checkpointer.keep_steps or is_best
        is_due = due(step, training.timetable.checkpoint, self.total)
        if not (is_due or is_kept or guard.checkpointer.is_lost or self.ending):
            return
        with self._pause_meter(times.SAVING):
            guard.writer.flush()
            guard.require_own_folder(training)
            state, unevaluated = self.state, self.unevaluated
            save(training, guard.checkpointer, step, state, self.bests, unevaluated=unevaluated)
            guard.clock.mark()
            guard.watchdog.beat(f'the save of step {step}')

    def stop(self) -> None:
        """Raise what ends the run, once its state is saved."""
        if self.ending is None:
            return
        self.guard.clock.enter(times.SAVING)
        self.guard.checkpointer.wait()
        trouble = self.guard.writer.trouble
        if trouble and isinstance(self.ending, Preempted):
            raise Preempted(f'{trouble}: {self.ending}')
        raise self.ending

    def write(self, metrics: Mapping[str, float]) -> None:
        """Write metrics of a callback, {'NAME/METRIC': value}, with those of the run."""
        self.guard.writer.write(self.step, dict(metrics))

    def end(self, reason: str) -> None:
        """End the run after this step, from a callback: save it as complete.

        The result has the newest evaluations.
        """
        self.ending = self.ending or Complete(reason)
        self.log()

    def preempted(self, why: str = '') -> Preempted:
        """Return the end of a run that is stopped after `step`; `why` begins its message."""
        return Preempted(f'{why}stopped after step {self.step}/{self.total}; the state is saved')

    @contextlib.contextmanager
    def _pause_meter(self, part: str) -> Iterator[None]:
        """Leave the time inside out of the rates, and count it as a part of the run's time."""
        with self.meter.paused(), self.guard.clock.during(part):
            yield


def due(step: int, every: int, total: int) -> bool:
    """Return whether to log, evaluate or save: every `every` steps, and at the end."""
    return step == total or (every > 0 and step % every == 0)


def due_evals(training: Training, step: int) -> list[str]:
    """Return the entries of `config.evals` that are due after `step`."""
    timetable = training.timetable
    return [name for name, every in timetable.evals.items() if due(step, every, timetable.total)]


def due_examples(training: Training, step: int, names: Sequence[str], last: bool) -> bool:
    """Return whether examples are due with the results of these evaluations.

    `last`: whether the results end the run.
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
    """Return the results of the evaluations that are due: {'test/accuracy': ...}.

    Raises:
      Interrupted: if a stop is requested between two batches or while waiting for one.
    """
    evaluations = {name: training.evaluations[name] for name in names}
    steps = training.program.eval_steps
    results = evaluate.run_averages(steps, evaluations, state.variables_at, stop_requested)
    for evaluation in evaluations.values() if jax.process_count() > 1 else ():
        share_broken_records(evaluation.data)
    return results


def share_broken_records(data: Dataset) -> None:
    """Share with every process the broken records that the others have found.

    Raises:
      UserError: on every process, if there are too many in total.
    """
    for reasons in processes.gather(list(data.source.pop_broken().items())):
        data.source.record_broken(dict(reasons))


def count_broken_records(training: Training) -> dict[str, float]:
    """Return the number of broken records of each data set that has any."""
    opened = {'train': training.data, **{k: e.data for k, e in training.evaluations.items()}}
    counts = {name: len(data.source.broken) for name, data in opened.items()}
    return {f'{name}/broken_records': float(count) for name, count in counts.items() if count}
