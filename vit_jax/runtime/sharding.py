"""Layouts: the placement of arrays on devices, and compilation by `jit` or `pmap`.

With `mesh.py` the only module that names devices. A layout takes the pure steps of `step.py` and
NumPy batches. Checkpoints get global arrays on the mesh, so that a run stopped under one layout
resumes under any other.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import flax.jax_utils
import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from vit_jax.config.run import Parallel
from vit_jax.errors import UserError, nearest
from vit_jax.runtime.mesh import (
    BATCH,
    ROWS,
    SLICE,
    Rule,
    any_devices,
    check_rules,
    leaf_spec,
    make_mesh,
    shards_of,
    sum_over_slices,
    trace_on,
)
from vit_jax.tree_paths import path_name

PyTree = Any


@dataclasses.dataclass(frozen=True)
class Jit:
    """`jax.jit` over a mesh: data parallel, fully sharded, or tensor parallel by rules."""

    mesh: Mesh
    rules: tuple[Rule, ...] = ()
    min_split_size: int = 2**14
    axis_name = None

    @functools.cached_property
    def num_shards(self) -> int:
        """Number of parts into which the batch is split."""
        return math.prod(self.mesh.shape[name] for name in (SLICE, *ROWS))

    @functools.cached_property
    def shards_here(self) -> tuple[int, ...]:
        """Parts of every batch that devices of this process hold."""
        return shards_of(self.mesh, self.num_shards, jax.process_index())

    @property
    def train_axis(self) -> str | None:
        """Axis over which a training step adds up gradients itself; None for one slice."""
        return SLICE if self.mesh.shape[SLICE] > 1 else None

    def add_up(self, grads: PyTree) -> PyTree:
        """Return the sum of gradients over slices, see `mesh.sum_over_slices`."""
        return sum_over_slices(grads, self._spec, self.mesh)

    def shardings(self, abstract: PyTree) -> PyTree:
        """Return a NamedSharding for every leaf of a state or of variables."""
        return jax.tree_util.tree_map_with_path(
            lambda path, leaf: NamedSharding(self.mesh, self._spec(path, leaf)), abstract
        )

    def _spec(self, path: Any, leaf: Any) -> P:
        name, least = path_name(path), self.min_split_size
        return leaf_spec(name, leaf.shape, self.mesh, self.rules, least)

    def create(self, init: Callable[..., PyTree], *given: PyTree) -> PyTree:
        """Run `init(*arguments)` so that every array is created on its devices.

        Args:
          init: Makes a state or variables.
          given: NumPy arrays, the same in every process; each device gets only its parts.
        """
        placed = jax.tree.map(_place, given, self.shardings(given))
        out_shardings = self.shardings(jax.eval_shape(init, *placed))
        options = _compiler_options(self.mesh.devices.flat[0])
        return jax.jit(init, out_shardings=out_shardings, compiler_options=options)(*placed)

    def feed(self, batch: dict[str, np.ndarray]) -> dict[str, Any]:
        """Return a batch for the next call of a step, which must not change afterward.

        For one device these are the NumPy arrays: the call places them in an eighth of the time.
        """
        return batch if self.mesh.size == 1 else self.put_batch(batch)

    def put_batch(self, batch: dict[str, np.ndarray]) -> dict[str, jax.Array]:
        """Put this process's rows, given by `shards_here`, into global arrays over all devices."""
        sharding, here = NamedSharding(self.mesh, BATCH), len(self.shards_here)
        shapes = {
            name: (len(x) * self.num_shards // here, *x.shape[1:]) for name, x in batch.items()
        }
        # One call for all arrays takes half the time of a call for each.
        return jax.make_array_from_process_local_data(sharding, batch, shapes)

    def put_copies(self, batch: dict[str, np.ndarray]) -> dict[str, jax.Array]:
        """Put the whole batch, the same in every process, on each device."""
        return jax.tree.map(partial(_place, sharding=NamedSharding(self.mesh, P())), batch)

    def compile_train(self, train_step: Callable, abstract_state: PyTree) -> Callable:
        """(state, batch) -> (state, metrics); the old state's buffers are reused.

        With several slices, each runs the step on its own rows and sums gradients over
        `train_axis` once, after all microbatches.
        """
        state = self.shardings(abstract_state)
        batch, replicated = NamedSharding(self.mesh, BATCH), NamedSharding(self.mesh, P())
        step = train_step
        if self.train_axis:
            step = jax.shard_map(
                step,
                mesh=self.mesh,
                in_specs=(P(), P(SLICE)),
                out_specs=P(),
                axis_names={SLICE},
                check_vma=False,
            )
        return jax.jit(
            trace_on(self.mesh, step),
            in_shardings=(state, batch),
            out_shardings=(state, replicated),
            donate_argnums=0,
        )

    def compile_eval(self, eval_step: Callable) -> Callable:
        """(variables, batch) -> results of `eval_step`, replicated."""
        replicated = NamedSharding(self.mesh, P())
        return jax.jit(trace_on(self.mesh, eval_step), out_shardings=replicated)

    def to_global(self, state: PyTree) -> PyTree:
        return state

    def from_global(self, state: PyTree) -> PyTree:
        return state


@dataclasses.dataclass(frozen=True)
class Pmap:
    """`jax.pmap`: one replica per device, gradients averaged over the axis `batch`."""

    mesh: Mesh
    axis_name = train_axis = 'batch'
    add_up = None

    @property
    def devices(self) -> list[jax.Device]:
        return list(self.mesh.local_devices)

    @property
    def num_shards(self) -> int:
        return self.mesh.size

    @property
    def shards_here(self) -> tuple[int, ...]:
        # pmap keeps the devices of a process together, in process order.
        first = jax.process_index() * len(self.devices)
        return tuple(range(first, first + len(self.devices)))

    def shardings(self, abstract: PyTree) -> PyTree:
        return jax.tree.map(lambda _: NamedSharding(self.mesh, P()), abstract)

    def create(self, init: Callable[..., PyTree], *given: PyTree) -> PyTree:
        options = _compiler_options(self.devices[0])
        state = jax.jit(init, compiler_options=options)(*given)
        return self._replicate(state)

    def put_batch(self, batch: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        n = len(self.devices)
        return jax.tree.map(lambda x: x.reshape(n, x.shape[0] // n, *x.shape[1:]), batch)

    feed = put_batch

    def put_copies(self, batch: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        n = len(self.devices)
        return jax.tree.map(lambda x: np.broadcast_to(x, (n, *x.shape)), batch)

    def compile_train(self, train_step: Callable, abstract_state: PyTree) -> Callable:
        del abstract_state
        step = jax.pmap(train_step, self.axis_name, devices=self._devices, donate_argnums=0)
        return lambda state, batch: _first_metrics(step(state, batch))

    def compile_eval(self, eval_step: Callable) -> Callable:
        step = jax.pmap(eval_step, self.axis_name, devices=self._devices)
        return lambda variables, batch: first_replica(step(variables, batch))

    @property
    def _devices(self) -> list[jax.Device] | None:
        # Across processes, pmap takes only its own order.
        return self.devices if jax.process_count() == 1 else None

    def to_global(self, state: PyTree) -> PyTree:
        replicated = NamedSharding(self.mesh, P())
        return jax.tree.map(
            lambda x: jax.device_put(np.asarray(x), replicated), first_replica(state)
        )

    def from_global(self, state: PyTree) -> PyTree:
        return self._replicate(jax.tree.map(lambda x: x.addressable_data(0), state))

    def _replicate(self, tree: PyTree) -> PyTree:
        # By the axis of the steps: otherwise they would be compiled twice, for the result of this
        # function and for their own. From the host: otherwise one device would hold all copies.
        return flax.jax_utils.replicate(jax.device_get(tree), self.devices, self.axis_name)


Layout = Jit | Pmap


def _compiler_options(device: jax.Device) -> dict[str, int] | None:
    """Return options for a program that runs once, so not worth optimizing on CPUs."""
    return {'xla_backend_optimization_level': 0} if device.platform == 'cpu' else None


def _place(array: np.ndarray, sharding: NamedSharding) -> jax.Array:
    return jax.make_array_from_callback(array.shape, sharding, lambda part: array[part])


def first_replica(tree: PyTree) -> PyTree:
    """Return the first local replica of every leaf."""
    return jax.tree.map(lambda x: x.addressable_data(0)[0], tree)


def _first_metrics(result: tuple[PyTree, PyTree]) -> tuple[PyTree, PyTree]:
    return result[0], first_replica(result[1])


def make_layout(
    devices: Sequence[jax.Device] | None = None,
    parallel: Parallel = Parallel(),  # noqa: B008  frozen
) -> Layout:
    """Return the layout that a config describes.

    Args:
      devices: All by default.
      parallel: `config.parallel`.

    Raises:
      UserError: for an unknown strategy, or sizes that do not match the devices.
    """
    devices = any_devices() if devices is None else devices
    mesh = make_mesh(devices, parallel.fsdp, parallel.tensor, parallel.slices)
    check_rules(parallel.rules)
    if parallel.strategy == 'jit':
        return Jit(mesh, tuple(parallel.rules), parallel.min_split_size)
    if parallel.strategy != 'pmap':
        extra_axes = nearest('strategy', parallel.strategy, LAYOUTS)
        raise UserError(f'config.parallel.strategy: {extra_axes}')
    if parallel.fsdp * parallel.tensor > 1 or parallel.rules:
        raise UserError('config.parallel: pmap is data parallel only; use strategy=jit')
    return Pmap(mesh)


LAYOUTS = ('jit', 'pmap')


def check_batch(
    layout: Layout,
    batch_size: int,
    *,
    rows: int | None = None,
    accum_steps: int = 1,
    multiple: int = 1,
    reason: str = '',
) -> None:
    """Check that every device gets whole microbatches and a multiple of `multiple` rows.

    Args:
      layout: Layout of the devices.
      batch_size: `config.batch_size`.
      rows: Rows of a batch, if `batch_size` counts tokens.
      accum_steps: Microbatches per step.
      multiple: Number that divides the rows of a device, as the task needs.
      reason: Reason for `multiple`, as a short phrase.

    Raises:
      UserError: for any other batch size.
    """
    rows = batch_size if rows is None else rows
    phrase = '' if rows == batch_size else f': its {rows} rows in a bucket'
    unit = layout.num_shards * accum_steps
    if rows % unit:
        raise UserError(
            f'config.batch_size={batch_size}{phrase} must be a multiple of {unit} '
            f'({layout.num_shards} devices x {accum_steps} accumulation steps)'
        )
    if (rows // layout.num_shards) % multiple:
        reason_text = f': {reason}' if reason else ''
        raise UserError(
            f'config.batch_size={batch_size}{phrase} must be a multiple of '
            f'{layout.num_shards * multiple}, {multiple} examples for each of the '
            f'{layout.num_shards} devices{reason_text}'
        )


def abstract_target(layout: Layout, abstract_state: PyTree) -> PyTree:
    """Return shapes, dtypes and shardings to restore a checkpoint into."""
    return jax.tree.map(
        lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s),
        abstract_state,
        layout.shardings(abstract_state),
    )


def abstract_batch(layout: Layout, batch: PyTree) -> PyTree:
    """Return shapes, dtypes and shardings of a global batch, to compile a step."""
    sharding = NamedSharding(layout.mesh, BATCH)
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), batch)
