"""A tiny JiT with parameters, images, times and noise that a reference implementation had too."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import traverse_util

from vit_jax.models.jit import Model

SIDE, ROWS, CLASSES = 8, 4, 5
MODEL = Model(
    num_classes=CLASSES,
    patch_size=2,
    width=16,
    depth=3,
    mlp_dim=42,
    num_heads=2,
    bottleneck=6,
    context_tokens=3,
    context_start=1,
)


@functools.cache
def batch() -> dict[str, jax.Array]:
    """Images in [-1, 1], classes of which -1 is none, times and noise."""
    rng = np.random.default_rng(1)
    images = (ROWS, SIDE, SIDE, 3)
    arrays = {
        'image': rng.uniform(-1, 1, images).astype(np.float32),
        'label': np.array([3, 0, -1, 4], np.int32),
        'time': np.array([0.1, 0.4, 0.7, 0.98], np.float32),
        'noise': rng.normal(size=images).astype(np.float32),
    }
    return {name: jnp.asarray(array) for name, array in arrays.items()}


@functools.cache
def params() -> Any:
    """Parameters of any size, drawn in the order of their paths."""
    shapes = jax.eval_shape(
        lambda: MODEL.init(jax.random.key(0), batch()['image'], batch()['time'], batch()['label'])
    )['params']
    rng, drawn = np.random.default_rng(0), {}
    for path, leaf in sorted(traverse_util.flatten_dict(shapes, sep='/').items()):
        drawn[path] = (0.2 * rng.normal(size=leaf.shape)).astype(np.float32)
        if path.endswith('scale'):
            drawn[path] += 1
    with jax.ensure_compile_time_eval():  # the first caller may be traced; tracers cannot be kept
        arrays = {k: jnp.asarray(v) for k, v in drawn.items()}
    return traverse_util.unflatten_dict(arrays, sep='/')
