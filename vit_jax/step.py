"""Train, eval, predict and attention steps: pure functions of (state, batch)."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import flax.linen as nn
import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import Array

from vit_jax import gradients
from vit_jax.array_types import Int
from vit_jax.config.run import Durations, Step, average_key
from vit_jax.errors import UserError
from vit_jax.nn import stochastic
from vit_jax.optim import param_groups, schedules
from vit_jax.tasks.base import NO_AVERAGE, Snapshot, Task

PyTree = Any
Batch = dict[str, Any]


@flax.struct.dataclass
class TrainState:
    """State of a run between two steps, or its shapes or shardings.

    Attributes:
      step: Number of steps taken, int32; skipped ones count.
      params: float32 parameters.
      opt_state: The optimizer's state.
      collections: Other Flax collections by name, such as `batch_stats`.
      ema: Exponential moving average of `params`, the first of several; or the average that a
        schedule-free optimizer keeps; or None.
      frozen: Variables of the task's frozen models, unchanged and not saved; None without any.
      key: Data of the run's base key, uint32 [2]; the keys of a step are folded from it, so
        that a resumed run has the same randomness as an uninterrupted one.
      other_emas: Further averages by `average_key`, and the task's snapshot by name; or None.
    """

    step: PyTree
    params: PyTree
    opt_state: PyTree
    collections: dict[str, PyTree]
    ema: PyTree | None
    key: PyTree
    frozen: PyTree | None = None
    other_emas: dict[str, PyTree] | None = None

    @property
    def variables(self) -> dict[str, PyTree]:
        """Variables for evaluation, with the averaged parameters if there are any."""
        return {'params': self.params if self.ema is None else self.ema, **self.collections}

    def variables_at(self, decay: float | None) -> dict[str, PyTree]:
        """Variables with the average of a decay; 0 for no average, None for the first."""
        if decay == 0:
            return {'params': self.params, **self.collections}
        other_averages, key = self.other_emas or {}, None if decay is None else average_key(decay)
        return (
            {**self.variables, 'params': other_averages[key]}
            if key in other_averages
            else self.variables
        )


def init_variables(model: Any, task: Task, batch: Batch, seed: int) -> dict[str, PyTree]:
    """Initialize the variables of `model` for batches shaped like `batch`."""
    return init_with_output(model, task, batch, seed)[1]


def init_with_output(
    model: Any, task: Task, batch: Batch, seed: int
) -> tuple[dict[str, jax.Array], dict[str, PyTree]]:
    """Return the task's outputs for `batch`, and the initial variables of the modules it calls."""
    names = ('params', *task.rngs)
    rngs = dict(zip(names, jax.random.split(jax.random.key(seed), len(names)), strict=True))

    def outputs(module: Any) -> dict[str, jax.Array]:
        return task.outputs(InitApply(module), batch)

    initial, variables = nn.init_with_output(outputs, model)(rngs)
    return initial, dict(variables)


def init_state(
    variables: dict[str, PyTree],
    tx: optax.GradientTransformation,
    seed: int,
    ema: bool,
    other_decays: Sequence[float] = (),
    snapshot: Snapshot | None = None,
) -> TrainState:
    """Return the state before the first step.

    Args:
      variables: Initial variables.
      tx: Transformation of the gradients.
      seed: Seed of the run's randomness.
      ema: Whether to keep an average.
      other_decays: Decays of further averages.
      snapshot: Copy of parameters that the task reads.
    """
    collections = dict(variables)
    params = collections.pop('params')
    other_averages = {average_key(decay): jax.tree.map(jnp.copy, params) for decay in other_decays}
    if snapshot:
        other_averages[snapshot.name] = jax.tree.map(jnp.copy, snapshot.select(params))
    return TrainState(
        step=jnp.zeros((), jnp.int32),
        params=params,
        opt_state=tx.init(params),
        collections=collections,
        # A copy: donated buffers must not be shared.
        ema=jax.tree.map(jnp.copy, params) if ema else None,
        key=jax.random.key_data(jax.random.key(seed)),
        other_emas=other_averages or None,
    )


def stream_keys(key: jax.Array, names: tuple[str, ...]) -> dict[str, jax.Array]:
    """One key a name, `fold_in(key, position of the name)`."""
    return {name: jax.random.fold_in(key, i) for i, name in enumerate(names)}


