"""Attention of short sequences as one TPU kernel: the scores never leave VMEM.

Each program of the grid takes the queries, keys and values of one example, [N D] and [M D], and
computes softmax(Q K^T / sqrt(K)) V of all its heads. The backward pass recomputes the probabilities
instead of reading them from HBM (Dao et al., 2022, arXiv:2205.14135, section 3.1). The kernels of
`jax.experimental.pallas.ops.tpu` are for sequences that do not fit into VMEM, in blocks of 128.

Heads stay side by side along D, as their projection writes them. The products of a head run over
whole registers of 128 lanes, with the lanes of neighboring heads set to zero: matrix units are that
wide anyway, and nothing has to be moved to the first lane.
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
from jaxtyping import Array, Bool, Float

from vit_jax.nn.attention import Segments

LANES, SUBLANES = 128, 16
# Float32 matrices [N M] that the backward pass of a head needs, some of which are spilled.
SCORES = 6
# Bytes of such matrices for the heads that the forward pass unrolls, so that they overlap.
UNROLLED = 2**21
# The score of masked keys, as in `attention.masked_softmax`.
LOWEST = float(jnp.finfo(jnp.float32).min)

Projected = tuple[Float[Array, 'B _ _'], ...]
# Masks of queries: keys that are not zero, and keys of their segment. Rows [1 N] or [1 M].
Seen = tuple[Any, Segments | None]


def vmem_bytes(
    queries: int, keys: int, width: int, num_heads: int, itemsize: int, drops: bool = False
) -> int:
    """VMEM in bytes that the backward pass needs, an upper estimate.

    Args:
      queries: N.
      keys: M.
      width: D.
      num_heads: H.
      itemsize: bytes of an element of queries, keys and values.
      drops: whether weights are dropped.
    """
    # Queries, their gradient and that of the result; keys, values and their gradients. All twice,
    # since the previous or next example is copied meanwhile.
    rows = 2 * (3 * _round_up(queries, SUBLANES) + 4 * _round_up(keys, SUBLANES))
    heads = _group(width, num_heads) * num_heads // width
    scores = SCORES * heads * _score_bytes(queries, keys)
    kept = 2 * num_heads * _round_up(queries, 2 * SUBLANES) * _round_up(keys, LANES) * drops
    return rows * _round_up(width, LANES) * itemsize + UNROLLED + scores + kept


class _Options(NamedTuple):
    """Static options of a program; see `fused_attention`."""

    num_heads: int
    causal: bool
    rate: float
    interpret: bool


def fused_attention(
    projected: Projected,
    num_heads: int,
    mask: Bool[Array, 'B M'] | None = None,
    segments: Segments | None = None,
    kept: Bool[Array, 'B H N M'] | None = None,
    causal: bool = False,
    rate: float = 0.0,
    interpret: bool = False,
) -> Float[Array, 'B N D']:
    """softmax(Q K^T / sqrt(K)) V of every head, with the softmax in float32.

    If all keys of a query are masked its weights are uniform, as in `attention.masked_softmax`.

    Args:
      projected: arrays whose columns, one array after the other, are queries, keys and values, D
        columns each, and within these the heads, K columns each: ([B N 3D],),
        ([B N D], [B M 2D]), ([B N 2D], [B N D]) or ([B N D], [B M D], [B M D]).
      num_heads: H; divides D.
      mask: true for keys that may be attended to.
      segments: sequences that share a row; a query attends to the keys of its own.
      kept: true for weights that dropout keeps; None without dropout.
      causal: whether a query attends to no keys after its own position.
      rate: the share of weights that dropout sets to zero.
      interpret: run it as plain JAX, on any device.
    """
    rows = jax.tree.map(lambda x: x[:, None].astype(jnp.float32), (mask, segments))
    # The TPU compiler does not support matrices of bits.
    units = None if kept is None else kept.astype(jnp.int8)
    return _attend(projected, rows, units, _Options(num_heads, causal, rate, interpret))


@functools.partial(jax.custom_vjp, nondiff_argnums=(3,))
def _attend(projected: Projected, seen: Seen, kept: Array | None, options: _Options) -> Array:
    first = projected[0]
    out = jax.ShapeDtypeStruct((*first.shape[:2], _width(projected)), first.dtype)
    return _call(_forward_kernel, 2, options, out, projected, seen, kept)


def _with_inputs(
    projected: Projected, seen: Seen, kept: Array | None, options: _Options
) -> tuple[Array, Any]:
    return _attend(projected, seen, kept, options), (projected, seen, kept)


def _backward(options: _Options, inputs: Any, grad: Array) -> tuple[Projected, None, None]:
    projected, seen, kept = inputs
    out = tuple(jax.ShapeDtypeStruct(x.shape, x.dtype) for x in projected)
    return _call(_backward_kernel, 5, options, out, projected, seen, kept, grad), None, None


_attend.defvjp(_with_inputs, _backward)


def _call(
    kernel: Any,
    products: int,
    options: _Options,
    out: Any,
    projected: Projected,
    seen: Seen,
    kept: Array | None,
    *inputs: Array,
) -> Any:
    """Run a kernel on each example; `products` is the number of matrix products of each head."""
    (batch, queries, _), keys = projected[0].shape, projected[-1].shape[1]
    width, itemsize = _width(projected), projected[0].dtype.itemsize
    arguments = (projected, seen, kept, *inputs)
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
                queries, keys, width, options.num_heads, itemsize, kept is not None
            ),
        ),
        cost_estimate=pl.CostEstimate(
            flops=products * 2 * scores * (width // options.num_heads),
            transcendentals=scores,
            bytes_accessed=sum(x.size * x.dtype.itemsize for x in arrays),
        ),
        interpret=options.interpret,
        name=kernel.__name__.strip('_'),
    )(*arguments)


def _example(x: Any) -> pl.BlockSpec:
    return pl.BlockSpec((None, *x.shape[1:]), lambda i: (i, *[0] * (x.ndim - 1)))


def _width(projected: tuple[Any, ...]) -> int:
    return sum(x.shape[-1] for x in projected) // 3


def _places(refs: tuple[Any, ...]) -> list[tuple[Any, int]]:
    """The array that holds queries, keys and values, and the first column of each."""
    width = _width(refs)
    return [(ref, first) for ref in refs for first in range(0, ref.shape[-1], width)]


class _Head(NamedTuple):
    """Columns of a head within its group, and those of the whole registers around them."""

    first: int
    last: int
    low: int
    high: int

    def own(self) -> Array:
        """Mask [1 R], true for the head's own columns of its registers."""
        column = self.low + jax.lax.broadcasted_iota(jnp.int32, (1, self.high - self.low), 1)
        return (column >= self.first) & (column < self.last)


