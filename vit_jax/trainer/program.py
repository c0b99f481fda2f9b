"""Computation of a run: a plain program, and what muP, LoRA and frozen models make of it."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import jax
import numpy as np
import optax

from vit_jax.config import objects
from vit_jax.config.run import STANDARD, Durations, Optim, Run
from vit_jax.data.batches import Batch, Shape, Spec
from vit_jax.errors import UserError
from vit_jax.evaluators.base import Evaluator, Patches
from vit_jax.interop.trained import fields
from vit_jax.nn.maps import AttentionMap
from vit_jax.optim import make as optim
from vit_jax.runtime import sharding
from vit_jax.step import (
    Optimizer,
    TrainState,
    init_state,
    init_with_output,
    make_attention_step,
    make_eval_step,
    make_predict_step,
    make_train_step,
)
from vit_jax.tasks.base import Task
from vit_jax.tree_paths import overlay

if TYPE_CHECKING:
    from vit_jax.inference.frozen import Frozen
    from vit_jax.optim.lora import Adapters
    from vit_jax.optim.mup import Factors

PyTree = Any


@dataclasses.dataclass(frozen=True)
class Program:
    """Computation of a run.

    Attributes:
      model, task: Model and task of the config.
      layout: Device layout.
      init: Function that makes the state before the first step; given parameters replace the
        initial ones.
      abstract_state: Shapes and dtypes of the state.
      train_step: (state, batch) -> (state, metrics), compiled at its first call.
      eval_steps: Steps of evaluations.
      lr: Learning rate as a function of the steps taken.
      max_skips: Steps in a row that may be skipped because they are not finite.
      frozen: Variables that are read and never trained, if there are any.
      adapters: Adapters of `config.lora`, if it has a rank.
    """

    model: Any
    task: Task
    layout: sharding.Layout
    init: Callable[..., TrainState]
    abstract_state: TrainState
    train_step: Callable
    eval_steps: EvalSteps
    lr: optax.Schedule
    max_skips: int
    frozen: Frozen | None = None
    adapters: Adapters | None = None

    @property
    def hardware(self) -> str:
        """Devices, such as `8 x TPU v4 (jit)` or `8 x TPU v4 on 2 slices (jit)`."""
        mesh, layout = self.layout.mesh, type(self.layout).__name__.lower()
        per_slices = f' on {slices} slices' if (slices := mesh.shape['slice']) > 1 else ''
        return f'{mesh.size} x {mesh.devices.flat[0].device_kind}{per_slices} ({layout})'

    @property
    def target(self) -> TrainState:
        """Shapes, dtypes and shardings of the state, to restore a checkpoint into."""
        return sharding.abstract_target(self.layout, self.abstract_state)

    def place(self, saved: TrainState) -> TrainState:
        """Put a restored state on the devices, with the variables that are not saved."""
        state = self.layout.from_global(dataclasses.replace(saved, frozen=None))
        return self.frozen.join(state, self.layout) if self.frozen else state


@dataclasses.dataclass(frozen=True)
class Origin:
    """State or parameters that a new run starts from.

    Attributes:
      params: Nested arrays; missing ones are initialized.
      state: Complete, of the run that this one branches from; None without a branch.
      step: Step of `state`.
      hardware: The devices on which `state` was saved.
      history: The metrics of the run that this one branches from, up to `step`.
      notes: Its source and the changes that make it fit, a line each.
    """

    params: Any = dataclasses.field(default_factory=dict)
    state: TrainState | None = None
    step: int = 0
    hardware: str = ''
    history: tuple[dict[str, Any], ...] = ()
    notes: tuple[str, ...] = ()


@dataclasses.dataclass(frozen=True)
class EvalSteps:
    """Compiled steps of evaluations.

    Attributes:
      layout: Layout that the steps are compiled for.
      evaluate, predict: Compiled steps; `predict` is None for a task without one.
      shapes: (variables, batch), or their shapes -> the shapes of the results of `predict`.
      patches: Features of patches -> their step and shapes, as `predict` and `shapes`.
      attention_step: (variables, batch that every device has whole) -> (the model's outputs, its
        attention maps); None for a model without them.
      derive: {metric: mean} of a whole pass -> further metrics computed from them.
    """

    layout: sharding.Layout
    evaluate: Callable
    predict: Callable | None
    shapes: Callable
    derive: Callable[[dict[str, float]], dict[str, float]]
    patches: Callable[[Patches], tuple[Callable, Callable]]
    attention_step: Callable | None = None

    def predicting(self, evaluator: Evaluator) -> Callable:
        """Return the compiled step of an evaluator's predictions, or of its features of patches."""
        if evaluator.patches:
            return self.patches(evaluator.patches)[0]
        assert self.predict is not None
        return self.predict


