"""Speed of a model: timings of the steps that training and evaluation compile.

Needs only jax, flax and optax, so that it runs without a data stack.
"""

from __future__ import annotations

import dataclasses
import os
import platform
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from vit_jax.config.run import Durations, Run, Schedule, Step
from vit_jax.optim import make as optim
from vit_jax.profiling import flops, task_flops
from vit_jax.profiling.task_flops import Spec
from vit_jax.runtime import mesh, sharding
from vit_jax.runtime.environment import versions
from vit_jax.step import (
    Optimizer,
    TrainState,
    init_state,
    init_variables,
    make_eval_step,
    make_train_step,
)
from vit_jax.tasks.base import Task

if TYPE_CHECKING:
    from vit_jax.optim.lora import Adapters


@dataclasses.dataclass(frozen=True)
class Timing:
    """Timing of one step.

    Attributes:
      batch_size: Rows of the global batch.
      compile_sec: Seconds of tracing and compiling: the first call minus one step.
      step_sec: Median seconds per step.
      step_sec_p10, step_sec_p90: 10th and 90th percentile of seconds per step.
      images_per_sec: Images, or pairs of sequences, per second of all devices.
      flops_per_sec: Model FLOPs per second, without recomputation.
      mfu: Share of the devices' peak; None if unknown.
      peak_bytes: Peak of one device's memory since the process began; None if not reported.
    """

    batch_size: int
    compile_sec: float
    step_sec: float
    step_sec_p10: float
    step_sec_p90: float
    images_per_sec: float
    flops_per_sec: float
    mfu: float | None
    peak_bytes: int | None


def time_forward(
    model: Any,
    task: Task,
    layout: sharding.Layout,
    spec: Spec,
    *,
    batch_size: int,
    per_row: float = 1,
    steps: int = 20,
    seed: int = 0,
    adapters: Adapters | None = None,
) -> Timing:
    """Time the eval step: the model's forward pass, and the sums of its metrics.

    A row of the batch holds `per_row` examples on average; `adapters` of a LoRA run are merged in
    each step.
    """
    batch = real_rows(batch_size) | synthetic_batch(spec, batch_size, seed)
    variables = layout.create(lambda: _init_variables(model, task, spec, seed, adapters))
    wrapped = adapters.wrap(model) if adapters else model
    compiled = layout.compile_eval(make_eval_step(wrapped, task, axis_name=layout.axis_name))
    on_device = layout.put_batch(batch)
    flops_per_row = task_flops.evaluation_flops(model, task, spec)
    seconds = time_calls(lambda: compiled(variables, on_device), steps)
    return _timing(layout, batch_size, per_row, flops_per_row, seconds)


def time_train(
    model: Any,
    task: Task,
    tx: Callable[[Any], optax.GradientTransformation],
    layout: sharding.Layout,
    spec: Spec,
    *,
    batch_size: int,
    per_row: float = 1,
    steps: int = 20,
    seed: int = 0,
    freeze: Sequence[str] = (),
    frozen: Any = None,
    adapters: Adapters | None = None,
    step: Step = Step(),  # noqa: B008  frozen
) -> Timing:
    """Time the train step; `tx` makes the optimizer from the parameters' shapes.

    A row of the batch holds `per_row` examples on average; `frozen` are variables of the task's
    frozen models, `adapters` the adapters of `config.lora`; `freeze` and `step` are arguments of
    `step.make_train_step`, whose schedules have to be constant.
    """
    batch = synthetic_batch(spec, batch_size, seed)

    def initial() -> Any:
        return _init_variables(model, task, spec, seed, adapters)

    optimizer = tx(jax.eval_shape(initial)['params'])

    def init(variables: Any = None) -> TrainState:
        decays = step.ema_decays
        has_average = bool(decays)
        state = init_state(initial(), optimizer, seed, has_average, decays[1:], task.snapshot)
        return dataclasses.replace(state, frozen=variables)

    frozen_args = (frozen,) if frozen else ()

    wrapped = adapters.wrap(model) if adapters else model
    train_step = make_train_step(wrapped, task, Optimizer(optimizer, freeze), step, layout)
    compiled = layout.compile_train(train_step, jax.eval_shape(init, *frozen_args))
    on_device, state = layout.put_batch(batch), layout.create(init, *frozen_args)

    def call() -> Any:
        nonlocal state
        state, metrics = compiled(state, on_device)
        return metrics

    flops_per_row = task_flops.step_flops(step.sam, model, task, spec)
    return _timing(layout, batch_size, per_row, flops_per_row, time_calls(call, steps))


