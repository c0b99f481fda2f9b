"""Attention in windows as one TPU kernel: several windows a program, whose scores stay in VMEM.

The scores of a window get the bias of the relative positions, and in shifted windows that of tokens
which are not neighbors in the map. The gradient of the bias is added up in VMEM over all windows.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from vit_jax.array_types import Float, Int
from vit_jax.nn.attention import APART
from vit_jax.nn.kernels.heads import (
    LANES,
    SCORES,
    SUBLANES,
    Head,
    along,
    attend,
    gradients,
    group_width,
    heads_in_group,
    round_up,
    score_bytes,
    write,
)

PROGRAM = 8  # windows, at most
PROGRAM_BYTES = 6 * 2**20  # of their projections and gradients, at most, unless one has more


def windows_per_program(windows: int, tokens: int, width: int, itemsize: int) -> int:
    """Windows of a program, a divisor of all `windows`."""
    each = _rows_bytes(tokens, width, itemsize)
    most = min(PROGRAM, max(PROGRAM_BYTES // each, 1))
    return max(n for n in range(1, most + 1) if windows % n == 0)


def vmem_bytes(program: int, tokens: int, width: int, num_heads: int, itemsize: int) -> int:
    """VMEM in bytes that the backward pass needs, an upper estimate.

    Args:
      program: Windows of a program.
      tokens: N.
      width: D.
      num_heads: H.
      itemsize: Bytes of an element of queries, keys and values.
    """
    # Biases and their gradients, twice; and the scores of all heads.
    matrices = (4 + SCORES) * num_heads * score_bytes(tokens, tokens)
    return program * _rows_bytes(tokens, width, itemsize) + matrices


def _rows_bytes(tokens: int, width: int, itemsize: int) -> int:
    """Bytes of a window's projections and result, with their gradients.

    All twice, since the previous or next program is being copied.
    """
    return 2 * 7 * round_up(tokens, SUBLANES) * round_up(width, LANES) * itemsize


class Options(NamedTuple):
    """Heads, windows of a program, and whether the kernel is run as plain JAX."""

    num_heads: int
    program: int
    interpret: bool


def window_attention(
    qkv: Float[Array, 'B W N E'],
    bias: Float[Array, 'H N N'],
    regions: Int[Array, 'W N'] | None = None,
    interpret: bool = False,
) -> Float[Array, 'B W N D']:
    """softmax(Q K^T / sqrt(K) + bias) V of each window and head, equation 4 of Swin.

    Args:
      qkv: Columns of queries, keys and values, D each, and within these the heads, K each.
      bias: Bias of the scores.
      regions: A number for each token; APART is added to the scores of tokens of different ones.
      interpret: Run it as plain JAX, on any device.
    """
    batch, windows, tokens, width = qkv.shape
    program = windows_per_program(windows, tokens, width // 3, qkv.dtype.itemsize)
    rows = None if regions is None else regions[:, None].astype(jnp.float32)
    options = Options(len(bias), program, interpret)
    out = _attend(qkv.reshape(-1, tokens, width), bias, rows, options)
    return out.reshape(batch, windows, tokens, -1)


@functools.partial(jax.custom_vjp, nondiff_argnums=(3,))
def _attend(qkv: Array, bias: Array, regions: Array | None, options: Options) -> Array:
    out = jax.ShapeDtypeStruct((*qkv.shape[:2], qkv.shape[2] // 3), qkv.dtype)
    return _call(_forward_kernel, 2, options, qkv, bias, regions, (), out)


def _with_inputs(qkv: Array, bias: Array, regions: Array | None, options: Options) -> Any:
    return _attend(qkv, bias, regions, options), (qkv, bias, regions)


def _backward(options: Options, inputs: Any, grad: Array) -> tuple[Array, Array, None]:
    qkv, bias, regions = inputs
    turned = bias.swapaxes(1, 2)
    out = (
        jax.ShapeDtypeStruct(qkv.shape, qkv.dtype),
        jax.ShapeDtypeStruct(turned.shape, jnp.float32),
    )
    of_qkv, of_bias = _call(_backward_kernel, 5, options, qkv, turned, regions, (grad,), out)
    return of_qkv, of_bias.swapaxes(1, 2).astype(bias.dtype), None


_attend.defvjp(_with_inputs, _backward)


def _call(
    kernel: Any,
    matmuls: int,
    options: Options,
    qkv: Array,
    bias: Array,
    regions: Array | None,
    grads: tuple[Array, ...],
    out: Any,
) -> Any:
    (count, tokens, width), program = qkv.shape, options.program
    scores = count * options.num_heads * tokens * tokens
    arguments = (qkv, bias, regions, grads)

    def some(x: Any) -> pl.BlockSpec:
        return pl.BlockSpec((program, *x.shape[1:]), lambda i: (i, 0, 0))

    def whole(x: Any) -> pl.BlockSpec:
        return pl.BlockSpec(x.shape, lambda i: (0, 0, 0))

    cycle = 1 if regions is None else len(regions) // program
    of_regions = pl.BlockSpec((program, 1, tokens), lambda i: (jax.lax.rem(i, cycle), 0, 0))
    specs = (
        some(qkv),
        whole(bias),
        None if regions is None else of_regions,
        tuple(map(some, grads)),
    )
    arrays = jax.tree.leaves((arguments, out))
    return pl.pallas_call(
        functools.partial(kernel, options=options),
        grid=(count // program,),
        in_specs=specs,
        out_specs=(some(out[0]), whole(out[1])) if isinstance(out, tuple) else some(out),
        out_shape=out,
        compiler_params=pltpu.CompilerParams(
            # One after the other, for the sum over the windows.
            dimension_semantics=('arbitrary',),
            vmem_limit_bytes=vmem_bytes(
                *(program, tokens, width // 3, options.num_heads), qkv.dtype.itemsize
            ),
        ),
        cost_estimate=pl.CostEstimate(
            flops=matmuls * 2 * scores * (width // 3 // options.num_heads),
            transcendentals=scores,
            bytes_accessed=sum(x.size * x.dtype.itemsize for x in arrays),
        ),
        interpret=options.interpret,
        name=f'window_{kernel.__name__.strip("_")}',
    )(*arguments)


def _forward_kernel(
    qkv: Any, bias: Any, regions: Any, _: Any, out: Any, *, options: Options
) -> None:
    def compute_head(window: Any, number: int, start: int, head: Head, region_bias: Any) -> None:
        def scored(scores: Array) -> Array:
            return scores + bias[number] + region_bias

        q, k, v = _read(qkv, window, start, head)
        in_head = head.own()
        value = attend(jnp.where(in_head, q, 0), k, v, head.size, scored)
        write(out.at[window], head, in_head, value, start)

    _for_each(options, out.shape[-1], regions, compute_head)


def _backward_kernel(
    qkv: Any, bias: Any, regions: Any, grads: Any, of_qkv: Any, of_bias: Any, *, options: Options
) -> None:
    width = grads[0].shape[-1]

    @pl.when(pl.program_id(0) == 0)
    def _() -> None:
        of_bias[...] = jnp.zeros_like(of_bias)

    def compute_head(window: Any, number: int, start: int, head: Head, region_bias: Any) -> None:
        def scored(scores: Array) -> Array:
            return scores + bias[number] + region_bias

        def through(of_scores: Array) -> Array:
            of_bias[number] += of_scores
            return of_scores

        q, k, v = _read(qkv, window, start, head)
        in_head = head.own()
        q = jnp.where(in_head, q, 0)
        grad = jnp.where(in_head, grads[0][window, :, head.columns(start)], 0)
        for i, gradient in enumerate(gradients(q, k, v, grad, head.size, scored, through)):
            write(of_qkv.at[window], head, in_head, gradient, i * width + start)

    _for_each(options, width, regions, compute_head)


def _for_each(options: Options, width: int, regions: Any, compute_head: Any) -> None:
    """Call `compute_head` for each window and head of a program."""
    group = group_width(width, options.num_heads)
    size = width // options.num_heads

    def compute_window(window: Any) -> None:
        region_bias: Any = 0.0
        if regions is not None:
            row = regions[window]
            region_bias = jnp.where(row == along(0, row), 0.0, APART)
        for start in range(0, width, group):
            for head in heads_in_group(group, size):
                compute_head(window, (start + head.first) // size, start, head, region_bias)

    pl.loop(0, options.program)(compute_window)


def _read(qkv: Any, window: Any, start: int, head: Head) -> list[Array]:
    width = qkv.shape[-1] // 3
    return [qkv[window, :, head.columns(i * width + start)] for i in range(3)]
