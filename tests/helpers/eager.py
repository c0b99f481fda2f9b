"""Operations outside of `jax.jit` that NumPy does exactly, without compiling a program.

JAX compiles one for each operation and each shape, 20 ms the first time in a process; tests make
thousands when they prepare arrays and index results. XLA keeps what it may round otherwise, such as
divisions by one number, and arrays that were put on a device on purpose.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
import pytest
from jax._src import array, core, dtypes
from jax._src.lax import lax, slicing

HOST = (np.ndarray, np.generic, bool, int, float)
OPERATORS = ('add', 'radd', 'sub', 'rsub', 'mul', 'rmul')
COMPARISONS = ('eq', 'ne', 'lt', 'le', 'gt', 'ge')


def compute_on_the_host(patch: pytest.MonkeyPatch) -> None:
    """Lets NumPy move numbers, and combine two by an operator."""
    for primitive, move in MOVES.items():
        patch.setattr(primitive, 'impl', functools.partial(_moved, primitive, primitive.impl, move))
    for name in (*OPERATORS, *COMPARISONS):
        method = f'__{name}__'
        patch.setattr(array.ArrayImpl, method, _operator(method, getattr(array.ArrayImpl, method)))


def _moved(primitive: Any, usual: Callable, move: Callable, *args: Any, **params: Any) -> Any:
    result = None
    if all(map(_is_plain, args)):
        found = _shaped(primitive, tuple(params.items()), *map(core.typeof, args))
        if found is not None:
            params.pop('sharding', None)
            result = _on_device(move(*map(np.asarray, args), **params), found, args)
    return usual(*args, **params) if result is None else result


@functools.lru_cache(maxsize=10_000)
def _shaped(primitive: Any, params: tuple, *given: Any) -> Any:
    """What the operation yields, or None if NumPy does not do exactly the same."""
    named = dict(params)
    found, _ = primitive.abstract_eval(*given, **named)
    if any(jax.dtypes.issubdtype(x.dtype, jax.dtypes.extended) for x in (*given, found)):
        return None
    old, new = given[0].dtype if given else found.dtype, found.dtype
    is_rounded = new != old and new.kind in 'iu' and old.kind not in 'biu'
    return None if is_rounded or named.get('sharding') else found


def _operator(method: str, usual: Callable) -> Callable:
    is_number = method.strip('_') in OPERATORS

    @functools.wraps(usual)
    def combined(self: Any, other: Any) -> Any:
        result = None
        if core.trace_ctx.is_top_level() and _is_plain(self) and _is_plain(other):
            dtype, weak = dtypes.result_type(self, other, return_weak_type_flag=True)
            if dtype.kind in 'fiu':
                with np.errstate(all='ignore'):
                    found = getattr(np.asarray(self, dtype), method)(np.asarray(other, dtype))
                shaped = core.ShapedArray(found.shape, found.dtype, weak_type=weak and is_number)
                result = _on_device(found, shaped, (self, other))
        return usual(self, other) if result is None else result

    return combined


def _is_plain(x: Any) -> bool:
    """Whether it is on the host, or nobody chose its device."""
    return isinstance(x, HOST) or (isinstance(x, array.ArrayImpl) and not x._committed)


def _on_device(found: Any, shaped: Any, args: tuple) -> Any:
    """The array where the arguments are, or None if they are somewhere else."""
    made = jax.device_put(np.array(found, shaped.dtype, order='C'))
    if any(x.sharding != made.sharding for x in args if isinstance(x, array.ArrayImpl)):
        return None
    return array.ArrayImpl(shaped, made.sharding, [made], committed=False, _skip_checks=True)


def _broadcast(x: np.ndarray, *, shape: tuple, broadcast_dimensions: tuple) -> np.ndarray:
    sides = [1] * len(shape)
    for place, side in zip(broadcast_dimensions, x.shape, strict=True):
        sides[place] = side
    return np.broadcast_to(x.reshape(sides), shape)


def _slice(x: np.ndarray, *starts: Any, slice_sizes: tuple) -> np.ndarray:
    first = [
        min(max(int(i), 0), side - size)
        for i, side, size in zip(starts, x.shape, slice_sizes, strict=True)
    ]
    return x[tuple(slice(i, i + size) for i, size in zip(first, slice_sizes, strict=True))]


def _strided(x: np.ndarray, *, start_indices: tuple, limit_indices: tuple, strides: Any) -> Any:
    strides = strides or [None] * x.ndim
    return x[tuple(map(slice, start_indices, limit_indices, strides))]


def _iota(*, dtype: Any, shape: tuple, dimension: int) -> np.ndarray:
    sides = [-1 if i == dimension else 1 for i in range(len(shape))]
    return np.broadcast_to(np.arange(shape[dimension]).astype(dtype).reshape(sides), shape)


MOVES: dict[Any, Callable] = {
    lax.stage_p: lambda x: x,
    lax.broadcast_in_dim_p: _broadcast,
    lax.convert_element_type_p: lambda x, new_dtype, weak_type: x.astype(new_dtype),
    lax.reshape_p: lambda x, new_sizes, dimensions: x.reshape(new_sizes),
    lax.squeeze_p: lambda x, dimensions: x.squeeze(dimensions),
    lax.transpose_p: lambda x, permutation: x.transpose(permutation),
    lax.concatenate_p: lambda *xs, dimension: np.concatenate(xs, dimension),
    lax.rev_p: lambda x, dimensions: np.flip(x, dimensions),
    lax.iota_p: _iota,
    slicing.slice_p: _strided,
    slicing.dynamic_slice_p: _slice,
}