def _init_variables(
    model: Any, task: Task, spec: Spec, seed: int, adapters: Adapters | None
) -> Any:
    """Initialize variables, including adapters."""
    variables = init_variables(model, task, blank_example(spec), seed)
    return adapters.extend(variables, seed) if adapters else variables


def time_calls(call: Callable[[], Any], steps: int, warmup: int = 3) -> np.ndarray:
    """Time the first call, then the intervals between the ends of `steps` further calls.

    As in training, the next call is queued while one runs, so dispatch time does not count.
    """
    start = time.perf_counter()
    jax.block_until_ready(call())
    first_seconds = time.perf_counter() - start
    for _ in range(warmup):
        running = call()
    jax.block_until_ready(running)
    running, ends = call(), []
    for _ in range(steps + 1):
        queued = call()
        jax.block_until_ready(running)
        ends.append(time.perf_counter())
        running = queued
    jax.block_until_ready(running)
    return np.array([first_seconds, *np.diff(ends)])


def synthetic_batch(spec: Spec, batch_size: int, seed: int) -> dict[str, np.ndarray]:
    """Make a batch that any task accepts: random bytes, floats in [0, 1), booleans True.

    An integer scalar such as a label is 0; integer arrays are 1, because 0 is the id of padding.
    """
    rng, slots = np.random.default_rng(seed), spec['mask'].shape if 'mask' in spec else ()
    index_and_mask = real_rows(batch_size, slots)

    def draw(shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
        if dtype == np.uint8:
            return rng.integers(0, 256, shape, np.uint8)
        if np.issubdtype(dtype, np.floating):
            return rng.random(shape, np.float32).astype(dtype)
        return np.full(shape, dtype.kind == 'b' or len(shape) > 1, dtype)

    shapes = {name: (batch_size, *s.shape) for name, s in spec.items()}
    return {
        name: index_and_mask[name]
        if name in index_and_mask
        else draw(shape, np.dtype(spec[name].dtype))
        for name, shape in shapes.items()
    }


def real_rows(batch_size: int, slots: tuple[int, ...] = ()) -> dict[str, np.ndarray]:
    """Make `index` and `mask` of a batch without padding; see `Plan.slots`."""
    mask = np.ones((batch_size, *slots), np.float32)
    return {'index': np.arange(mask.size, dtype=np.int32).reshape(mask.shape), 'mask': mask}


def blank_example(spec: Spec) -> dict[str, jax.Array]:
    """Make a batch of one example, all zeros, to initialize a model."""
    return {k: jnp.zeros((1, *s.shape), s.dtype) for k, s in spec.items()}


def image_spec(size: int, channels: int = 3) -> dict[str, jax.ShapeDtypeStruct]:
    """Return shapes and dtypes of a classification example with a square image."""
    return {
        'image': jax.ShapeDtypeStruct((size, size, channels), np.uint8),
        'label': jax.ShapeDtypeStruct((), np.int32),
    }


def environment(layout: sharding.Layout) -> dict[str, Any]:
    """Describe the environment of a measurement: devices, machine, versions."""
    device = layout.mesh.devices.flat[0]
    return {
        'device_kind': device.device_kind,
        'platform': device.platform,
        'num_devices': layout.mesh.size,
        'num_processes': jax.process_count(),
        'layout': type(layout).__name__.lower(),
        'machine': platform.machine(),
        'system': f'{platform.system()} {platform.release()}',
        'cpu_count': os.cpu_count(),
        'xla_flags': os.environ.get('XLA_FLAGS', ''),
        'versions': versions(),
    }


def _timing(
    layout: sharding.Layout,
    batch_size: int,
    per_row: float,
    flops_per_row: int,
    seconds: np.ndarray,
) -> Timing:
    first_seconds, remaining = seconds[0], seconds[1:]
    step, p10, p90 = (float(np.quantile(remaining, q)) for q in (0.5, 0.1, 0.9))
    device = layout.mesh.local_devices[0]
    total = flops_per_row * batch_size
    return Timing(
        batch_size=batch_size,
        compile_sec=max(float(first_seconds) - step, 0.0),
        step_sec=step,
        step_sec_p10=p10,
        step_sec_p90=p90,
        images_per_sec=batch_size * per_row / step,
        flops_per_sec=total / step,
        mfu=flops.mfu(total, step, layout.mesh.size, device.device_kind),
        peak_bytes=(device.memory_stats() or {}).get('peak_bytes_in_use'),
    )


@dataclasses.dataclass(frozen=True)
class PreparedSteps:
    """Steps of a config, ready for timing.

    Attributes:
      run: Complete config.
      rows: Rows per batch.
      model, task: Model and task of the config.
      layout: Device layout.
      frozen: Variables of the task's frozen models, or empty.
    """

    run: Run
    rows: int
    model: Any
    task: Task
    layout: sharding.Layout
    frozen: Any = None

    def forward(self, spec: Spec, per_row: float = 1, steps: int = 20) -> Timing:
        """Time the eval step, see `benchmark.time_forward`."""
        return time_forward(
            self.model,
            self.task,
            self.layout,
            spec,
            batch_size=self.rows,
            per_row=per_row,
            steps=steps,
            adapters=self._adapters(spec),
        )

    def train(self, spec: Spec, per_row: float = 1, steps: int = 20) -> Timing:
        """Time the train step, see `benchmark.time_train`."""
        adapters = self._adapters(spec)
        freeze = (*self.run.optim.freeze, *([adapters.pattern] if adapters else ()))
        # Schedules would need the length of the run, and cost nothing.
        optimizer = dataclasses.replace(
            self.run.optim,
            schedule=Schedule(),
            decay_schedule=Schedule(),
            lr_delays=(),
            freeze=freeze,
        )

        def tx(params: Any) -> Any:
            return optim.make_optimizer(
                params, optimizer, Durations(1, 1, 1), self.model.layer_order()
            )[0]

        return time_train(
            self.model,
            self.task,
            tx,
            self.layout,
            spec,
            batch_size=self.rows,
            per_row=per_row,
            steps=steps,
            freeze=freeze,
            frozen=self.frozen,
            adapters=adapters,
            step=dataclasses.replace(
                self.run.step, ema_schedule=Schedule(), sam_schedule=Schedule(), ema_start=0
            ),
        )

    def _adapters(self, spec: Spec) -> Adapters | None:
        if not self.run.lora.is_used:
            return None
        from vit_jax.optim import lora

        shapes = jax.eval_shape(lambda: _init_variables(self.model, self.task, spec, 0, None))
        return lora.make_adapters(self.run.lora, self.model, shapes['params'])[0]


def prepare(run: Run, rows: int) -> PreparedSteps:
    """Prepare to time the steps of a complete run for batches of `rows` rows.

    Raises:
      UserError: for a mistake in the config, or a batch that its devices cannot share.
    """
    from vit_jax.config import objects

    model, task = objects.make_model(run.model), objects.make_task(run.task)
    variables: Any = None
    if task.frozen:
        from vit_jax.config.origin import trusted_names
        from vit_jax.inference import frozen

        attached = frozen.attach(task, trusted_names(run))
        task, variables = attached.task, attached.variables
    devices = mesh.usable_devices()
    layout = sharding.make_layout(devices, run.parallel)
    sharding.check_batch(
        layout,
        rows,
        accum_steps=run.step.accum_steps,
        multiple=task.multiple,
        reason=task.multiple_reason,
    )
    return PreparedSteps(run, rows, model, task, layout, variables)
