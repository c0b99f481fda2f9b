"""Attention kernel for long sequences, in blocks of queries.

Each program of the grid (example, group of heads, block) takes a block of queries and all keys and
values, of as many heads as fill whole registers. As the scores [block M] of a query are complete,
no running softmax is needed, and the backward pass reads no statistics of the forward pass. It adds
the gradients of keys and values up in VMEM over the blocks, which run one after the other.

The last block may reach beyond the sequence, where its queries are undefined: they are set to zero,
with the gradients of their results.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from vit_jax.array_types import Float
from vit_jax.nn.attention import Segments
from vit_jax.nn.kernels.heads import (
    LANES,
    SCORES,
    SUBLANES,
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


def vmem_bytes(
    block: int, keys: int, width: int, num_heads: int, itemsize: int, drops: bool = False
) -> int:
    """VMEM in bytes that the backward pass needs, an upper estimate.

    Args:
      block: Queries of a program.
      keys: M.
      width: D.
      num_heads: H.
      itemsize: Bytes of an element of queries, keys and values.
      drops: Whether weights are dropped.
    """
    columns = group_width(width, num_heads)
    heads = columns * num_heads // width
    tokens = round_up(keys, SUBLANES)
    # As of whole sequences; and float32 sums of the gradients of keys and values.
    rows = 2 * itemsize * (3 * block + 4 * tokens) + 2 * 4 * tokens
    dropout = 2 * heads * block * round_up(keys, LANES) * drops
    scores = SCORES * heads * score_bytes(block, keys)
    return rows * round_up(columns, LANES) + scores + dropout


def forward(
    projected: Projected, masks: Masks, keep_mask: Array | None, options: Options
) -> Float[Array, 'B N D']:
    """Compute `kernels.attention.fused_attention` from the arguments of its parts."""
    grid = _Grid(projected, options)
    out = jax.ShapeDtypeStruct((*grid.rows, grid.width), projected[0].dtype)
    specs = grid.queries()
    return grid.call(_forward_kernel, 2, masks, keep_mask, (), out, specs, ())


def backward(
    projected: Projected, masks: Masks, keep_mask: Array | None, grad: Array, options: Options
) -> Projected:
    """Return the gradients of the projections, given the gradient of the result."""
    grid = _Grid(projected, options)
    shapes = ((*grid.rows, grid.width), *[(grid.rows[0], grid.keys, grid.width)] * 2)
    out = tuple(jax.ShapeDtypeStruct(shape, grad.dtype) for shape in shapes)
    specs = (grid.queries(), grid.tokens(), grid.tokens())
    sums = [pltpu.VMEM((grid.keys, grid.columns), jnp.float32)] * 2
    results = grid.call(_backward_kernel, 5, masks, keep_mask, (grad,), out, specs, sums)
    sizes = [x.shape[-1] // grid.width for x in projected]
    ends = [sum(sizes[: i + 1]) for i in range(len(sizes))]
    return tuple(
        jnp.concatenate(results[end - size : end], axis=-1) if size > 1 else results[end - 1]
        for size, end in zip(sizes, ends, strict=True)
    )


class _Grid:
    """Programs (example, group of heads, block of queries), and their parts of the arrays.

    Attributes:
      rows: B and N.
      keys: M.
      width: D.
      columns: Columns that belong to a group of heads.
      block: Queries of a program.
    """

    def __init__(self, projected: Projected, options: Options):
        self.width = total_width(projected)
        self.columns = group_width(self.width, options.num_heads)
        if self.columns % LANES:  # no part of an array can be read that does not fill registers
            projected = tuple(
                jax.lax.slice_in_dim(x, first, first + self.width, axis=-1)
                for x, first in first_columns(projected)
            )
        self._parts, self._options = first_columns(projected), options
        self.rows, self.keys = projected[0].shape[:2], projected[-1].shape[1]
        self.block = min(options.block, self.rows[1])

    def queries(self, first: int = 0) -> pl.BlockSpec:
        """Return a block of queries, or of as many rows, from a column on."""
        start = first // self.columns
        return pl.BlockSpec((None, self.block, self.columns), lambda b, g, i: (b, i, start + g))

    def tokens(self, first: int = 0) -> pl.BlockSpec:
        """All keys or values, from a column on."""
        start = first // self.columns
        return pl.BlockSpec((None, self.keys, self.columns), lambda b, g, i: (b, 0, start + g))

    def _masks(self, masks: Masks) -> Masks:
        """Parts of `masks`."""
        of_keys = pl.BlockSpec((None, 1, self.keys), lambda b, g, i: (b, 0, 0))
        of_queries = pl.BlockSpec((None, 1, self.block), lambda b, g, i: (b, 0, i))
        mask, segments = masks
        return (
            None if mask is None else of_keys,
            None if segments is None else Segments(of_queries, of_keys),  # type: ignore[arg-type]
        )

    def _keep_spec(self, keep_mask: Array | None) -> pl.BlockSpec | None:
        if keep_mask is None:
            return None
        heads = self.columns * self._options.num_heads // self.width
        shape = (None, heads, self.block, self.keys)
        return pl.BlockSpec(shape, lambda b, g, i: (b, g, i, 0))

    def call(
        self,
        kernel: Any,
        matmuls: int,
        masks: Masks,
        keep_mask: Array | None,
        grads: tuple[Array, ...],
        out: Any,
        out_specs: Any,
        scratch: Any,
    ) -> Any:
        """Run a kernel; `matmuls` is the number of matmuls of each head."""
        (batch, queries), options = self.rows, self._options
        (_, of_q), *remaining = self._parts
        arguments = (tuple(x for x, _ in self._parts), masks, keep_mask, grads)
        specs = (
            (self.queries(of_q), *(self.tokens(first) for _, first in remaining)),
            self._masks(masks),
            self._keep_spec(keep_mask),
            tuple(self.queries() for _ in grads),
        )
        itemsize = self._parts[0][0].dtype.itemsize
        moved = sum(x.size * x.dtype.itemsize for x in jax.tree.leaves((*arguments[1:], out)))
        moved += batch * (queries + 2 * self.keys) * self.width * itemsize
        scores = batch * options.num_heads * queries * self.keys
        size = self.width // options.num_heads
        limit = vmem_bytes(
            *(self.block, self.keys, self.width, options.num_heads),
            *(itemsize, keep_mask is not None),
        )
        return pl.pallas_call(
            functools.partial(kernel, queries=queries, size=size, options=options),
            grid=(batch, self.width // self.columns, pl.cdiv(queries, self.block)),
            in_specs=specs,
            out_specs=out_specs,
            out_shape=out,
            scratch_shapes=scratch,
            compiler_params=pltpu.CompilerParams(
                dimension_semantics=('parallel', 'parallel', 'arbitrary'), vmem_limit_bytes=limit
            ),
            cost_estimate=pl.CostEstimate(
                flops=matmuls * 2 * scores * size,
                transcendentals=scores,
                bytes_accessed=moved,
            ),
            interpret=options.interpret,
            name=f'blocks_{kernel.__name__.strip("_")}',
        )(*arguments)


def _forward_kernel(
    refs: Any,
    masks: Masks,
    kept_ref: Any,
    _: Any,
    out_ref: Any,
    *,
    queries: int,
    size: int,
    options: Options,
) -> None:
    columns = out_ref.shape[-1]
    visible = _visible(masks, out_ref, options, keys=1)
    for i, head in enumerate(heads_in_group(columns, size)):
        q, k, v = (ref[:, head.columns()] for ref in refs)
        in_head = head.own()
        q = jnp.where(in_head, _present(q, queries), 0)
        out = attend(q, k, v, head.size, visible.scores, _factors(kept_ref, i, options))
        write(out_ref, head, in_head, out)


def _backward_kernel(
    refs: Any,
    masks: Masks,
    kept_ref: Any,
    grad_refs: Any,
    of_queries: Any,
    of_keys: Any,
    of_values: Any,
    key_sums: Any,
    value_sums: Any,
    *,
    queries: int,
    size: int,
    options: Options,
) -> None:
    (grad_ref,), block = grad_refs, pl.program_id(2)
    columns = grad_ref.shape[-1]
    visible = _visible(masks, grad_ref, options, keys=0)

    @pl.when(block == 0)
    def _():
        key_sums[...] = jnp.zeros_like(key_sums)
        value_sums[...] = jnp.zeros_like(value_sums)

    for i, head in enumerate(heads_in_group(columns, size)):
        q, k, v = (ref[:, head.columns()] for ref in refs)
        in_head, grad = head.own(), grad_ref[:, head.columns()]
        q, grad = (jnp.where(in_head, _present(x, queries), 0) for x in (q, grad))
        factors = _factors(kept_ref, i, options)
        through = (visible.scores, visible.gradients)
        of_q, of_k, of_v = gradients(q, k, v, grad, head.size, *through, factors)
        write(of_queries, head, in_head, of_q)
        # Zero outside of the head's own columns, as q and grad are.
        key_sums[:, head.columns()] += of_k
        value_sums[:, head.columns()] += of_v

    @pl.when(block == pl.num_programs(2) - 1)
    def _():
        of_keys[...] = key_sums[...].astype(of_keys.dtype)
        of_values[...] = value_sums[...].astype(of_values.dtype)


def _visible(masks: Masks, block_ref: Any, options: Options, keys: int) -> Visible:
    return Visible(masks, options.causal, keys, pl.program_id(2) * block_ref.shape[0])


def _present(x: Array, queries: int) -> Array:
    """Return the rows of a block, with zeros beyond the last query."""
    block = x.shape[0]
    if queries % block == 0:
        return x
    row = pl.program_id(2) * block + jax.lax.broadcasted_iota(jnp.int32, x.shape, 0)
    return jnp.where(row < queries, x, 0)


def _factors(kept_ref: Any, head: int, options: Options) -> Array | None:
    return None if kept_ref is None else dropout_factors(kept_ref[head], options.rate)
