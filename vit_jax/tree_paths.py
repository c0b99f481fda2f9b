"""Places in a tree of arrays as text: `encoder/block_3/mlp/fc1/kernel`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax

PyTree = Any


def path_name(keys: tuple[Any, ...]) -> str:
    """A key path of `jax.tree_util`, joined by '/'."""
    return jax.tree_util.keystr(keys, simple=True, separator='/')


def param_paths(params: PyTree) -> dict[str, Any]:
    """The leaves of `params` by path."""
    return {path_name(keys): leaf for keys, leaf in jax.tree_util.tree_leaves_with_path(params)}


def map_paths(f: Callable[[str], Any], tree: PyTree) -> PyTree:
    """The tree of f(path) for every leaf's path."""
    return jax.tree_util.tree_map_with_path(lambda keys, _: f(path_name(keys)), tree)