def step_keys(state: TrainState, names: tuple[str, ...]) -> dict[str, jax.Array]:
    """Return the keys of one step: `stream_keys` of `fold_in(base key, step)`."""
    key = jax.random.fold_in(jax.random.wrap_key_data(state.key), state.step)
    return stream_keys(key, names)


TrainStep = Callable[[TrainState, Batch], tuple[TrainState, dict[str, jax.Array]]]


@dataclasses.dataclass(frozen=True)
class Optimizer:
    """Gradient transformation, with what else an update depends on.

    Attributes:
      tx: Transformation of the gradients of all parameters.
      freeze: Patterns of the parameters that `tx` leaves unchanged. They are not differentiated,
        which saves the part of the backward pass that only they need.
      times: Durations of the run, for schedules that are not constant.
      average: Function of the optimizer's state and the parameters that makes `ema`, or None.
    """

    tx: optax.GradientTransformation
    freeze: Sequence[str] = ()
    times: Durations | None = None
    average: Callable[[PyTree, PyTree], PyTree] | None = None


def make_train_step(
    model: Any,
    task: Task,
    optimizer: Optimizer | optax.GradientTransformation,
    step: Step = Step(),  # noqa: B008  frozen
    layout: Any = None,
) -> TrainStep:
    """Make the pure update: augment, differentiate, sum over devices, apply.

    The loss is the weighted sum of its terms' means over the whole global batch: each term of
    `task.loss` has its own count, summed over all microbatches and devices. The loss of a task that
    couples rows is computed once, on all outputs.

    Args:
      model: Model to train.
      task: Task with the loss.
      optimizer: Optimizer, or a transformation that changes all parameters.
      step: `config.step`. With `max_skips`, a step with a metric that is not finite changes only
        the state's `step`; the caller counts such steps in a row, see `Meter`.
      layout: Layout of `runtime.sharding`, for which the step is compiled; None if the batch is
        global.

    Returns:
      A function (state, batch) -> (state, {name: scalar}): the mean of every term, `loss`, which is
      their weighted total, and the norms of the gradient (without frozen parameters), update and
      parameters.
    """
    if not isinstance(optimizer, Optimizer):
        optimizer = Optimizer(optimizer)
    axis_name = layout.train_axis if layout else None
    differentiate = make_gradient(task, step, optimizer.times, layout)

    def train_step(state: TrainState, batch: Batch):
        keys = step_keys(state, ('augment', *task.rngs))
        positions = global_positions(batch, axis_name)
        augment_key = keys.pop('augment')
        with stochastic.example_positions(positions):
            batch = task.augment(augment_key, batch)

        def forward(trained, collections, examples):
            params = gradients.merge_floats(trained, state.params) if optimizer.freeze else trained
            models = task.bind_frozen(state.frozen) if state.frozen else NO_MODELS
            if snapshot := task.snapshot:
                copied = {'params': (state.other_emas or {})[snapshot.name], **state.collections}
                models = {**models, snapshot.name: snapshot.bind(model, copied)}
            ema = None if optimizer.average else state.ema
            apply = TrainApply(model, params, collections, keys, ema, state.step, models)
            with stochastic.example_positions(examples.positions):
                return task.outputs(apply, examples.batch), apply.collections

        examples = gradients.GlobalRows(batch, positions)
        trained = state.params
        if optimizer.freeze:
            trained = param_groups.select_trained(state.params, optimizer.freeze)
        grads, metrics, collections = differentiate(forward, trained, state, examples)
        if optimizer.freeze:  # the optimizer takes a gradient of every parameter
            grads = gradients.merge_floats(grads, jax.tree.map(jnp.zeros_like, state.params))
        updates, opt_state = optimizer.tx.update(grads, state.opt_state, state.params)
        params = optax.apply_updates(state.params, updates)
        norms = {'grad_norm': grads, 'update_norm': updates, 'param_norm': params}
        metrics |= {name: optax.tree.norm(tree) for name, tree in norms.items()}
        changed = {'params': params, 'opt_state': opt_state, 'collections': collections}
        if optimizer.average:
            changed['ema'] = optimizer.average(opt_state, params)
        return dataclasses.replace(state, step=state.step + 1, **changed), metrics

    wrapped = with_average(train_step, step, optimizer.times) if step.ema_decay else train_step
    wrapped = param_groups.with_skips(wrapped) if step.max_skips else wrapped
    return task.snapshot.wrap(wrapped) if task.snapshot else wrapped


