"""Attention as one TPU kernel: the scores never leave VMEM.

Each program of the grid takes the queries, keys and values of one example, [N D] and [M D], and
computes softmax(Q K^T / sqrt(K)) V of all its heads. The backward pass recomputes the probabilities
instead of reading them from HBM (Dao et al., 2022, arXiv:2205.14135, section 3.1). Long sequences
are cut into blocks of queries; see `kernels.blocks`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from vit_jax.array_types import Bool, Float
from vit_jax.nn.attention import Segments
from vit_jax.nn.kernels import blocks
from vit_jax.nn.kernels.heads import (
    LANES,
    SCORES,
    SUBLANES,
    Head,
    Masks,
    Options,
    Projected,
    Visible,
    attend,
    dropout_factors,
    first_columns,
    gradients,
    group_width,
    heads_in_group,
    round_up,
    score_bytes,
    total_width,
    write,
)

# Bytes of matrices of scores for the heads that the forward pass unrolls, so that they overlap.
UNROLLED = 2**21


def vmem_bytes(
    queries: int, keys: int, width: int, num_heads: int, itemsize: int, drops: bool = False
) -> int:
    """VMEM in bytes that the backward pass needs for whole sequences, an upper estimate.

    Args:
      queries: N.
      keys: M.
      width: D.
      num_heads: H.
      itemsize: Bytes of an element of queries, keys and values.
      drops: Whether weights are dropped.
    """
    # Queries, the result, keys and values, with their gradients. All twice,
    # since the previous or next example is being copied.
    rows = 2 * (3 * round_up(queries, SUBLANES) + 4 * round_up(keys, SUBLANES))
    heads = group_width(width, num_heads) * num_heads // width
    scores = SCORES * heads * score_bytes(queries, keys)
    dropout = 2 * num_heads * round_up(queries, 2 * SUBLANES) * round_up(keys, LANES) * drops
    return rows * round_up(width, LANES) * itemsize + UNROLLED + scores + dropout


def fused_attention(
    projected: Projected,
    num_heads: int,
    mask: Bool[Array, 'B M'] | None = None,
    segments: Segments | None = None,
    keep_mask: Bool[Array, 'B H N M'] | None = None,
    causal: bool = False,
    rate: float = 0.0,
    block: int = 0,
    interpret: bool = False,
) -> Float[Array, 'B N D']:
    """softmax(Q K^T / sqrt(K)) V of every head, with the softmax in float32.

    If all keys of a query are masked its weights are uniform, as in `attention.masked_softmax`.

    Args:
      projected: Arrays whose columns, one array after the other, are queries, keys and values, D
        columns each, and within these the heads, K columns each: ([B N 3D],),
        ([B N D], [B M 2D]), ([B N 2D], [B N D]) or ([B N D], [B M D], [B M D]).
      num_heads: H; divides D.
      mask: True for keys that may be attended to.
      segments: Sequences that share a row; a query attends only to keys of its sequence.
      keep_mask: True for weights that dropout keeps; None without dropout.
      causal: Whether a query attends to no keys after its own position.
      rate: The share of weights that dropout sets to zero.
      block: Queries of a program, a multiple of 128; 0 for all.
      interpret: Run it as plain JAX, on any device.
    """
    rows = jax.tree.map(lambda x: x[:, None].astype(jnp.float32), (mask, segments))
    # The TPU compiler does not support matrices of bits.
    units = None if keep_mask is None else keep_mask.astype(jnp.int8)
    return _attend(projected, rows, units, Options(num_heads, causal, rate, interpret, block))


@functools.partial(jax.custom_vjp, nondiff_argnums=(3,))
def _attend(projected: Projected, masks: Masks, keep_mask: Array | None, options: Options) -> Array:
    if options.block:
        return blocks.forward(projected, masks, keep_mask, options)
    first = projected[0]
    out = jax.ShapeDtypeStruct((*first.shape[:2], total_width(projected)), first.dtype)
    return _call(_forward_kernel, 2, options, out, projected, masks, keep_mask)


def _with_inputs(
    projected: Projected, masks: Masks, keep_mask: Array | None, options: Options
) -> tuple[Array, Any]:
    return _attend(projected, masks, keep_mask, options), (projected, masks, keep_mask)


def _backward(options: Options, inputs: Any, grad: Array) -> tuple[Projected, None, None]:
    projected, masks, keep_mask = inputs
    if options.block:
        return blocks.backward(projected, masks, keep_mask, grad, options), None, None
    out = tuple(jax.ShapeDtypeStruct(x.shape, x.dtype) for x in projected)
    return _call(_backward_kernel, 5, options, out, projected, masks, keep_mask, grad), None, None


_attend.defvjp(_with_inputs, _backward)


def _call(
    kernel: Any,
    matmuls: int,
    options: Options,
    out: Any,
    projected: Projected,
    masks: Masks,
    keep_mask: Array | None,
    *inputs: Array,
) -> Any:
    """Run a kernel on each example; `matmuls` is the number of matmuls of each head."""
    (batch, queries, _), keys = projected[0].shape, projected[-1].shape[1]
    width, itemsize = total_width(projected), projected[0].dtype.itemsize
    arguments = (projected, masks, keep_mask, *inputs)
    arrays = jax.tree.leaves((arguments, out))
    scores = batch * options.num_heads * queries * keys
    return pl.pallas_call(
        functools.partial(kernel, options=options),
        grid=(batch,),
        in_specs=jax.tree.map(_example, arguments),
        out_specs=jax.tree.map(_example, out),
        out_shape=out,
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=('parallel',),
            vmem_limit_bytes=vmem_bytes(
                queries, keys, width, options.num_heads, itemsize, keep_mask is not None
            ),
        ),
        cost_estimate=pl.CostEstimate(
            flops=matmuls * 2 * scores * (width // options.num_heads),
            transcendentals=scores,
            bytes_accessed=sum(x.size * x.dtype.itemsize for x in arrays),
        ),
        interpret=options.interpret,
        name=kernel.__name__.strip('_'),
    )(*arguments)


def _example(x: Any) -> pl.BlockSpec:
    return pl.BlockSpec((None, *x.shape[1:]), lambda i: (i, *[0] * (x.ndim - 1)))


def _for_each_head(
    width: int, num_heads: int, group: int, body: Callable[[Any, Head], None]
) -> None:
    """Call `body` with the first column of a group and a head of it.

    Groups are a loop, since unrolled their scores would be in VMEM all at once.
    """

    def compute_group(start: Any) -> None:
        for head in heads_in_group(group, width // num_heads):
            body(start, head)

    if group == width:
        compute_group(0)
    else:
        pl.loop(0, width, step=group)(lambda start: compute_group(pl.multiple_of(start, LANES)))


def _forward_kernel(
    refs: Any, masks: Masks, kept_ref: Any, out_ref: Any, *, options: Options
) -> None:
    width = out_ref.shape[-1]
    visible = Visible(masks, options.causal, keys=1)

    def compute_head(start: Any, head: Head) -> None:
        q, k, v = (_read(ref, first + start, head) for ref, first in first_columns(refs))
        in_head, factors = head.own(), _factors(kept_ref, start, head, options)
        out = attend(jnp.where(in_head, q, 0), k, v, head.size, visible.scores, factors)
        write(out_ref, head, in_head, out, start)

    keys = refs[-1].shape[0]
    group = group_width(width, options.num_heads, UNROLLED // score_bytes(out_ref.shape[0], keys))
    _for_each_head(width, options.num_heads, group, compute_head)


def _backward_kernel(
    refs: Any, masks: Masks, kept_ref: Any, grad_ref: Any, *out_refs: Any, options: Options
) -> None:
    width = grad_ref.shape[-1]
    visible = Visible(masks, options.causal, keys=0)

    def compute_head(start: Any, head: Head) -> None:
        q, k, v = (_read(ref, first + start, head) for ref, first in first_columns(refs))
        in_head, factors = head.own(), _factors(kept_ref, start, head, options)
        q = jnp.where(in_head, q, 0)
        grad = jnp.where(in_head, _read(grad_ref, start, head), 0)
        through = (visible.scores, visible.gradients)
        results = gradients(q, k, v, grad, head.size, *through, factors)
        for (ref, first), gradient in zip(first_columns(out_refs), results, strict=True):
            write(ref, head, in_head, gradient, first + start)

    _for_each_head(width, options.num_heads, group_width(width, options.num_heads), compute_head)


def _factors(kept_ref: Any, start: Any, head: Head, options: Options) -> Array | None:
    """Factors [N M] of dropout for the weights of a head of the group that begins at `start`."""
    if kept_ref is None:
        return None
    return dropout_factors(kept_ref[jax.lax.div(start + head.first, head.size)], options.rate)


def _read(ref: Any, offset: Any, head: Head) -> Array:
    return ref[:, head.columns(offset)]
