"""Shared by tests of encoder-decoders: a batch, drawn parameters, a forward pass."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

SOURCE = jnp.array([[5, 6, 7, 8, 9, 2], [10, 11, 2, 0, 0, 0], [12, 2, 0, 0, 0, 0]])
TARGET_IN = jnp.array([[1, 4, 5, 6, 7], [1, 8, 9, 10, 0], [1, 11, 0, 0, 0]])


def shapes(model: Any) -> Any:
    """The parameters, as shapes."""
    tokens = jax.ShapeDtypeStruct((1, 3), jnp.int32)
    return jax.eval_shape(model.init, jax.random.key(0), tokens, tokens)['params']


def count(tree: Any) -> int:
    """Numbers in all arrays, or shapes, of a tree."""
    return sum(leaf.size for leaf in jax.tree.leaves(tree))


def perturbed(model: Any) -> Any:
    """Parameters none of which is zero, one or like another."""
    rng = np.random.default_rng(1)

    def values(path: Any, leaf: jax.ShapeDtypeStruct) -> jax.Array:
        mean = 1.0 if path[-1].key == 'scale' else 0.0
        return jnp.asarray(mean + 0.2 * rng.normal(size=leaf.shape), jnp.float32)

    return jax.tree_util.tree_map_with_path(values, shapes(model))


def forward(
    model: Any,
    params: Any,
    source: Any = SOURCE,
    target_in: Any = TARGET_IN,
    rngs: Any = None,
    **options: Any,
) -> Any:
    """The model's outputs for the batch, with exact matmuls."""
    with jax.default_matmul_precision('highest'):
        return _compiled(model, **options)(params, source, target_in, rngs)


@functools.cache
def _compiled(model: Any, **options: Any) -> Callable:
    return jax.jit(
        lambda params, source, target_in, rngs: model.apply(
            {'params': params}, source, target_in, rngs=rngs, **options
        )
    )
