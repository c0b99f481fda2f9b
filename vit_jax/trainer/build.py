"""Builds everything that a run needs from its config; nothing is compiled or written yet.

The config is read only here; later code takes the objects made of it.
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

from vit_jax.checkpoints.checkpointer import Checkpointer
from vit_jax.config import defaults, durations, objects, schema
from vit_jax.config.origin import dotted_names
from vit_jax.data import vocabulary
from vit_jax.data.batches import Shape
from vit_jax.data.dataset import Dataset
from vit_jax.errors import UserError
from vit_jax.interop import adapt
from vit_jax.interop.trained import TrainedModel, fields
from vit_jax.optim import make as optim
from vit_jax.optim import mup
from vit_jax.runtime import sharding
from vit_jax.signatures import in_steps
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
      data: to train on.
      program: the computation.
      timetable: of logs, evaluations and saves.
      evaluations: of the entries of `config.evals`.
      examples: shown with the first evaluation, if any.
      retention: keywords of `Checkpointer` that choose which checkpoints are kept.
      judge: of the results of evaluations.
    """

    config: ConfigDict
    data: Dataset
    program: Program
    timetable: Timetable
    evaluations: Mapping[str, evaluate.Evaluation]
    examples: Examples | None
    retention: Mapping[str, Any]
    judge: Judge


def build(config: ConfigDict, devices: Sequence[jax.Device] | None = None) -> Training:
    """Open the data and build everything that a run needs; the config stays unchanged.

    Raises:
      UserError: for a mistake in the config that only the data or the devices reveal.
    """
    layout = sharding.make_layout(devices, **defaults.arguments(config, 'parallel'))
    data = evaluate.open_data(config.data, config.batch_size, layout, seed=config.seed)
    _check_classes(config, data)
    config = defaults.complete(config, data.info)
    times = durations.from_config(config, data.plan.examples_per_step, data.num_examples)
    shares = data.source.class_shares()
    program, lr = make_program(config, data.shapes, layout, times, data.info.num_classes, shares)
    vocabulary.require_ids(data.vocab, program.model, 'config.data.vocab')
    if program.frozen:
        program.frozen.require_classes(data.info.class_names)
    every = durations.Every(**defaults.arguments(config, 'every'))
    keep = defaults.arguments(config, 'checkpoint')
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
    opened = evaluate.open_evals(config, layout, program.eval_steps, trained)
    evaluate.check_predictions(program.eval_steps, opened, program.abstract_state.variables)
    return Training(
        config=config,
        data=data,
        program=program,
        timetable=Timetable(
            total=times.total_steps,
            log=times.steps(every.log, 'config.every.log'),
            checkpoint=times.steps(every.checkpoint, 'config.every.checkpoint'),
            examples=times.steps(every.examples, 'config.every.examples'),
            evals=_intervals(config, every.eval, times, opened),
            lr=lr,
        ),
        evaluations=opened,
        examples=_examples(config, opened, program.eval_steps) if every.examples else None,
        retention=in_steps(Checkpointer, keep, times.steps),
        judge=make_judge(config, {k: one.evaluator for k, one in opened.items()}),
    )


def _examples(
    config: ConfigDict, opened: Mapping[str, evaluate.Evaluation], steps: evaluate.EvalSteps
) -> Examples | None:
    """The examples that a run shows; their drawing code is imported only if needed."""
    from vit_jax.trainer import examples

    return examples.make_examples(config, opened, steps)


def _intervals(
    config: ConfigDict,
    default: str | None,
    times: durations.Durations,
    opened: Mapping[str, evaluate.Evaluation],
) -> dict[str, int]:
    """Steps between evaluations, by their names; `default` is `config.every.eval`."""
    own = {name: section.get('every') for name, section in config.evals.items()}
    given = {name: default if text is None else text for name, text in own.items()}
    open_ = [opened[name] for name, text in given.items() if text is None]
    seldom = times.between_evals(evaluate.num_examples(open_))
    return {
        name: seldom if text is None else times.steps(text, f'config.evals.{name}.every')
        for name, text in given.items()
    }


