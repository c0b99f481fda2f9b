"""Self-attention of short sequences as one kernel of TPUs: the scores never leave VMEM.

Each program of the grid takes the queries, keys and values of one example, [N 3D], and computes
softmax(Q K^T / sqrt(K)) V of all its heads. The derivative computes the probabilities again instead
of reading them from HBM (Dao et al., 2022, arXiv:2205.14135, section 3.1). The kernels of
`jax.experimental.pallas.ops.tpu` are for sequences that do not fit VMEM, in blocks of 128.

Heads stay side by side along D, as their projection writes them. The products of a head run over
the whole registers of 128 lanes in which it lies, with its neighbours' lanes set to zero: a matrix
unit is that wide anyway, and nothing has to be moved to the first lane.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Float

LANES, SUBLANES = 128, 16
# Matrices [N N] in float32 that the backward pass of a head takes, of which some are spilt.
SCORES = 6
# Bytes of such matrices of the heads that the forward pass unrolls, so that they overlap.
UNROLLED = 2**21


def vmem_bytes(tokens: int, width: int, num_heads: int, itemsize: int) -> int:
    """What the backward pass takes of VMEM, generously.

    Args:
      tokens: N.
      width: D.
      num_heads: H.
      itemsize: bytes of an element of queries, keys and values.
    """
    rows = _round_up(tokens, SUBLANES)
    # qkv, its gradient and that of the result; each twice, for the example before or after.
    arrays = 2 * 7 * rows * _round_up(width, LANES) * itemsize
    heads = _group(width, num_heads) * num_heads // width
    return arrays + UNROLLED + SCORES * heads * _score_bytes(tokens)


@functools.partial(jax.custom_vjp, nondiff_argnums=(1, 2))
def self_attention(
    qkv: Float[Array, 'B N E'], num_heads: int, interpret: bool = False
) -> Float[Array, 'B N D']:
    """softmax(Q K^T / sqrt(K)) V of every head, with the softmax in float32.

    Args:
      qkv: queries, keys and values one after the other, E = 3D; of each the heads, K columns each.
      num_heads: H; divides D.
      interpret: run it as plain JAX, on any device.
    """
    return _forward(qkv, num_heads, interpret)


def _forward(qkv: Array, num_heads: int, interpret: bool) -> Array:
    out = jax.ShapeDtypeStruct((*qkv.shape[:2], qkv.shape[2] // 3), qkv.dtype)
    return _call(_forward_kernel, 2, num_heads, interpret, out, qkv)


def _keep(qkv: Array, num_heads: int, interpret: bool) -> tuple[Array, Array]:
    return _forward(qkv, num_heads, interpret), qkv


def _backward(num_heads: int, interpret: bool, qkv: Array, grad: Array) -> tuple[Array]:
    out = jax.ShapeDtypeStruct(qkv.shape, qkv.dtype)
    return (_call(_backward_kernel, 5, num_heads, interpret, out, qkv, grad),)


self_attention.defvjp(_keep, _backward)


def _call(
    kernel: Any, products: int, num_heads: int, interpret: bool, out: Any, *inputs: Array
) -> Array:
    """Runs a kernel on each example; `products` is of each head, with its scores or their like."""
    batch, tokens, width = inputs[0].shape
    arrays, itemsize = (*inputs, out), out.dtype.itemsize
    scores = batch * num_heads * tokens**2
    return pl.pallas_call(
        functools.partial(kernel, num_heads=num_heads),
        grid=(batch,),
        in_specs=[_example(x) for x in inputs],
        out_specs=_example(out),
        out_shape=out,
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=('parallel',),
            vmem_limit_bytes=vmem_bytes(tokens, width // 3, num_heads, itemsize),
        ),
        cost_estimate=pl.CostEstimate(
            flops=products * 2 * scores * (width // 3 // num_heads),
            transcendentals=scores,
            bytes_accessed=sum(x.size for x in arrays) * itemsize,
        ),
        interpret=interpret,
        name=kernel.__name__.strip('_'),
    )(*inputs)


def _example(x: Any) -> pl.BlockSpec:
    return pl.BlockSpec((None, *x.shape[1:]), lambda i: (i, 0, 0))


class _Head(NamedTuple):
    """Columns of a head within its group, and those of the whole registers around them."""

    first: int
    last: int
    low: int
    high: int

    def own(self) -> Array:
        """[1 R], true in the head's own columns of its registers."""
        column = self.low + jax.lax.broadcasted_iota(jnp.int32, (1, self.high - self.low), 1)
        return (column >= self.first) & (column < self.last)


