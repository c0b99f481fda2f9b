"""Gradients of the loss of a global batch that microbatches and devices share.

A loss that is a sum over rows is differentiated one microbatch at a time; only its normalizers are
counted over the whole batch. A loss that couples rows needs the outputs of all rows at once: these
are computed first, the loss is differentiated with respect to them, and each microbatch propagates
its rows of that gradient back through the model (GradCache: Gao et al., 2021, arXiv:2101.06983).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from vit_jax.array_types import Int
from vit_jax.ops import terms
from vit_jax.ops.terms import Term
from vit_jax.tree_paths import path_name

PyTree = Any
Metrics = dict[str, jax.Array]


class GlobalRows(NamedTuple):
    """Rows of a global batch.

    Attributes:
      batch: {name: array [b ...]}.
      positions: Positions of the rows in the global batch, the keys of their randomness.
    """

    batch: dict[str, Any]
    positions: Int[Array, ' b']


class Split(NamedTuple):
    """Division of a global batch into microbatches and devices.

    Attributes:
      accum_steps: Microbatches that a device computes one after the other.
      axis_name: Axis of `jax.pmap` or of the slices; None under `jax.jit` on one slice,
        where the batch is global.
      add_up: Sum of gradients over the axis; None for a plain one.
    """

    accum_steps: int = 1
    axis_name: str | None = None
    add_up: Callable[[PyTree], PyTree] | None = None

    def total(self, grads: PyTree) -> PyTree:
        """Return the gradients of the global batch."""
        if self.axis_name is None:
            return grads
        return self.add_up(grads) if self.add_up else jax.lax.psum(grads, self.axis_name)


# (params, collections, examples) -> (outputs, collections)
Forward = Callable[[PyTree, PyTree, GlobalRows], tuple[dict[str, Any], PyTree]]
Loss = Callable[[dict[str, Any], dict[str, Any]], dict[str, Term]]


def separable(
    forward: Forward,
    loss: Loss,
    params: PyTree,
    collections: PyTree,
    examples: GlobalRows,
    split: Split,
) -> tuple[PyTree, Metrics, PyTree]:
    """Differentiate a loss whose terms are sums over rows.

    Args:
      forward: The model.
      loss: Function of outputs and their batch; the terms.
      params: Parameters to differentiate by.
      collections: Other variables, which pass from microbatch to microbatch.
      examples: Examples of this device.
      split: Division of the global batch.

    Returns:
      Gradients and metrics of the global batch, and the collections after it.
    """

    def terms_of(params: PyTree, collections: PyTree, examples: GlobalRows):
        outputs, collections = forward(params, collections, examples)
        return loss(outputs, examples.batch), collections

    def count(examples: GlobalRows):
        return terms.counts(terms_of(params, collections, examples)[0])

    counts = global_counts(count, examples, split)

    def share(params: PyTree, collections: PyTree, examples: GlobalRows):
        parts, collections = terms_of(params, collections, examples)
        total, metrics = weighted_loss(parts, counts)
        return total, (metrics, collections)

    def microbatch(collections: PyTree, examples: GlobalRows):
        grads, (metrics, collections) = jax.grad(share, has_aux=True)(params, collections, examples)
        return collections, (grads, metrics)

    collections, sums = accumulate(microbatch, collections, examples, split.accum_steps)
    grads, metrics = sums
    if split.axis_name is not None:
        metrics = jax.lax.psum(metrics, split.axis_name)
        collections = jax.lax.pmean(collections, split.axis_name)
    return split.total(grads), metrics, collections


def coupled(
    forward: Forward,
    loss: Loss,
    params: PyTree,
    collections: PyTree,
    examples: GlobalRows,
    split: Split,
) -> tuple[PyTree, Metrics, PyTree]:
    """Differentiate a loss in which rows depend on one another; see `separable`.

    Scalar outputs, such as a learned temperature, are averaged over microbatches and devices; of
    integers, such as the step, which are the same everywhere, the largest is taken.
    """
    if split == Split():
        return separable(forward, loss, params, collections, examples, split)

    def output(collections: PyTree, examples: GlobalRows):
        outputs, collections = forward(params, collections, examples)
        return collections, outputs

    outputs = join(output, collections, examples, split.accum_steps)
    gathered, batch = gather((outputs, examples.batch), split.axis_name)

    def total(floats: PyTree):
        parts = loss(merge_floats(floats, gathered), batch)
        return weighted_loss(parts, None)

    by_output, metrics = jax.grad(total, has_aux=True)(inexact(gathered))
    by_output = own_share(by_output, outputs, split)

    def microbatch(collections: PyTree, rows: tuple[GlobalRows, PyTree]):
        examples, cotangents = rows

        def run(params: PyTree):
            outputs, after = forward(params, collections, examples)
            return inexact(outputs), after

        outputs, back, after = jax.vjp(run, params, has_aux=True)
        (grads,) = back(jax.tree.map(lambda g, x: g.reshape(x.shape), cotangents, outputs))
        return after, grads

    collections, grads = accumulate(
        microbatch, collections, (examples, by_output), split.accum_steps
    )
    if split.axis_name is not None:
        collections = jax.lax.pmean(collections, split.axis_name)
    return split.total(grads), metrics, collections


def weighted_loss(
    parts: dict[str, Term], counts: terms.Scalars | None
) -> tuple[jax.Array, Metrics]:
    """Return the loss, and the mean of every term with the loss among them."""
    means = terms.means(parts, counts)
    loss = terms.total(parts, means)
    return loss, {**means, 'loss': loss}


def global_counts(
    count: Callable[[GlobalRows], terms.Scalars], examples: GlobalRows, split: Split
) -> terms.Scalars | None:
    """Return the counts of the whole global batch; None if a microbatch is all of it.

    Only the counts are used, so the compiler drops the forward pass if they depend only on the
    batch.
    """
    if split == Split():
        return None
    by_microbatch = jax.lax.map(count, divide(examples, split.accum_steps))
    counts = jax.tree.map(lambda x: x.sum(0), by_microbatch)
    return counts if split.axis_name is None else jax.lax.psum(counts, split.axis_name)


def accumulate(fn: Callable, carry: PyTree, examples: PyTree, steps: int) -> tuple[PyTree, PyTree]:
    """`fn(carry, examples) -> (carry, out)` over `steps` microbatches, and the sum of `out`."""
    if steps == 1:
        return fn(carry, examples)

    def body(carry, microbatch):
        inner, total = carry
        inner, out = fn(inner, microbatch)
        return (inner, jax.tree.map(jnp.add, total, out)), None

    microbatches = divide(examples, steps)
    shape = jax.eval_shape(fn, carry, jax.tree.map(lambda x: x[0], microbatches))[1]
    zeros = jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), shape)
    (carry, total), _ = jax.lax.scan(body, (carry, zeros), microbatches)
    return carry, total


def divide(examples: PyTree, steps: int) -> PyTree:
    """Microbatches along a new axis 0; the j-th holds examples j, j + steps, ...

    So every device keeps its own rows.
    """
    return jax.tree.map(
        lambda x: x.reshape(x.shape[0] // steps, steps, *x.shape[1:]).swapaxes(0, 1), examples
    )


def join(fn: Callable, carry: PyTree, examples: GlobalRows, steps: int) -> PyTree:
    """Return the outputs of `fn(carry, examples) -> (carry, outputs)` for all rows, in their order.

    Raises:
      ValueError: for an output that is neither a scalar nor has a row for every example.
    """
    if steps == 1:
        outputs = fn(carry, examples)[1]
    else:
        _, stacked = jax.lax.scan(fn, carry, divide(examples, steps))
        outputs = jax.tree.map(merge_microbatches, stacked)
    rows = len(examples.positions)
    for path, leaf in jax.tree_util.tree_leaves_with_path(outputs):
        if leaf.ndim and len(leaf) != rows:
            raise ValueError(
                f'output {path_name(path)} of shape {leaf.shape}: a task that couples rows needs a '
                f'row for each of the {rows} examples, or a scalar'
            )
    return outputs


def merge_microbatches(stacked: jax.Array) -> jax.Array:
    """Invert `divide`; scalars are averaged over microbatches, integers take the maximum."""
    if stacked.ndim == 1:
        return stacked.mean(0) if jnp.issubdtype(stacked.dtype, jnp.inexact) else stacked.max(0)
    return stacked.swapaxes(0, 1).reshape(-1, *stacked.shape[2:])


def gather(tree: PyTree, axis_name: str | None) -> PyTree:
    """Return the rows of all devices, the means of scalars, and the largest of integers."""
    if axis_name is None:
        return tree

    def gathered(x: jax.Array) -> jax.Array:
        if x.ndim:
            return jax.lax.all_gather(x, axis_name, tiled=True)
        inexact = jnp.issubdtype(x.dtype, jnp.inexact)
        return (jax.lax.pmean if inexact else jax.lax.pmax)(x, axis_name)

    return jax.tree.map(gathered, tree)


def own_share(by_output: PyTree, outputs: PyTree, split: Split) -> PyTree:
    """Select the gradient of this device's outputs; of a scalar, one number per microbatch."""
    first: Any = 0
    devices: Any = 1
    if split.axis_name is not None:
        first, devices = jax.lax.axis_index(split.axis_name), jax.lax.psum(1, split.axis_name)

    def share(total: jax.Array, local: jax.Array) -> jax.Array:
        if not local.ndim:
            return jnp.full(split.accum_steps, total / (split.accum_steps * devices))
        return jax.lax.dynamic_slice_in_dim(total, first * len(local), len(local))

    return jax.tree.map(share, by_output, inexact(outputs))


def inexact(tree: PyTree) -> PyTree:
    """Return the leaves that have gradients; None for the others."""
    return jax.tree.map(lambda x: x if jnp.issubdtype(x.dtype, jnp.inexact) else None, tree)


def merge_floats(floats: PyTree, tree: PyTree) -> PyTree:
    """`tree` with the leaves of `floats` where these are not None; the inverse of `inexact`."""
    return jax.tree.map(
        lambda x, y: y if x is None else x, floats, tree, is_leaf=lambda x: x is None
    )
