"""What the tests of checkpoints share."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest


@pytest.fixture(scope='session')
def images() -> Callable[..., jax.Array]:
    """`images(2, 8, 8, 3)`: normal noise."""
    return lambda *shape: jnp.asarray(np.random.default_rng(0).normal(size=shape), jnp.float32)


@pytest.fixture(scope='session')
def perturbed() -> Callable[..., Any]:
    """`perturbed(model, images)`: parameters none of which is zero, one or like another."""
    return _perturbed


@functools.cache
def _shapes(model: Any, shape: tuple[int, ...]) -> Any:
    images = jax.ShapeDtypeStruct(shape, jnp.float32)
    return jax.eval_shape(model.init, jax.random.key(0), images)['params']


def _perturbed(model: Any, images: jax.Array) -> Any:
    rng = np.random.default_rng(1)

    def values(path: Any, leaf: Any) -> np.ndarray:
        mean = 1.0 if path[-1].key == 'scale' else 0.0
        return (mean + 0.2 * rng.normal(size=leaf.shape)).astype(np.float32)

    return jax.tree_util.tree_map_with_path(values, _shapes(model, images.shape))