def compile_steps(model: Any, task: Task, layout: sharding.Layout, seed: int = 0) -> EvalSteps:
    """Make the steps of evaluations, compiled at their first calls.

    Args:
      model, task: Model and task of the config.
      layout: Device layout.
      seed: Seed of the random numbers of models and tasks.
    """
    options: dict[str, Any] = {'seed': seed, 'axis_name': layout.axis_name}
    eval_step = make_eval_step(model, task, **options)
    predict_step = make_predict_step(model, task, **options)
    predict = layout.compile_eval(predict_step) if task.predicts else None
    # One of jit is traced once, here or for the first batch.
    alone: Any = make_predict_step(model, task, seed=seed) if layout.axis_name else predict

    @functools.cache
    def patches(wanted: Patches) -> tuple[Callable, Callable]:
        from vit_jax.trainer.patches import make_step  # here, as few evaluations need it

        step = layout.compile_eval(make_step(model, task, wanted, **options))
        single = make_step(model, task, wanted, seed=seed) if layout.axis_name else step
        return step, partial(jax.eval_shape, single)

    return EvalSteps(
        layout=layout,
        evaluate=layout.compile_eval(eval_step),
        predict=predict,
        shapes=partial(jax.eval_shape, alone),
        derive=task.derive,
        patches=patches,
        attention_step=_attention_step(model, task, layout, seed) if model.attends else None,
    )


def _attention_step(model: Any, task: Task, layout: sharding.Layout, seed: int) -> Callable:
    step = make_attention_step(model, task, seed=seed, axis_name=layout.axis_name)
    compiled = layout.compile_eval(step)

    def run(variables: PyTree, batch: Batch) -> tuple[dict[str, Any], list[AttentionMap]]:
        outputs, intermediates, inputs = compiled(variables, layout.put_copies(batch))
        return outputs, model.attention_maps(intermediates, *inputs)

    return run


@dataclasses.dataclass(frozen=True)
class Draft:
    """A program before its steps are made; each `with_` function changes what it names.

    Attributes:
      run: Run, with the sizes that depend on the data.
      model: Model of the config.
      task: Task of the config, for the data.
      spec: Shapes of a training example.
      initialize: Function of given parameters; initial variables with those in place.
      step_model: Model as the steps call it, with adapters if there are any.
      optim: `config.optim`.
      factors: Factors of muP; None for the standard parametrization.
      adapters: Adapters of `config.lora`, if it has a rank.
      frozen: Variables that are read and never trained, if there are any.
      params: Shapes of the parameters.
    """

    run: Run
    model: Any
    task: Task
    spec: Spec
    initialize: Callable[[Mapping[str, Any]], dict[str, PyTree]]
    step_model: Any
    optim: Optim
    params: PyTree
    factors: Mapping[str, Factors] | None = None
    adapters: Adapters | None = None
    frozen: Frozen | None = None


def make_program(
    run: Run,
    shapes: Sequence[Shape],
    layout: sharding.Layout,
    times: Durations,
    num_classes: int = 0,
    shares: np.ndarray | None = None,
) -> Program:
    """Make the computation of a run.

    Args:
      run: Run, with the sizes that depend on the data.
      shapes: Kinds of training batches, the largest examples last.
      layout: Device layout.
      times: Durations of the run.
      num_classes: Classes of the training data, for tasks that weigh them; 0 without data.
      shares: Share of the training examples in each class, if known.

    Raises:
      UserError: if the config or the data do not suit model, task, optimizer or devices.
    """
    model, task = objects.make_model(run.model), objects.make_task(run.task)
    task = task.in_steps(times) if task.durations else task
    if num_classes:
        task = task.for_data(num_classes, shares)
    task, frozen = read_frozen(run, task) if task.frozen else (task, None)
    _check_batch_norm(model, layout, run.step.accum_steps)
    for shape in shapes:
        _check_rows(run, task, layout, shape.rows)
    draft = with_mup(draft_program(run, model, task, shapes[-1].spec))
    draft = with_frozen(with_lora(draft), frozen)
    order, largest = model.layer_order(), model.largest
    tx, lr = optim.make_optimizer(draft.params, draft.optim, times, order, draft.factors, largest)
    average = None
    if run.optim.name in optim.SCHEDULE_FREE:
        from vit_jax.optim import schedule_free  # here, as few runs average like this

        average = schedule_free.average_of(run)
    optimizer = Optimizer(tx, draft.optim.freeze, times, average)
    return compile_program(draft, layout, optimizer, lr)


def draft_program(run: Run, model: Any, task: Task, spec: Spec) -> Draft:
    """Draft the program of model and task, without muP, adapters or frozen models."""
    trace = _jit_init(run, model, task)
    params = abstract_variables(trace, task, spec)['params']
    example = {k: np.zeros((1, *s.shape), s.dtype) for k, s in spec.items()}

    def initialize(loaded: Mapping[str, Any]) -> dict[str, PyTree]:
        return overlay(trace(example)[1], {'params': loaded})

    return Draft(run, model, task, spec, initialize, model, run.optim, params)


def _jit_init(run: Run, model: Any, task: Task) -> Callable:
    """Return the initialization of a model; compiled by itself, so that it is traced once."""
    return jax.jit(partial(init_with_output, model, task, seed=run.seed))


