"""Model FLOPs of a task's calls of the model, for one example.

As in MFU (Chowdhery et al. 2022, appendix B), recomputation is excluded: by `remat`, and in the
second forward pass of `gradients.coupled` in microbatches or under pmap.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from vit_jax.config.run import Sam
from vit_jax.profiling import flops
from vit_jax.tasks.base import FrozenModel, Task

Spec = Mapping[str, Any]  # shape and dtype of one example's arrays


class TrainingFlops(NamedTuple):
    """FLOPs of the forward passes of a training step, for one example.

    Attributes:
      learning: FLOPs of calls with a gradient.
      averaged: FLOPs of calls without a gradient: of the model at averaged parameters, and of
        frozen models such as a teacher.
    """

    learning: int
    averaged: int

    @property
    def forward(self) -> int:
        """FLOPs of all forward passes."""
        return self.learning + self.averaged

    @property
    def total(self) -> int:
        """FLOPs of all passes, forward and backward."""
        return flops.TRAIN_TO_FORWARD * self.learning + self.averaged


def training_flops(model: Any, task: Task, spec: Spec) -> TrainingFlops:
    """Count the FLOPs of `task.outputs` for one example, before `task.augment`."""
    apply = _Counting(model, task.rngs, task.frozen_models)
    jax.eval_shape(functools.partial(task.outputs, apply), _batch_of_one(spec))
    return TrainingFlops(apply.learning, apply.averaged)


def step_flops(sam: Sam, model: Any, task: Task, spec: Spec) -> int:
    """Count the FLOPs of a training step for one example; SAM takes two gradients."""
    return sam.gradients * training_flops(model, task, spec).total


def evaluation_flops(model: Any, task: Task, spec: Spec) -> int:
    """Count the FLOPs of one call of the model on the `task.inputs` of an example."""
    inputs = jax.eval_shape(task.inputs, _batch_of_one(spec))
    return flops.forward_flops(model, *inputs, rngs=task.rngs)


def _batch_of_one(spec: Spec) -> dict[str, jax.ShapeDtypeStruct]:
    return {k: jax.ShapeDtypeStruct((1, *s.shape), s.dtype) for k, s in spec.items()}


class _Counting:
    """A `tasks.base.Apply` that counts FLOPs: each call is traced by itself and returns zeros."""

    train = True

    def __init__(self, model: Any, rngs: tuple[str, ...], frozen: Mapping[str, FrozenModel]):
        self.learning = self.averaged = 0
        self.step = jnp.zeros((), jnp.int32)
        self._model = model
        self._keys = dict.fromkeys(('params', *rngs), jax.random.key(0))
        self.frozen: Mapping[str, Callable[..., Any]] = {
            name: functools.partial(self._call, m.module) for name, m in frozen.items()
        }

    def __call__(self, *inputs: Any, method: str | None = None, **options: Any) -> Any:
        options = {'train': True} | options if method is None else {'method': method} | options
        outputs, count = self._trace(inputs, options)
        self.learning += count
        return outputs

    def average(self, *inputs: Any, method: str | None = None, **options: Any) -> Any:
        options = {'train': False} | options if method is None else {'method': method} | options
        outputs, count = self._trace(inputs, options)
        self.averaged += count
        return outputs

    def _call(self, module: Any, *inputs: Any) -> Any:
        outputs, count = self._trace(inputs, {}, module)
        self.averaged += count
        return outputs

    def _trace(
        self, inputs: tuple[Any, ...], options: dict[str, Any], module: Any = None
    ) -> tuple[Any, int]:
        module = module or self._model
        call = functools.partial(module.init_with_output, self._keys, *inputs, **options)
        jaxpr, (shapes, _) = jax.make_jaxpr(call, return_shape=True)()
        outputs = jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), shapes)
        return outputs, flops.jaxpr_flops(jaxpr)
