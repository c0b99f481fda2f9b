"""Outputs of a detector with groups of queries, and a batch of objects for them."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

ROWS, OBJECTS, GROUPS, QUERIES, CLASSES, LAYERS = 4, 5, 3, 4, 3, 3


def outputs_of(groups: int = GROUPS, rows: int = ROWS) -> dict[str, jax.Array]:
    """Random outputs of the first stage and of all blocks."""
    rng = np.random.default_rng(0)

    def arrays(*shape: int) -> dict[str, np.ndarray]:
        centers, sides = rng.uniform(0.1, 0.9, (*shape, 2)), rng.uniform(0.1, 0.5, (*shape, 2))
        return {
            'logits': rng.normal(0, 2, (*shape, CLASSES)),
            'boxes': np.concatenate([centers, sides], -1),
        }

    final = arrays(rows, groups * QUERIES)
    aux = arrays(rows, LAYERS - 1, groups * QUERIES)
    first = arrays(rows, groups, QUERIES)
    for prefix, stage in {'aux_': aux, 'first_': first}.items():
        final |= {f'{prefix}{name}': x for name, x in stage.items()}
    return {name: jnp.asarray(x, jnp.float32) for name, x in final.items()}


def batch_of(counts: tuple[int, ...] = (2, 0, 4, 5)) -> dict[str, jax.Array]:
    """Images of 40 x 50 and of 30 x 20 pixels; the last has more objects than a group."""
    rng = np.random.default_rng(1)
    rows = len(counts)
    corners = np.sort(rng.uniform(0, 20, (rows, OBJECTS, 2, 2)), axis=2).reshape(rows, -1, 4)
    mask = np.ones((rows, 40, 50), bool)
    mask[1::2, 30:], mask[1::2, :, 20:] = False, False
    return {
        'image': jnp.zeros((rows, 40, 50, 3), jnp.uint8),
        'pixel_mask': jnp.asarray(mask),
        'boxes': jnp.asarray(corners, jnp.float32),
        'labels': jnp.asarray(rng.integers(CLASSES, size=(rows, OBJECTS)), jnp.int32),
        'object_mask': jnp.asarray(np.arange(OBJECTS) < np.array(counts)[:, None]),
    }
