"""The placement of single arrays on the mesh."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from vit_jax.errors import UserError
from vit_jax.runtime.mesh import BATCH, SLICE, WITHIN

PyTree = Any
Rule = tuple[str, tuple[str | None, ...]]


def check_rules(rules: Sequence[Rule]) -> None:
    """Raise UserError if a rule names an axis that is not within a slice."""
    for axis in (axis for _, axes in rules for axis in axes):
        if axis not in (None, *WITHIN):
            raise UserError(
                f'config.parallel.rules: {axis!r} is not an axis that parameters are split over; '
                f'use one of {", ".join(WITHIN)}'
            )


def shards_of(mesh: Mesh, count: int, process: int) -> tuple[int, ...]:
    """The shards of every batch, of `count`, that devices of a process hold, in ascending order.

    Processes may interleave in the mesh, as on v5e:4x4. Those that split parameters over `tensor`
    with each other hold the same shards.
    """
    held: Mapping[Any, Any] = NamedSharding(mesh, BATCH).devices_indices_map((count,))
    own = {rows.start or 0 for device, (rows,) in held.items() if device.process_index == process}
    return tuple(sorted(own))


def leaf_spec(
    name: str, shape: tuple[int, ...], mesh: Mesh, rules: Sequence[Rule], min_size: int
) -> P:
    """The placement of one array: the first rule that matches its name, else fsdp.

    Under fsdp the largest dimension that the axis divides is split; arrays with fewer
    than `min_size` elements are replicated, as their communication costs more than it saves.
    """
    for pattern, axes in rules:
        if re.search(pattern, name) and len(axes) == len(shape):
            return P(*axes)
    size = mesh.shape['fsdp']
    divisible = [i for i, n in enumerate(shape) if n % size == 0]
    if size == 1 or not divisible or np.prod(shape) < min_size:
        return P()
    split = max(divisible, key=lambda i: shape[i])
    return P(*['fsdp' if i == split else None for i in range(len(shape))])


def spread_spec(spec: P, shape: tuple[int, ...], mesh: Mesh) -> P:
    """A placement that splits an array over all devices of a slice, if a dimension divides so.

    Args:
      spec: of the array, without the axis of slices.
      shape: of the array.
      mesh: of `make_mesh`.
    """
    split = [_names(part) for part in (*spec, *[None] * (len(shape) - len(spec)))]
    used = {name for names in split for name in names}
    rest = tuple(name for name in WITHIN if name not in used and mesh.shape[name] > 1)
    parts = math.prod(mesh.shape[name] for name in rest)
    sizes = [
        n // math.prod(mesh.shape[name] for name in names)
        for n, names in zip(shape, split, strict=True)
    ]
    divisible = [i for i, n in enumerate(sizes) if n % parts == 0]
    if parts > 1 and divisible:
        split[max(divisible, key=lambda i: sizes[i])] += rest
    return P(*[names or None for names in split])


def _names(part: str | tuple[str, ...] | None) -> tuple[str, ...]:
    return (part,) if isinstance(part, str) else tuple(part or ())


def add_up(grads: PyTree, spec_of: Callable[[Any, Any], P], mesh: Mesh) -> PyTree:
    """The sum of gradients over slices, in a step that every slice runs on its own rows.

    The devices of a slice, which have the same gradients, share them out before they cross.

    Args:
      grads: of a slice.
      spec_of: the placement of a leaf, for its path and the leaf.
      mesh: of `make_mesh`.
    """

    def place(spread: bool, path: Any, leaf: jax.Array) -> jax.Array:
        spec = spec_of(path, leaf)
        spec = spread_spec(spec, leaf.shape, mesh) if spread else spec
        return jax.lax.with_sharding_constraint(leaf, spec)

    # Without the barriers the compiler undoes the change of shape.
    def as_matrix(path: Any, leaf: jax.Array) -> jax.Array:
        shape = matrix_shape(spread_spec(spec_of(path, leaf), leaf.shape, mesh), leaf)
        return leaf if shape == leaf.shape else jax.lax.optimization_barrier(leaf.reshape(shape))

    def restored(part: jax.Array, leaf: jax.Array) -> jax.Array:
        same = part.shape == leaf.shape
        return part if same else jax.lax.optimization_barrier(part).reshape(leaf.shape)

    place_all = jax.tree_util.tree_map_with_path
    parts = jax.lax.psum(place_all(as_matrix, place_all(partial(place, True), grads)), SLICE)
    parts = jax.tree.map(restored, parts, grads)
    # Placed twice: else the compiler may gather the parts before it adds them up.
    return place_all(partial(place, False), place_all(partial(place, True), parts))


def matrix_shape(spec: P, leaf: Any) -> tuple[int, ...]:
    """The shape in which an array crosses: a matrix, where that leaves its parts in one piece.

    TPUs pad the last two dimensions to tiles of 8 x 128, and what is padded crosses with the rest:
    of a kernel [768 3 12 64] nearly three times its size.
    """
    split = [i for i, names in enumerate(spec) if names]
    if leaf.ndim < 3 or len(split) != 1 or split[0] not in (0, leaf.ndim - 1):
        return leaf.shape
    size = leaf.shape[split[0]]
    rest = leaf.size // size
    return (size, rest) if split[0] == 0 else (rest, size)