def _group(width: int, num_heads: int, most: int = 0) -> int:
    """Number of columns of a group, of as many heads as fill whole registers, up to `most` heads.

    All of D if it cannot be cut into such groups.
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
    """Call `body` with the first column of a group and a head of it.

    Groups are a loop, since unrolled their scores would be in VMEM all at once.
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


def _forward_kernel(
    refs: Any, seen: Seen, kept_ref: Any, out_ref: Any, *, options: _Options
) -> None:
    width = out_ref.shape[-1]
    scale = 1 / math.sqrt(width // options.num_heads)
    masks = _masks(seen, keys=1)

    def of_head(start: Any, head: _Head) -> None:
        q, k, v = (_read(ref, first + start, head) for ref, first in _places(refs))
        own = head.own()
        scores = _dot(jnp.where(own, q, 0), k, (1, 1)) * scale
        scores = _where_seen(scores, masks, options.causal, 1, LOWEST)
        exps = jnp.exp(scores - scores.max(axis=1, keepdims=True))
        total = exps.sum(axis=1, keepdims=True)
        if kept_ref is not None:
            exps = exps * _factors(kept_ref, start, head, options)
        out = _dot(exps.astype(v.dtype), v, (1, 0)) / total
        _write(out_ref, start, head, own, out)

    keys = refs[-1].shape[0]
    group = _group(width, options.num_heads, UNROLLED // _score_bytes(out_ref.shape[0], keys))
    _for_each_head(width, options.num_heads, group, of_head)


def _backward_kernel(
    refs: Any, seen: Seen, kept_ref: Any, grad_ref: Any, *out_refs: Any, options: _Options
) -> None:
    width = grad_ref.shape[-1]
    scale = 1 / math.sqrt(width // options.num_heads)
    masks = _masks(seen, keys=0)

    def of_head(start: Any, head: _Head) -> None:
        q, k, v = (_read(ref, first + start, head) for ref, first in _places(refs))
        own = head.own()
        q = jnp.where(own, q, 0)
        grad = jnp.where(own, _read(grad_ref, start, head), 0)
        # [keys queries], so that two of the last three products need no transposed matrix.
        scores = _dot(k, q, (1, 1)) * scale
        scores = _where_seen(scores, masks, options.causal, 0, LOWEST)
        exps = jnp.exp(scores - scores.max(axis=0, keepdims=True))
        weights = exps * (1 / exps.sum(axis=0, keepdims=True))
        of_weights = _dot(v, grad, (1, 1))
        left = weights
        if kept_ref is not None:
            factors = _factors(kept_ref, start, head, options).T
            left, of_weights = weights * factors, of_weights * factors
        mean = (weights * of_weights).sum(axis=0, keepdims=True)
        of_scores = weights * (of_weights - mean) * scale
        if masks:
            # If all keys of a query are masked, weights are not zero, but no score has a gradient.
            of_scores = _where_seen(of_scores, masks, options.causal, 0, 0.0)
        of_scores = of_scores.astype(k.dtype)
        of_values = _dot(left.astype(v.dtype), grad, (1, 0))
        gradients = _dot(of_scores, k, (0, 0)), _dot(of_scores, q, (1, 0)), of_values
        for (ref, first), gradient in zip(_places(out_refs), gradients, strict=True):
            _write(ref, first + start, head, own, gradient)

    _for_each_head(width, options.num_heads, _group(width, options.num_heads), of_head)


def _factors(kept_ref: Any, start: Any, head: _Head, options: _Options) -> Array:
    """Factors [N M] of dropout for the weights of a head of the group that begins at `start`."""
    kept = kept_ref[jax.lax.div(start + head.first, head.last - head.first)]
    return kept.astype(jnp.float32) * (1 / (1 - options.rate))


def _masks(seen: Seen, keys: int) -> list[Array]:
    """Masks of the scores other than the causal one; `keys` is the axis of the keys."""

    def along(axis: int, ref: Any) -> Array:
        return ref[...] if axis == 1 else _column(ref[...])

    mask, segments = seen
    masks = [] if mask is None else [along(keys, mask) > 0]
    if segments is not None:
        masks.append(along(1 - keys, segments.query) == along(keys, segments.key))
    return masks


def _where_seen(x: Array, masks: list[Array], causal: bool, keys: int, other: float) -> Array:
    """x where the query may attend to the key, else `other`; `keys` is the axis of the keys."""
    for mask in masks:
        x = jnp.where(mask, x, other)
    if causal:
        places = [jax.lax.broadcasted_iota(jnp.int32, x.shape, axis) for axis in (keys, 1 - keys)]
        x = jnp.where(places[0] <= places[1], x, other)
    return x


def _column(row: Array) -> Array:
    """Transpose [1 M] to [M 1]."""
    return jnp.broadcast_to(row, (SUBLANES, row.shape[1])).T[:, :1]


def _columns(offset: Any, head: _Head) -> Any:
    return pl.ds(offset + head.low, head.high - head.low)


def _read(ref: Any, offset: Any, head: _Head) -> Array:
    return ref[:, _columns(offset, head)]


def _write(ref: Any, offset: Any, head: _Head, own: Array, value: Array) -> None:
    """Write the head's columns, keeping those that earlier heads have written."""
    value = value.astype(ref.dtype)
    if head.first > head.low:
        value = jnp.where(own, value, ref[:, _columns(offset, head)])
    ref[:, _columns(offset, head)] = value


def _dot(a: Array, b: Array, contracted: tuple[int, int]) -> Array:
    dims = (((contracted[0],), (contracted[1],)), ((), ()))
    return jax.lax.dot_general(a, b, dims, preferred_element_type=jnp.float32)


def _score_bytes(queries: int, keys: int) -> int:
    """Bytes of a matrix of scores, with queries or keys along the lanes."""
    return 4 * max(
        _round_up(rows, SUBLANES) * _round_up(columns, LANES)
        for rows, columns in ((queries, keys), (keys, queries))
    )


def _round_up(n: int, multiple: int) -> int:
    return -(-n // multiple) * multiple