def _group(width: int, num_heads: int, most: int = 0) -> int:
    """Columns of a group: of as many heads as fill whole registers, and of up to `most` heads.

    All of D where no such groups make it.
    """
    size = width // num_heads
    least = math.lcm(size, LANES)
    if width % least:
        return width
    groups = (n for n in range(least, most * size + 1, least) if width % n == 0)
    return max(groups, default=least)


def _for_each_head(
    width: int, num_heads: int, group: int, body: Callable[[Any, _Head], None]
) -> None:
    """Calls `body` with the first column of a group and a head of it.

    Groups are a loop: unrolled, their scores would lie in VMEM all at once.
    """
    size = width // num_heads

    def of_group(start: Any) -> None:
        for first in range(0, group, size):
            high = min(_round_up(first + size, LANES), group)
            body(start, _Head(first, first + size, first // LANES * LANES, high))

    if group == width:
        of_group(0)
    else:
        pl.loop(0, width, step=group)(lambda start: of_group(pl.multiple_of(start, LANES)))


def _forward_kernel(qkv_ref: Any, out_ref: Any, *, num_heads: int) -> None:
    width = out_ref.shape[-1]
    scale = 1 / math.sqrt(width // num_heads)

    def of_head(start: Any, head: _Head) -> None:
        q, k, v = (_read(qkv_ref, i * width + start, head) for i in range(3))
        own = head.own()
        scores = _dot(jnp.where(own, q, 0), k, (1, 1)) * scale
        exps = jnp.exp(scores - scores.max(axis=1, keepdims=True))
        out = _dot(exps.astype(v.dtype), v, (1, 0)) / exps.sum(axis=1, keepdims=True)
        _write(out_ref, start, head, own, out)

    group = _group(width, num_heads, UNROLLED // _score_bytes(out_ref.shape[0]))
    _for_each_head(width, num_heads, group, of_head)


def _backward_kernel(qkv_ref: Any, grad_ref: Any, out_ref: Any, *, num_heads: int) -> None:
    width = grad_ref.shape[-1]
    scale = 1 / math.sqrt(width // num_heads)

    def of_head(start: Any, head: _Head) -> None:
        q, k, v = (_read(qkv_ref, i * width + start, head) for i in range(3))
        own = head.own()
        q = jnp.where(own, q, 0)
        grad = jnp.where(own, _read(grad_ref, start, head), 0)
        # [keys queries]: so two of the last three products need no transposed matrix.
        scores = _dot(k, q, (1, 1)) * scale
        exps = jnp.exp(scores - scores.max(axis=0, keepdims=True))
        weights = exps * (1 / exps.sum(axis=0, keepdims=True))
        of_weights = _dot(v, grad, (1, 1))
        mean = (weights * of_weights).sum(axis=0, keepdims=True)
        of_scores = (weights * (of_weights - mean) * scale).astype(k.dtype)
        _write(out_ref, start, head, own, _dot(of_scores, k, (0, 0)))
        _write(out_ref, width + start, head, own, _dot(of_scores, q, (1, 0)))
        of_values = _dot(weights.astype(v.dtype), grad, (1, 0))
        _write(out_ref, 2 * width + start, head, own, of_values)

    _for_each_head(width, num_heads, _group(width, num_heads), of_head)


def _columns(offset: Any, head: _Head) -> Any:
    return pl.ds(offset + head.low, head.high - head.low)


def _read(ref: Any, offset: Any, head: _Head) -> Array:
    return ref[:, _columns(offset, head)]


def _write(ref: Any, offset: Any, head: _Head, own: Array, value: Array) -> None:
    """Sets the head's columns, and leaves alone those that heads before it have set."""
    value = value.astype(ref.dtype)
    if head.first > head.low:
        value = jnp.where(own, value, ref[:, _columns(offset, head)])
    ref[:, _columns(offset, head)] = value


def _dot(a: Array, b: Array, contracted: tuple[int, int]) -> Array:
    dims = (((contracted[0],), (contracted[1],)), ((), ()))
    return jax.lax.dot_general(a, b, dims, preferred_element_type=jnp.float32)


def _score_bytes(tokens: int) -> int:
    return _round_up(tokens, SUBLANES) * _round_up(tokens, LANES) * 4


def _round_up(n: int, multiple: int) -> int:
    return -(-n // multiple) * multiple