def with_mup(draft: Draft) -> Draft:
    """Scale initial parameters and learning rates by the widths, if `config.optim` asks for it.

    Raises:
      UserError: for a base model that differs in more than widths.
    """
    text, model = draft.run.optim.parametrization, draft.model
    if text == STANDARD:
        return draft
    from vit_jax.optim import mup  # here, as few runs ask for it

    base = model.clone(parent=None, **mup.base_fields(text, fields(model)))
    trace = _jit_init(draft.run, base, draft.task)
    base_params = abstract_variables(trace, draft.task, draft.spec)['params']
    factors = mup.factors(draft.params, base_params, model.mup_kinds)

    def initialize(loaded: Mapping[str, Any]) -> dict[str, PyTree]:
        initial = draft.initialize({})
        initial = {**initial, 'params': mup.scale_initial(initial['params'], factors)}
        return overlay(initial, {'params': loaded})

    return dataclasses.replace(draft, initialize=initialize, factors=factors)


def with_lora(draft: Draft) -> Draft:
    """Train adapters instead of the parameters that they adapt, if `config.lora` has any."""
    options = draft.run.lora
    if not options.rank and options.method == 'lora':
        return draft
    from vit_jax.optim import lora  # here, as few runs have adapters

    adapters, params = lora.make_adapters(options, draft.model, draft.params)
    freeze = (*draft.optim.freeze, adapters.pattern)

    def initialize(loaded: Mapping[str, Any]) -> dict[str, PyTree]:
        return adapters.extend(draft.initialize(loaded), draft.run.seed)

    return dataclasses.replace(
        draft,
        initialize=initialize,
        params=params,
        optim=dataclasses.replace(draft.optim, freeze=freeze),
        step_model=adapters.wrap(draft.model),
        adapters=adapters,
    )


def with_frozen(draft: Draft, frozen: Frozen | None) -> Draft:
    """Keep variables beside the state that are read and never trained."""
    return dataclasses.replace(draft, frozen=frozen) if frozen else draft


def compile_program(
    draft: Draft, layout: sharding.Layout, optimizer: Optimizer, lr: optax.Schedule
) -> Program:
    """Make the state and the steps of a draft; compiled at their first calls."""
    run, task, frozen = draft.run, draft.task, draft.frozen

    def init(params: Mapping[str, Any] | None = None, frozen_variables: Any = None) -> TrainState:
        variables = draft.initialize(params or {})
        decays = run.step.ema_decays
        ema = bool(decays) or optimizer.average is not None
        state = init_state(variables, optimizer.tx, run.seed, ema, decays[1:], task.snapshot)
        frozen_variables = frozen.zeros if frozen and frozen_variables is None else frozen_variables
        return dataclasses.replace(state, frozen=frozen_variables or None)

    abstract_state = jax.eval_shape(init)
    train_step = make_train_step(draft.step_model, task, optimizer, run.step, layout)
    return Program(
        model=draft.model,
        task=task,
        layout=layout,
        init=init,
        abstract_state=abstract_state,
        train_step=layout.compile_train(train_step, abstract_state),
        eval_steps=compile_steps(draft.step_model, task, layout, run.seed),
        lr=lr,
        max_skips=run.step.max_skips,
        frozen=frozen,
        adapters=draft.adapters,
    )


def read_frozen(run: Run, task: Task) -> tuple[Task, Frozen]:
    """Read the models that the task never trains."""
    from vit_jax.config.origin import trusted_names  # here, as few tasks have any
    from vit_jax.inference import frozen

    models = frozen.attach(task, trusted_names(run))
    return models.task, models


def _check_batch_norm(model: Any, layout: sharding.Layout, accum_steps: int) -> None:
    """Raise UserError if a batch norm would see only a part of the global batch."""
    if not (key := getattr(model, 'batch_norm_key', '')):
        return
    needs = f"config.model.{key}='batch' needs the statistics of the whole batch"
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


def abstract_variables(run_once: Callable, task: Task, spec: Spec) -> dict[str, PyTree]:
    """Shapes of the model's variables; checks that the task finds everything it reads.

    Args:
      run_once: Function such as `step.init_with_output`: the outputs and initial variables of a
        batch.
      task: Task of the config.
      spec: Spec of a training example.

    Raises:
      UserError: if the task needs a name that neither the examples nor the outputs have.
    """
    example = {k: jax.ShapeDtypeStruct((1, *s.shape), s.dtype) for k, s in spec.items()}
    outputs: dict[str, Any] = {}
    try:
        jax.eval_shape(task.inputs, example)
        outputs, variables = jax.eval_shape(run_once, example)
        jax.eval_shape(task.loss, outputs, example)
    except KeyError as e:
        if (missing := e.args[0]) in (*outputs, *spec):
            raise
        outputs_note = f', and the model only makes {", ".join(outputs)}' if outputs else ''
        raise UserError(
            f'config.task: {_module(task)} needs {missing!r}: an example of config.data has '
            f'{", ".join(spec)}{outputs_note}'
        ) from e
    return variables


def _module(instance: Any) -> str:
    """Return the last part of the name of the module that defines an object's class."""
    return type(instance).__module__.rpartition('.')[2]