def make_gradient(task: Task, step: Step, times: Durations | None, layout: Any) -> Callable:
    """Make the gradient of a task's loss over the global batch; arguments as `make_train_step`.

    Returns:
      A function (forward, trained parameters, state, examples) -> (gradient, metrics, collections).
    """
    axis_name, add_up = (layout.train_axis, layout.add_up) if layout else (None, None)
    split = gradients.Split(step.accum_steps, axis_name, add_up if axis_name else None)
    gradient = gradients.coupled if task.couples_rows else gradients.separable
    sharpen = None
    if step.sam.rho:
        from vit_jax.optim import sharpness  # here, as few runs need two gradients

        sharpen = sharpness.make_sharpness_aware(step.sam, step.sam_schedule, times)

    def differentiate(
        forward: gradients.Forward,
        params: PyTree,
        state: TrainState,
        examples: gradients.GlobalRows,
    ):
        at_step = sharpen(gradient, state.step) if sharpen else gradient
        return at_step(forward, task.loss, params, state.collections, examples, split)

    return differentiate


def with_average(train_step: TrainStep, step: Step, times: Durations | None) -> TrainStep:
    """Update the running averages of the parameters."""
    first_decay, *other_decays_now = schedules.average_decays(step, times)
    other_decays = dict(zip(map(average_key, step.ema_decays[1:]), other_decays_now, strict=True))

    @functools.wraps(train_step)
    def averaging_step(state: TrainState, batch: Batch):
        after, metrics = train_step(state, batch)

        def update(average: PyTree, decay: Any) -> PyTree:
            rate = decay(state.step) if callable(decay) else decay
            return optax.incremental_update(after.params, average, 1 - rate)

        others = dict(state.other_emas or {})
        others |= {key: update(others[key], decay) for key, decay in other_decays.items()}
        ema = update(state.ema, first_decay)
        return dataclasses.replace(after, ema=ema, other_emas=others or None), metrics

    return averaging_step


def global_positions(batch: Batch, axis_name: str | None) -> Int[Array, ' b']:
    """Positions of this device's examples in the global batch, the keys of their randomness."""
    size = len(jax.tree.leaves(batch)[0])
    first = 0 if axis_name is None else jax.lax.axis_index(axis_name) * size
    return first + jnp.arange(size)


def bind(
    model: Any,
    task: Task,
    variables: dict[str, PyTree],
    batch: Batch,
    *,
    seed: int = 0,
    axis_name: str | None = None,
) -> EvalApply:
    """Return the model as a callable outside of training; `method=NAME` calls its other methods.

    Randomness for an example is a function of `seed` and the example's `index`, or of its position
    in the global batch if the batch has no `index`.
    """
    keys = stream_keys(jax.random.key(seed), task.rngs)
    positions = batch['index'] if 'index' in batch else global_positions(batch, axis_name)
    return EvalApply(model, variables, keys, positions)


def make_eval_step(
    model: Any, task: Task, *, seed: int = 0, axis_name: str | None = None
) -> Callable[[dict[str, PyTree], Batch], dict[str, tuple[jax.Array, jax.Array]]]:
    """Return a function (variables, batch) -> {name: (sum, count)} over the whole global batch.

    If the task couples rows, every device of `jax.pmap` computes the whole batch.

    Args:
      seed: Seed of the model's randomness, see `bind`.
      axis_name: Axis of the layout; None if the batch is global.
    """

    def eval_step(variables: dict[str, PyTree], batch: Batch):
        axis = None if task.couples_rows else axis_name
        if task.couples_rows:
            batch = gradients.gather(batch, axis_name)
        apply = bind(model, task, variables, batch, seed=seed, axis_name=axis)
        sums = task.evaluate(apply, batch)
        return sums if axis is None else jax.lax.psum(sums, axis)

    return eval_step


def make_predict_step(
    model: Any, task: Task, *, seed: int = 0, axis_name: str | None = None
) -> Callable[[dict[str, PyTree], Batch], tuple[dict[str, jax.Array], Batch]]:
    """Make a function (variables, batch) -> (predictions, the batch's small arrays).

    Both have all rows of the global batch, so that every process sees all predictions. Larger
    arrays, such as images, stay on the devices: the source has them, by `index`. Where a task
    couples rows, every device of `jax.pmap` computes the whole batch.

    Args:
      seed: Seed of the model's randomness, see `bind`.
      axis_name: Axis of the layout; None if the batch is global.
    """

    def predict_step(variables: dict[str, PyTree], batch: Batch):
        axis = None if task.couples_rows else axis_name
        if task.couples_rows:
            batch = gradients.gather(batch, axis_name)
        apply = bind(model, task, variables, batch, seed=seed, axis_name=axis)
        small = {name: x for name, x in batch.items() if jnp.ndim(x) <= 2}
        rows = task.predict(apply, batch), small
        return rows if axis is None else jax.lax.all_gather(rows, axis, tiled=True)

    return predict_step


