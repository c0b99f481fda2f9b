"""Traces that tests repeat, made once in a process: half of the suite's time is tracing models."""

from __future__ import annotations

import functools
import types
from collections.abc import Callable, Hashable
from typing import Any

import jax
import pytest
from flax import linen as nn
from flax.core import meta
from flax.core.scope import Scope
from jax._src import config

INITS = ('init', 'init_with_output')


def remember_shapes(patch: pytest.MonkeyPatch) -> None:
    """Lets `jax.eval_shape(model.init, ...)` trace each model once for inputs of the same shapes.

    Two models are the same if all of their fields are.
    """
    trace = jax.eval_shape
    known: dict[Hashable, Any] = {}

    @functools.wraps(trace)
    def eval_shape(fun: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        key = _key_of(fun, args, kwargs)
        if key is None:
            return trace(fun, *args, **kwargs)
        if key not in known:
            known[key] = trace(fun, *args, **kwargs)
        return jax.tree.map(lambda x: x, known[key])  # dicts of its own

    patch.setattr(jax, 'eval_shape', eval_shape)


def _key_of(fun: Callable[..., Any], args: Any, kwargs: Any) -> Hashable | None:
    module = getattr(fun, '__self__', None)
    if not isinstance(module, nn.Module) or fun.__name__ not in INITS:
        return None
    leaves, tree = jax.tree.flatten((args, kwargs))
    try:
        shapes = tuple(
            (jax.numpy.shape(x), x.dtype, getattr(x, 'weak_type', False)) for x in leaves
        )
        key = fun.__name__, type(module), module, tree, shapes, config.trace_context()
        hash(key)
    except (AttributeError, TypeError):
        return None
    return key


def remember_initializers(patch: pytest.MonkeyPatch) -> None:
    """Lets Flax compare the shape of a parameter with that of its initializer once for each shape.

    It traces the initializer at every use of a parameter.
    """
    check = Scope.param
    known: set[Hashable] = set()

    @functools.wraps(check)
    def param(self: Scope, name: str, init_fn: Any, *args: Any, unbox: bool = True, **kwargs: Any):
        if not self.has_variable('params', name):
            return check(self, name, init_fn, *args, unbox=unbox, **kwargs)
        value = self.get_variable('params', name)
        value = meta.unbox(value) if unbox else value
        try:
            key = value_of(init_fn), args, tuple(kwargs.items()), value.shape
            is_known = key in known
        except (AttributeError, TypeError, ValueError):  # of other kinds, or an empty cell
            return check(self, name, init_fn, *args, unbox=unbox, **kwargs)
        if is_known:
            self.reserve(name, 'params')
            return value
        value = check(self, name, init_fn, *args, unbox=unbox, **kwargs)
        known.add(key)
        return value

    patch.setattr(Scope, 'param', param)


def value_of(function: Any) -> Hashable:
    """Functions that are made alike, with the same values around them, have the same value."""
    if isinstance(function, functools.partial):
        keywords = tuple(function.keywords.items())
        return value_of(function.func), tuple(map(value_of, function.args)), keywords
    if not isinstance(function, types.FunctionType) or not function.__closure__:
        return function
    around = tuple(value_of(cell.cell_contents) for cell in function.__closure__)
    return function.__code__, function.__defaults__, around
