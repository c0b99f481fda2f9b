"""Predicates of what is due after a step, and the evaluations that are."""

from __future__ import annotations

from collections.abc import Sequence

from vit_jax import step as step_lib
from vit_jax.checkpoints.best import KEPT
from vit_jax.checkpoints.checkpointer import Checkpointer
from vit_jax.runtime.hangs import Stopping
from vit_jax.trainer import broken_records, evaluations
from vit_jax.trainer.build import Training
from vit_jax.trainer.judge import Bests


def due(step: int, every: int, total: int) -> bool:
    """The one predicate for log, evaluate and save: every so often, and at the end."""
    return step == total or (every > 0 and step % every == 0)


def due_save(training: Training, step: int, bests: Bests, checkpointer: Checkpointer) -> bool:
    """Whether the state after `step` is saved: by the timetable, to be kept, or after a lost save.

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
    state: step_lib.TrainState,
    names: Sequence[str],
    stop_requested: Stopping,
) -> dict[str, float]:
    """The results of the evaluations that are due: {'test/accuracy': ...}.

    Raises:
      Interrupted: if `stop_requested` says so between two batches, or while one is awaited.
    """
    now = {name: training.evaluations[name] for name in names}
    results = evaluations.run(training.program.eval_steps, now, state.variables, stop_requested)
    for one in now.values():
        broken_records.share(one.data)
    return results


def signatures(training: Training, names: Sequence[str]) -> dict[str, str]:
    """The protocols of evaluations, {'test/signature': ...}, where they name one."""
    every = {name: training.evaluations[name].signature for name in names}
    return {f'{name}/signature': signature for name, signature in every.items() if signature}
