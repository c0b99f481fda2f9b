"""Builds everything that a run needs from its config; nothing is compiled or written yet.

The config becomes a typed `Run` here; later code takes its sections, or objects made of them.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import jax
import numpy as np
import optax
from ml_collections import ConfigDict

from vit_jax.config import defaults, objects
from vit_jax.config.load import to_run
from vit_jax.config.origin import trusted_names
from vit_jax.config.run import STANDARD, Durations, Optim, Run
from vit_jax.data import vocabulary
from vit_jax.data.batches import Shape
from vit_jax.data.dataset import Dataset
from vit_jax.errors import UserError
from vit_jax.interop import adapt
from vit_jax.interop.trained import TrainedModel, fields
from vit_jax.optim import make as optim
from vit_jax.optim import mup
from vit_jax.runtime import sharding
from vit_jax.step import TrainState, init_state, init_with_output, make_train_step
from vit_jax.tasks.base import Task
from vit_jax.trainer import evaluate
from vit_jax.trainer.compatibility import abstract_variables
from vit_jax.trainer.early_stopping import Judge, make_judge

if TYPE_CHECKING:
    from vit_jax.inference.frozen import Frozen
    from vit_jax.optim.lora import Adapters
    from vit_jax.trainer.examples import Examples


@dataclasses.dataclass(frozen=True)
class Program:
    """The computation of a run.

    Attributes:
      model, task: of the config.
      layout: of the devices.
      init: makes the state before the first step; given parameters replace the initial ones.
      abstract_state: shapes and dtypes of the state.
      train_step: (state, batch) -> (state, metrics), compiled at its first call.
      eval_steps: the steps of evaluations.
      max_skips: steps in a row that may be skipped because they are not finite.
      frozen: variables that are read and never trained, if there are any.
      adapters: of `config.lora`, if it has a rank.
    """

    model: Any
    task: Task
    layout: sharding.Layout
    init: Callable[..., TrainState]
    abstract_state: TrainState
    train_step: Callable
    eval_steps: evaluate.EvalSteps
    max_skips: int
    frozen: Frozen | None = None
    adapters: Adapters | None = None

    @property
    def hardware(self) -> str:
        """The devices, as `8 x TPU v4 (jit)` or `8 x TPU v4 on 2 slices (jit)`."""
        mesh, layout = self.layout.mesh, type(self.layout).__name__.lower()
        where = f' on {slices} slices' if (slices := mesh.shape['slice']) > 1 else ''
        return f'{mesh.size} x {mesh.devices.flat[0].device_kind}{where} ({layout})'

    @property
    def target(self) -> TrainState:
        """Shapes, dtypes and shardings of the state, to restore a checkpoint into."""
        return sharding.abstract_target(self.layout, self.abstract_state)


@dataclasses.dataclass(frozen=True)
class Timetable:
    """The steps between logs, evaluations and saves.

    Attributes:
      total: length of the run.
      log, checkpoint: how often.
      examples: how often examples are shown; 0 for never.
      evals: how often each entry of `config.evals`.
      lr: the learning rate as a function of the steps taken.
    """

    total: int
    log: int
    checkpoint: int
    examples: int
    evals: Mapping[str, int]
    lr: optax.Schedule


@dataclasses.dataclass(frozen=True)
class Training:
    """The objects that `build` makes of a config.

    Attributes:
      config: complete, as stored in the run folder.
      run: its typed form.
      times: durations of the run.
      data: to train on.
      program: the computation.
      timetable: of logs, evaluations and saves.
      evaluations: of the entries of `config.evals`.
      examples: shown with the first evaluation, if any.
      judge: of the results of evaluations.
    """

    config: ConfigDict
    run: Run
    times: Durations
    data: Dataset
    program: Program
    timetable: Timetable
    evaluations: Mapping[str, evaluate.Evaluation]
    examples: Examples | None
    judge: Judge


def build(config: ConfigDict, devices: Sequence[jax.Device] | None = None) -> Training:
    """Open the data and build everything that a run needs; the config stays unchanged.

    Raises:
      UserError: for a mistake in the config that only the data or the devices reveal.
    """
    run = to_run(config)
    layout = sharding.make_layout(devices, run.parallel)
    data = evaluate.open_data(run.data, run.batch_size, layout, run.seed)
    _check_classes(run, data)
    config = defaults.complete(config, data.info)
    run = to_run(config)
    times = Durations.of(run.total, data.plan.examples_per_step, data.num_examples)
    shares = data.source.class_shares()
    program, lr = make_program(run, data.shapes, layout, times, data.info.num_classes, shares)
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
    opened = evaluate.open_evals(run, layout, program.eval_steps, trained)
    evaluate.check_predictions(program.eval_steps, opened, program.abstract_state.variables)
    every = run.every
    return Training(
        config=config,
        run=run,
        times=times,
        data=data,
        program=program,
        timetable=Timetable(
            total=times.total_steps,
            log=times.steps(every.log, 'config.every.log'),
            checkpoint=times.steps(every.checkpoint, 'config.every.checkpoint'),
            examples=times.steps(every.examples, 'config.every.examples'),
            evals=_intervals(run, times, opened),
            lr=lr,
        ),
        evaluations=opened,
        examples=_examples(run, opened, program.eval_steps) if every.examples else None,
        judge=make_judge(config, run, {k: one.evaluator for k, one in opened.items()}),
    )


def _examples(
    run: Run, opened: Mapping[str, evaluate.Evaluation], steps: evaluate.EvalSteps
) -> Examples | None:
    """The examples that a run shows; their drawing code is imported only if needed."""
    from vit_jax.trainer import examples

    return examples.make_examples(run, opened, steps)


def _intervals(
    run: Run, times: Durations, opened: Mapping[str, evaluate.Evaluation]
) -> dict[str, int]:
    """Steps between evaluations, by their names."""
    given = {
        name: run.every.eval if entry.every is None else entry.every
        for name, entry in run.evals.items()
    }
    open_ = [opened[name] for name, text in given.items() if text is None]
    seldom = times.between_evals(evaluate.num_examples(open_))
    return {
        name: seldom if text is None else times.steps(text, f'config.evals.{name}.every')
        for name, text in given.items()
    }


def make_program(
    run: Run,
    shapes: Sequence[Shape],
    layout: sharding.Layout,
    times: Durations,
    num_classes: int = 0,
    shares: np.ndarray | None = None,
) -> tuple[Program, optax.Schedule]:
    """Make the computation of a run, and its learning rate.

    Args:
      run: with the sizes that depend on the data.
      shapes: the kinds of training batches, the largest examples last.
      layout: of the devices.
      times: of the run.
      num_classes: of the training data, for tasks that weigh classes; 0 without data.
      shares: of the training examples that are of each class, if they are known.

    Raises:
      UserError: if the config or the data do not suit model, task, optimizer or devices.
    """
    model, task = objects.make_model(run.model), objects.make_task(run.task)
    if num_classes:
        task = task.for_data(num_classes, shares)
    frozen = read_frozen(run, task) if task.frozen else None
    task = frozen.task if frozen else task
    _check_batch_norm(model, layout, run.step.accum_steps)
    for shape in shapes:
        _check_rows(run, task, layout, shape.rows)
    spec = shapes[-1].spec
    example = {k: np.zeros((1, *s.shape), s.dtype) for k, s in spec.items()}

    # Compiled separately, so that it is traced once for the shapes here and in `init`.
    def run_once_of(model: Any) -> Callable:
        return jax.jit(partial(init_with_output, model, task, seed=run.seed))

    def params_of(model: Any) -> Any:
        return abstract_variables(run_once_of(model), task, spec)['params']

    run_once = run_once_of(model)
    params = abstract_variables(run_once, task, spec)['params']
    factors = mup_factors(run.optim.parametrization, model, params, params_of)
    optimizer, adapters, called = run.optim, None, model
    if run.lora.rank:
        adapters, params, optimizer, called = adapt_model(run, model, params)
    order, largest = model.layer_order(), model.largest
    tx, lr = optim.make(params, optimizer, times, order, factors, largest)

    def init(params: Mapping[str, Any] | None = None, held: Any = None) -> TrainState:
        variables = run_once(example)[1]
        if factors is not None:
            variables = {**variables, 'params': mup.scaled(variables['params'], factors)}
        variables = adapt.overlay(variables, {'params': params or {}})
        held = frozen.zeros if frozen and held is None else held
        variables = adapters.extend(variables, run.seed) if adapters else variables
        state = init_state(variables, tx, run.seed, ema=run.step.ema_decay > 0)
        return dataclasses.replace(state, frozen=held or None)

    abstract_state = jax.eval_shape(init)
    train_step = make_train_step(called, task, tx, run.step, layout, times, optimizer.freeze)
    program = Program(
        model=model,
        task=task,
        layout=layout,
        init=init,
        abstract_state=abstract_state,
        train_step=layout.compile_train(train_step, abstract_state),
        eval_steps=evaluate.compile_steps(called, task, layout, run.seed),
        max_skips=run.step.max_skips,
        frozen=frozen,
        adapters=adapters,
    )
    return program, lr


def read_frozen(run: Run, task: Task) -> Frozen:
    """Read the models that the task never trains; their reader is imported only if needed."""
    from vit_jax.inference import frozen

    return frozen.attach(task, trusted_names(run))


def adapt_model(run: Run, model: Any, params: Any) -> tuple[Adapters, Any, Optim, Any]:
    """The adapters of `config.lora`, shapes with them, the optimizer for them, and what to call."""
    from vit_jax.optim import lora  # here, as few runs have any

    adapters, params = lora.make(run.lora, model, params)
    optimizer = dataclasses.replace(run.optim, freeze=(*run.optim.freeze, adapters.pattern))
    return adapters, params, optimizer, adapters.wrap(model)


def _check_classes(run: Run, data: Dataset) -> None:
    """Raise UserError if a classification task has examples of only one class."""
    counts, names = data.class_counts, data.info.class_names
    found = range(data.info.num_classes) if counts is None else np.flatnonzero(counts)
    if len(found) != 1 or not objects.task_class(run.task.name).classifies:
        return
    name = names[found[0]] if names else str(found[0])
    raise UserError(
        f'config.data: {data.source.title}: all {len(data.source):,} examples are of class '
        f'{name!r}, and a classifier of one class is always right: add examples of another (for '
        'folder:, one folder per class)'
    )


def _check_batch_norm(model: Any, layout: sharding.Layout, accum_steps: int) -> None:
    """Raise UserError if a batch norm would see only a part of the global batch."""
    if getattr(model, 'head_norm', 'none') != 'batch':
        return
    needs = "config.model.head_norm='batch' needs the statistics of the whole batch"
    if accum_steps > 1:
        raise UserError(f'{needs}: set config.step.accum_steps={accum_steps} to 1')
    if layout.train_axis is not None and layout.num_shards > 1:
        raise UserError(f"{needs}: set config.parallel.strategy to 'jit', on one slice")


def _check_rows(run: Run, task: Task, layout: sharding.Layout, rows: int) -> None:
    """Raise UserError unless a batch of `rows` rows suits the task and can be divided."""
    if task.couples_rows and rows < 2:
        raise UserError(
            f'config.batch_size={run.batch_size}: the loss of task {run.task.name} '
            'compares the examples of a batch; give at least 2'
        )
    sharding.check_batch(
        layout,
        run.batch_size,
        rows=rows,
        accum_steps=run.step.accum_steps,
        multiple=task.multiple,
        reason=task.multiple_reason,
    )


def mup_factors(
    text: str, model: Any, params: Any, params_of: Callable[[Any], Any]
) -> Mapping[str, mup.Factors] | None:
    """The factors of muP; None for the standard parametrization.

    Args:
      text: `config.optim.parametrization`.
      model: of the config.
      params: shapes of its parameters.
      params_of: model -> these shapes.

    Raises:
      UserError: for another text, or a base model that differs in more than widths.
    """
    if text == STANDARD:
        return None
    widths = mup.base_fields(text, fields(model))
    base = params_of(model.clone(parent=None, **widths))
    return mup.factors(params, base, model.mup_kinds)
