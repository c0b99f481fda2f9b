"""A tiny pMF with parameters and a batch that the authors' implementation had too."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import traverse_util

from vit_jax.models.pmf import Model

SIDE, ROWS, CLASSES = 8, 4, 5
MODEL = Model(
    num_classes=CLASSES,
    patch_size=2,
    width=16,
    depth=3,
    head_depth=1,
    mlp_dim=42,
    num_heads=2,
    bottleneck=128,
)


@functools.cache
def batch() -> dict[str, jax.Array]:
    """Images in [-1, 1], classes, times, spans, guidance with its interval, and noise."""
    rng = np.random.default_rng(1)
    images = (ROWS, SIDE, SIDE, 3)
    arrays = {
        'image': rng.uniform(-1, 1, images).astype(np.float32),
        'label': np.array([3, 0, 2, 4], np.int32),
        'time': np.array([0.1, 0.5, 0.4, 0.7], np.float32),
        'span': np.array([0.7, 0.0, 0.5, 0.0], np.float32),
        'guidance': np.array([1.5, 3.0, 7.0, 1.0], np.float32),
        'interval': np.array([[0.2, 0.9], [0.0, 1.0], [0.3, 0.7], [0.0, 1.0]], np.float32),
        'noise': rng.normal(size=images).astype(np.float32),
    }
    return {name: jnp.asarray(array) for name, array in arrays.items()}


@functools.cache
def params() -> Any:
    """Random parameters, drawn in the order of their paths."""
    data = batch()
    shapes = jax.eval_shape(
        lambda: MODEL.init(jax.random.key(0), data['image'], data['time'], data['label'])
    )['params']
    rng, arrays = np.random.default_rng(0), {}
    for path, leaf in sorted(traverse_util.flatten_dict(shapes, sep='/').items()):
        arrays[path] = (0.2 * rng.normal(size=leaf.shape)).astype(np.float32)
        if path.endswith('scale'):
            arrays[path] += 1
    with jax.ensure_compile_time_eval():  # the first caller may be traced
        constants = {k: jnp.asarray(v) for k, v in arrays.items()}
    return traverse_util.unflatten_dict(constants, sep='/')
