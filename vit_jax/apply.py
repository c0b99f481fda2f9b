"""The model as a task calls it: in training, in evaluation and at initialization.

These are `tasks.base.Apply`.
"""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
from jax import Array

from vit_jax.array_types import Int
from vit_jax.errors import UserError
from vit_jax.nn import stochastic

PyTree = Any
Keys = dict[str, jax.Array]
AFTER_TRAINING: Any = np.int32(2**30)  # leaves room for what is added to a step


class Training:
    """The model in training.

    Attributes:
      collections: variables other than parameters, after the calls so far.
      step: number of steps taken; skipped ones count.
    """

    train = True

    def __init__(
        self,
        model: Any,
        params: PyTree,
        collections: PyTree,
        keys: Keys,
        ema: PyTree | None,
        step: Int[Array, ''],
    ):
        self.collections, self.step = collections, step
        self._model, self._params, self._keys, self._ema = model, params, keys, ema
        self._calls = 0

    def __call__(self, *inputs: Any, method: str | None = None, **options: Any) -> Any:
        options = {'train': True} | options if method is None else {'method': method} | options
        outputs, collections = self._model.apply(
            {'params': self._params, **self.collections},
            *inputs,
            rngs=self._next_keys(),
            mutable=list(self.collections),
            **options,
        )
        self.collections = {**self.collections, **collections}
        return outputs

    def average(self, *inputs: Any, method: str | None = None, **options: Any) -> Any:
        if self._ema is None:
            raise UserError('config.step.ema_decay=0: the task needs an average, as of 0.996')
        options = {'train': False} | options if method is None else {'method': method} | options
        variables = {'params': self._ema, **self.collections}
        outputs = self._model.apply(variables, *inputs, rngs=self._next_keys(), **options)
        return jax.lax.stop_gradient(outputs)

    def _next_keys(self) -> Keys:
        """The keys of the step for the first call, others for each further one."""
        number, self._calls = self._calls, self._calls + 1
        if not number:
            return self._keys
        return {name: jax.random.fold_in(key, number) for name, key in self._keys.items()}


class Evaluation:
    """The model in evaluation, with averaged parameters if there are any.

    Further keywords of a call go to `Module.apply`; `mutable=['intermediates']` also returns those.
    """

    train, step = False, AFTER_TRAINING

    def __init__(self, model: Any, variables: PyTree, keys: Keys, positions: Int[Array, ' b']):
        self._model, self._variables = model, variables
        self._keys, self._positions = keys, positions

    def __call__(self, *inputs: Any, method: str | None = None, **options: Any) -> Any:
        options |= {'train': False} if method is None else {'method': method}
        with stochastic.example_positions(self._positions):
            return self._model.apply(self._variables, *inputs, rngs=self._keys, **options)

    average = __call__


class Initial:
    """The module during initialization: its calls create its variables."""

    train, step = False, AFTER_TRAINING

    def __init__(self, module: Any):
        self._module = module

    def __call__(self, *inputs: Any, method: str | None = None, **options: Any) -> Any:
        if method is None:
            return self._module(*inputs, **{'train': False} | options)
        return getattr(self._module, method)(*inputs, **options)

    average = __call__
