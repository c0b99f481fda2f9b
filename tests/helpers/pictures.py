"""Shared by tests of image models: batches, shapes, drawn parameters."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np


def images_like(*shape: int, seed: int = 0) -> jax.Array:
    """Normal noise."""
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape), jnp.float32)


def spec(*shape: int) -> jax.ShapeDtypeStruct:
    """The shape of such a batch."""
    return jax.ShapeDtypeStruct(shape, jnp.float32)


def shapes(model: Any, size: tuple[int, int] = (224, 224)) -> Any:
    """The parameters for color images, as shapes."""
    return jax.eval_shape(model.init, jax.random.key(0), spec(1, *size, 3))['params']


def count(tree: Any) -> int:
    """Numbers in all arrays, or shapes, of a tree."""
    return sum(leaf.size for leaf in jax.tree.leaves(tree))


def drawn(model: Any, *inputs: Any) -> Any:
    """Random parameters, none of them at its initial zero or one, so that each of them shows."""
    rng = np.random.default_rng(1)

    def draw(path: Any, p: jax.ShapeDtypeStruct) -> jax.Array:
        x = rng.standard_normal(p.shape, np.float32)
        if p.ndim > 1:
            return jnp.asarray(x / np.sqrt(np.prod(p.shape[:-1])))
        return jnp.asarray(0.1 * x + (path[-1].key == 'scale'))

    tree = jax.eval_shape(model.init, jax.random.key(0), *inputs)['params']
    return jax.tree_util.tree_map_with_path(draw, tree)