def make_attention_step(
    model: Any, task: Task, *, seed: int = 0, axis_name: str | None = None
) -> Callable[[dict[str, PyTree], Batch], tuple[PyTree, PyTree, tuple[Any, ...]]]:
    """Return a function (variables, batch) -> (outputs, intermediates, the model's inputs).

    `model.attention_maps` computes attention maps from the last two. The layout of intermediates is
    private to the model, so nothing is gathered: under `jax.pmap` every device needs the whole
    batch.

    Args:
      seed: Seed of the model's randomness, see `bind`.
      axis_name: Axis of the layout; None if the batch is global.
    """

    def attention_step(variables: dict[str, PyTree], batch: Batch):
        apply = bind(model, task, variables, batch, seed=seed, axis_name=axis_name)
        inputs = task.attention_inputs(apply, batch)
        outputs, sown = apply(*inputs, mutable=['intermediates'])
        return outputs, sown.get('intermediates', {}), inputs

    return attention_step


Keys = dict[str, jax.Array]
AFTER_TRAINING: Any = np.int32(2**30)  # adding to this step does not overflow
NO_MODELS: Mapping[str, Callable[..., Any]] = MappingProxyType({})


@dataclasses.dataclass(eq=False)
class TrainApply:
    """Model in training, as a function of its inputs.

    Attributes:
      model: Linen module.
      params: parameters.
      collections: other variables, after the calls so far.
      keys: keys of the step by random stream.
      ema: average of the parameters, if there is one.
      step: number of steps taken; skipped ones count.
      frozen: the task's frozen models as functions.
    """

    model: Any
    params: PyTree
    collections: PyTree
    keys: Keys
    ema: PyTree | None
    step: Int[Array, '']
    frozen: Mapping[str, Callable[..., Any]] = dataclasses.field(default_factory=dict)
    calls: int = dataclasses.field(default=0, init=False)
    train = True

    def __call__(self, *inputs: Any, method: str | None = None, **options: Any) -> Any:
        options = {'train': True} | options if method is None else {'method': method} | options
        outputs, collections = self.model.apply(
            {'params': self.params, **self.collections},
            *inputs,
            rngs=self._next_keys(),
            mutable=list(self.collections),
            **options,
        )
        self.collections = {**self.collections, **collections}
        return outputs

    def average(self, *inputs: Any, method: str | None = None, **options: Any) -> Any:
        if self.ema is None:
            raise UserError(NO_AVERAGE)
        options = {'train': False} | options if method is None else {'method': method} | options
        variables = {'params': self.ema, **self.collections}
        outputs = self.model.apply(variables, *inputs, rngs=self._next_keys(), **options)
        return jax.lax.stop_gradient(outputs)

    def _next_keys(self) -> Keys:
        """Return the keys of the step for the first call, others for each further one."""
        number, self.calls = self.calls, self.calls + 1
        if not number:
            return self.keys
        return {name: jax.random.fold_in(key, number) for name, key in self.keys.items()}


class EvalApply:
    """Model in evaluation, as a function of its inputs; with averaged parameters, if any.

    Further keywords of a call go to `Module.apply`; `mutable=['intermediates']` also returns those.
    """

    train, step, frozen = False, AFTER_TRAINING, NO_MODELS

    def __init__(self, model: Any, variables: PyTree, keys: Keys, positions: Int[Array, ' b']):
        self._model, self._variables = model, variables
        self._keys, self._positions = keys, positions

    def __call__(self, *inputs: Any, method: str | None = None, **options: Any) -> Any:
        options |= {'train': False} if method is None else {'method': method}
        with stochastic.example_positions(self._positions):
            return self._model.apply(self._variables, *inputs, rngs=self._keys, **options)

    average = __call__


class InitApply:
    """Module during initialization, as a function: its calls create its variables."""

    train, step, frozen = False, AFTER_TRAINING, NO_MODELS

    def __init__(self, module: Any):
        self._module = module

    def __call__(self, *inputs: Any, method: str | None = None, **options: Any) -> Any:
        options = {'train': False} | options if method is None else options
        return getattr(self._module, method or '__call__')(*inputs, **options)

    average = __call__
