"""Paths in a tree of arrays as text, such as `encoder/block_3/mlp/fc1/kernel`."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Mapping
from typing import Any

import jax
import numpy as np

from vit_jax.errors import UserError

PyTree = Any
_FAULTS_NAMED = 5


def path_name(keys: tuple[Any, ...]) -> str:
    """Join a key path of `jax.tree_util` by '/'."""
    return jax.tree_util.keystr(keys, simple=True, separator='/')


def param_paths(params: PyTree) -> dict[str, Any]:
    """Return the leaves of `params` by path."""
    return {path_name(keys): leaf for keys, leaf in jax.tree_util.tree_leaves_with_path(params)}


def map_paths(f: Callable[[str], Any], tree: PyTree) -> PyTree:
    """Replace every leaf of a tree by f(its path)."""
    return jax.tree_util.tree_map_with_path(lambda keys, _: f(path_name(keys)), tree)


def block_paths(path: str, leaf: Any, scanned: str = 'blocks', block: str = 'block_') -> list[str]:
    """Return the paths of a parameter in each of its blocks.

    Scanned blocks are stacked on axis 0 of `blocks`: `encoder/blocks/norm1/scale` [L D] holds
    `encoder/block_0/norm1/scale` and so on. Any other parameter has only its own path.
    """
    stacked = re.match(f'((?:.*/)?){scanned}/', path)
    if stacked is None:
        return [path]
    suffix = path[stacked.end() :]
    return [f'{stacked[1]}{block}{i}/{suffix}' for i in range(leaf.shape[0])]


def unroll(
    flat: Mapping[str, Any], scanned: str = 'blocks', block: str = 'block_'
) -> dict[str, Any]:
    """Split scanned blocks in arrays by path; see `block_paths`."""
    unrolled_leaves: dict[str, Any] = {}
    for path, leaf in flat.items():
        paths = block_paths(path, leaf, scanned, block)
        unrolled_leaves |= {path: leaf} if paths == [path] else dict(zip(paths, leaf, strict=True))
    return unrolled_leaves


def require_fit(
    have: Mapping[str, Any],
    want: Mapping[str, Any],
    context: str,
    *,
    dtypes: bool = False,
    label: Callable[[str], str] = str,
    first: str = '',
    advice: str = '',
) -> None:
    """Compare arrays with the expected ones.

    Args:
      have, want: Arrays by path, or anything with a shape (and a dtype).
      context: The beginning of the message, which names the two sides.
      dtypes: Whether dtypes must also agree.
      label: Path -> its name in the message.
      first: Paths with this prefix are named before others.
      advice: The end of the message.

    Raises:
      UserError: names the first few arrays that are missing, unknown, or have a different shape or
        dtype, with both shapes or dtypes.
    """
    names = sorted({*have, *want}, key=lambda name: (not name.startswith(first), name))
    found = ((name, _fault(have.get(name), want.get(name), dtypes)) for name in names)
    faults = [f'{label(name)} {fault}' for name, fault in found if fault]
    if faults:
        more = f'; and {len(faults) - _FAULTS_NAMED} more' if len(faults) > _FAULTS_NAMED else ''
        raise UserError(f'{context}: {"; ".join(faults[:_FAULTS_NAMED])}{more}{advice}')


def _fault(have: Any, want: Any, dtypes: bool) -> str:
    """Return the fault of an array; empty for none."""
    if have is None:
        return f'{tuple(want.shape)} is missing'
    if want is None:
        return f'{tuple(have.shape)} is unknown'
    if tuple(have.shape) != tuple(want.shape):
        return f'has shape {tuple(have.shape)} instead of {tuple(want.shape)}'
    old, new = np.dtype(have.dtype), np.dtype(want.dtype)
    return f'is {old} instead of {new}' if dtypes and old != new else ''


def overlay(initial: Mapping[str, PyTree], updates: Mapping[str, PyTree]) -> dict[str, PyTree]:
    """Return a copy of `initial` with the leaves of `updates` in their places."""
    merged = dict(initial)
    for key, value in updates.items():
        merged[key] = overlay(initial[key], value) if isinstance(value, Mapping) else value
    return merged


def weights_digest(variables: Any) -> str:
    """Return a digest of all arrays."""
    digest = hashlib.sha256()
    for leaf in jax.tree.leaves(variables):
        digest.update(np.ascontiguousarray(leaf).tobytes())
    return digest.hexdigest()