def make_program(
    config: ConfigDict,
    shapes: Sequence[Shape],
    layout: sharding.Layout,
    times: durations.Durations,
    num_classes: int = 0,
    shares: np.ndarray | None = None,
) -> tuple[Program, optax.Schedule]:
    """Make the computation of a run, and its learning rate.

    Args:
      config: with the sizes that depend on the data.
      shapes: the kinds of training batches, the largest examples last.
      layout: of the devices.
      times: of the run.
      num_classes: of the training data, for tasks that weigh classes; 0 without data.
      shares: of the training examples that are of each class, if they are known.

    Raises:
      UserError: if the config or the data do not suit model, task, optimizer or devices.
    """
    model, task = objects.model_and_task(config)
    if num_classes:
        task = task.for_data(num_classes, shares)
    frozen = read_frozen(config, task) if task.frozen else None
    task = frozen.task if frozen else task
    step = defaults.arguments(config, 'step')
    _check_batch_norm(model, layout, step['accum_steps'])
    for shape in shapes:
        _check_rows(config, task, layout, shape.rows, step['accum_steps'])
    spec = shapes[-1].spec
    example = {k: np.zeros((1, *s.shape), s.dtype) for k, s in spec.items()}

    # Compiled separately, so that it is traced once for the shapes here and in `init`.
    def run_once_of(model: Any) -> Callable:
        return jax.jit(partial(init_with_output, model, task, seed=config.seed))

    def params_of(model: Any) -> Any:
        return abstract_variables(run_once_of(model), task, spec)['params']

    run_once = run_once_of(model)
    params = abstract_variables(run_once, task, spec)['params']
    factors = mup_factors(config, model, params, params_of)
    optimizer, adapters, called = config.optim.to_dict(), None, model
    if config.get('lora', {}).get('rank'):
        adapters, params, optimizer, called = adapt_model(config, model, params, optimizer)
    tx, lr = optim.make(
        params,
        times.total_steps,
        times.steps,
        model.layer_order(),
        factors,
        model.largest,
        **optimizer,
    )

    def init(params: Mapping[str, Any] | None = None, held: Any = None) -> TrainState:
        variables = run_once(example)[1]
        if factors is not None:
            variables = {**variables, 'params': mup.scaled(variables['params'], factors)}
        variables = adapt.overlay(variables, {'params': params or {}})
        held = frozen.zeros if frozen and held is None else held
        variables = adapters.extend(variables, config.seed) if adapters else variables
        state = init_state(variables, tx, config.seed, ema=step['ema_decay'] > 0)
        return dataclasses.replace(state, frozen=held or None)

    abstract_state = jax.eval_shape(init)
    train_step = make_train_step(
        called,
        task,
        tx,
        layout,
        times,
        freeze=optimizer.get('freeze', ()),
        **step,
    )
    program = Program(
        model=model,
        task=task,
        layout=layout,
        init=init,
        abstract_state=abstract_state,
        train_step=layout.compile_train(train_step, abstract_state),
        eval_steps=evaluate.compile_steps(called, task, layout, config.seed),
        max_skips=step['max_skips'],
        frozen=frozen,
        adapters=adapters,
    )
    return program, lr


def read_frozen(config: ConfigDict, task: Task) -> Frozen:
    """Read the models that the task never trains; their reader is imported only if needed."""
    from vit_jax.inference import frozen

    return frozen.attach(task, [name for _, name in dotted_names(config)])


def adapt_model(config: ConfigDict, model: Any, params: Any, optimizer: dict[str, Any]) -> Any:
    """The adapters of `config.lora`, shapes with them, keys of the optimizer, and what to call."""
    from vit_jax.optim import lora  # here, as few runs have any

    adapters, params = lora.make(config, defaults.arguments(config, 'lora'), model, params)
    freeze = (*optimizer.get('freeze', ()), adapters.pattern)
    return adapters, params, {**optimizer, 'freeze': freeze}, adapters.wrap(model)


def _check_classes(config: ConfigDict, data: Dataset) -> None:
    """Raise UserError if a classification task has examples of only one class."""
    counts, names = data.class_counts, data.info.class_names
    found = range(data.info.num_classes) if counts is None else np.flatnonzero(counts)
    if len(found) != 1 or not schema.task_class(config).classifies:
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


def _check_rows(
    config: ConfigDict, task: Task, layout: sharding.Layout, rows: int, accum_steps: int
) -> None:
    """Raise UserError unless a batch of `rows` rows suits the task and can be divided."""
    if task.couples_rows and rows < 2:
        raise UserError(
            f'config.batch_size={config.batch_size}: the loss of task {config.task.name} '
            'compares the examples of a batch; give at least 2'
        )
    sharding.check_batch(
        layout,
        config.batch_size,
        rows=rows,
        accum_steps=accum_steps,
        multiple=task.multiple,
        reason=task.multiple_reason,
    )


def mup_factors(
    config: ConfigDict, model: Any, params: Any, params_of: Callable[[Any], Any]
) -> Mapping[str, mup.Factors] | None:
    """The factors of muP; None for the standard parametrization.

    Args:
      config: checked.
      model: of the config.
      params: shapes of its parameters.
      params_of: model -> these shapes.

    Raises:
      UserError: for another text, or a base model that differs in more than widths.
    """
    text = defaults.arguments(config, 'optim').get('parametrization', mup.STANDARD)
    if text == mup.STANDARD:
        return None
    widths = mup.base_fields(text, fields(model))
    base = params_of(model.clone(parent=None, **widths))
    return mup.factors(params, base, model.mup_kinds)
