"""Builds everything that a run needs from its config; nothing is compiled or written yet.

The config becomes a typed `Run` here; later code takes its sections, or objects made of them.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import jax
import numpy as np
from ml_collections import ConfigDict

from vit_jax.config import defaults, objects
from vit_jax.config.load import to_run
from vit_jax.config.run import Durations, Run
from vit_jax.data import vocabulary
from vit_jax.data.dataset import Dataset
from vit_jax.errors import UserError
from vit_jax.interop.trained import TrainedModel
from vit_jax.runtime import sharding
from vit_jax.trainer import evaluate, evaluations
from vit_jax.trainer.early_stopping import Judge, make_judge
from vit_jax.trainer.evaluations import Evaluation
from vit_jax.trainer.program import EvalSteps, Program, make_program

if TYPE_CHECKING:
    from vit_jax.trainer.examples import ExampleDisplay


@dataclasses.dataclass(frozen=True)
class Timetable:
    """Steps between logs, evaluations and saves.

    Attributes:
      total: Length of the run.
      log, checkpoint: Steps between two of them.
      examples: Steps between drawn examples; 0 for never.
      evals: Steps between evaluations, by their names.
    """

    total: int
    log: int
    checkpoint: int
    examples: int
    evals: Mapping[str, int]


@dataclasses.dataclass(frozen=True)
class Training:
    """Objects that `build` makes of a config.

    Attributes:
      config: Complete config, as stored in the run folder.
      run: Typed form of the config.
      times: Durations of the run.
      data: Training data.
      program: Computation.
      timetable: Steps between logs, evaluations and saves.
      evaluations: Entries of `config.evals`, opened.
      examples: Examples drawn with the first evaluation, if any.
      judge: Goals, and the results that reach them.
    """

    config: ConfigDict
    run: Run
    times: Durations
    data: Dataset
    program: Program
    timetable: Timetable
    evaluations: Mapping[str, Evaluation]
    examples: ExampleDisplay | None
    judge: Judge


def build(config: ConfigDict, devices: Sequence[jax.Device] | None = None) -> Training:
    """Open the data and build everything that a run needs; the config stays unchanged.

    Raises:
      UserError: for a mistake in the config that only the data or the devices reveal.
    """
    run = to_run(config)
    layout = sharding.make_layout(devices, run.parallel)
    data = evaluations.open_data(run.data, run.batch_size, layout, run.seed)
    _check_classes(run, data)
    config = defaults.fill_sizes(config, data.info)
    run = to_run(config)
    times = Durations.of(run.total, data.plan.examples_per_step, data.num_examples)
    shares = data.source.class_shares()
    program = make_program(run, data.shapes, layout, times, data.info.num_classes, shares)
    vocabulary.require_ids(data.vocab, program.model, 'config.data.vocab')
    if program.frozen:
        program.frozen.require_classes(data.info.class_names)
    trained = TrainedModel(
        params=program.abstract_state.params,
        config=config,
        image_size=data.image_size,
        source='this run',
        class_names=data.info.class_names,
        class_ids=data.info.class_ids,
        num_classes=data.info.num_classes,
        spec=data.spec,
    )
    opened = evaluations.open_evals(run, layout, program.eval_steps, trained)
    evaluations.check_predictions(program.eval_steps, opened, program.abstract_state.variables)
    evaluators = {name: evaluation.evaluator for name, evaluation in opened.items()}
    return Training(
        config=config,
        run=run,
        times=times,
        data=data,
        program=program,
        timetable=make_timetable(run, times, opened),
        evaluations=opened,
        examples=_examples(run, opened, program.eval_steps) if run.every.examples else None,
        judge=make_judge(config, run, evaluators),
    )


def make_timetable(run: Run, times: Durations, opened: Mapping[str, Evaluation]) -> Timetable:
    """Convert the intervals of a config to steps."""
    texts = {
        name: run.every.eval if entry.every is None else entry.every
        for name, entry in run.evals.items()
    }
    open_ = [opened[name] for name, text in texts.items() if text is None]
    seldom = times.between_evals(evaluate.num_examples(open_))
    return Timetable(
        total=times.total_steps,
        log=times.steps(run.every.log, 'config.every.log'),
        checkpoint=times.steps(run.every.checkpoint, 'config.every.checkpoint'),
        examples=times.steps(run.every.examples, 'config.every.examples'),
        evals={
            name: seldom if text is None else times.steps(text, f'config.evals.{name}.every')
            for name, text in texts.items()
        },
    )


def _examples(
    run: Run, opened: Mapping[str, Evaluation], steps: EvalSteps
) -> ExampleDisplay | None:
    """Return the examples that a run shows; their drawing code is imported only if needed."""
    from vit_jax.trainer import examples

    return examples.make_examples(run, opened, steps)


def _check_classes(run: Run, data: Dataset) -> None:
    """Raise UserError if a classification task has examples of only one class."""
    counts, names = data.class_counts, data.info.class_names
    present = range(data.info.num_classes) if counts is None else np.flatnonzero(counts)
    if len(present) != 1 or not objects.task_class(run.task.name).classifies:
        return
    name = names[present[0]] if names else str(present[0])
    raise UserError(
        f'config.data: {data.source.title}: all {len(data.source):,} examples are of class '
        f'{name!r}, and a classifier of one class is always right: add examples of another (for '
        'folder:, one folder per class)'
    )
