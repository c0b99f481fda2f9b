"""From a config to everything that a run needs; nothing is compiled or written yet."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import optax
from ml_collections import ConfigDict

from vit_jax import step as step_lib
from vit_jax.config import construct, durations, fill, sections
from vit_jax.data import specs
from vit_jax.interop import adapt
from vit_jax.optim import make as optim
from vit_jax.optim import param_groups
from vit_jax.runtime import sharding
from vit_jax.trainer import evaluate as evaluate_lib


@dataclasses.dataclass(frozen=True)
class Parts:
    """What `build` makes of a config."""

    config: ConfigDict
    source: Any
    transforms: Any
    epoch: specs.Epoch
    model: Any
    task: Any
    layout: sharding.Layout
    total_steps: int
    every: dict[str, int]
    every_eval: dict[str, int]
    keep_every: int
    schedule: optax.Schedule
    train_step: Callable
    eval_step: Callable
    evals: dict[str, evaluate_lib.Evaluation]
    init: Callable[..., step_lib.TrainState]
    abstract_state: step_lib.TrainState


def build(config: ConfigDict, devices: Sequence[jax.Device] | None = None) -> Parts:
    """Opens the data and builds everything that a run needs.

    Raises:
      UserError: for any mistake in the config that needs the data or the devices to be seen.
    """
    source, transforms = evaluate_lib.open_data(config.data)
    fill.num_classes(config, source.info.num_classes)
    fill.vocab_size(config, source.info.vocab_size)
    epoch = specs.epoch(source, transforms, config.batch_size)
    model, task = construct.model_and_task(config)
    layout = sharding.make_layout(**sections.fields(config, 'parallel'), devices=devices)
    step, every = (sections.fields(config, name) for name in ('step', 'every'))
    for rows in epoch.rows:
        sharding.check_batch(
            layout,
            config.batch_size,
            rows=rows,
            accum_steps=step['accum_steps'],
            multiple=getattr(task, 'multiple', 1),
            reason=getattr(task, 'multiple_reason', ''),
        )
    run = durations.of_run(config, epoch.batch_size, epoch.examples)
    spec = specs.element_spec(source, transforms)
    example = {k: jnp.zeros((1, *s.shape), s.dtype) for k, s in spec.items()}

    def init_variables():
        return step_lib.init_variables(model, task, example, config.seed)

    tx, schedule = optim.make(
        jax.eval_shape(init_variables)['params'],
        run.total_steps,
        run.steps,
        param_groups.layer_order(model),
        **config.optim.to_dict(),
    )

    def init(params=None):
        variables = adapt.overlay(init_variables(), {'params': params or {}})
        return step_lib.init_state(variables, tx, config.seed, ema=step['ema_decay'] > 0)

    abstract_state = jax.eval_shape(init)
    train_step = step_lib.make_train_step(model, task, tx, axis_name=layout.axis_name, **step)
    eval_steps = evaluate_lib.compile_steps(model, task, layout, config.seed)
    return Parts(
        config=config,
        source=source,
        transforms=transforms,
        epoch=epoch,
        model=model,
        task=task,
        layout=layout,
        total_steps=run.total_steps,
        every={k: run.steps(v, f'config.every.{k}') for k, v in every.items()},
        every_eval={
            name: run.steps(section.get('every', every['eval']), f'config.evals.{name}.every')
            for name, section in config.evals.items()
        },
        keep_every=run.steps(sections.fields(config, 'checkpoint')['keep_every']),
        schedule=schedule,
        train_step=layout.compile_train(train_step, abstract_state),
        eval_step=eval_steps.evaluate,
        evals=evaluate_lib.open_evals(config, layout, eval_steps),
        init=init,
        abstract_state=abstract_state,
    )


def model_inputs(
    parts: Parts, spec: dict[str, specs.ArraySpec]
) -> tuple[jax.ShapeDtypeStruct, ...]:
    """Shapes of what the model gets for one training example of the shapes `spec`."""
    one = {k: jax.ShapeDtypeStruct((1, *s.shape), s.dtype) for k, s in spec.items()}
    return jax.eval_shape(parts.task.inputs, one)


def image_size(parts: Parts) -> tuple[int, int] | None:
    """Height and width in pixels of the images that the model gets; None if it gets none."""
    images = model_inputs(parts, parts.epoch.shapes[-1][1])[0]
    return images.shape[1:3] if len(images.shape) == 4 else None


def hardware(parts: Parts) -> str:
    """What the run computes on, as `8 x TPU v4 (jit)`."""
    mesh, layout = parts.layout.mesh, type(parts.layout).__name__.lower()
    return f'{mesh.size} x {mesh.devices.flat[0].device_kind} ({layout})'
