"""Features standardized by fixed statistics."""

from __future__ import annotations

import flax.linen as nn
import jax.numpy as jnp
from jax import Array

from vit_jax.array_types import Float


class Standardize(nn.Module):
    """y = matrix (x - mean), with `mean` [D] and `matrix` [D D] of `vit_jax.ops.phi_s`.

    Attributes:
      width: D, number of channels.
    """

    width: int

    def setup(self) -> None:
        self.mean = self.param('mean', nn.initializers.zeros, (self.width,))
        self.matrix = self.param('matrix', lambda key: jnp.eye(self.width))

    def __call__(self, x: Float[Array, '*B D']) -> Float[Array, '*B D']:
        return jnp.matmul(x.astype(jnp.float32) - self.mean, self.matrix.T, precision='highest')

    def invert(self, y: Float[Array, '*B D']) -> Float[Array, '*B D']:
        """Return the features that were standardized."""
        # The matrix is a rotation divided by phi: its rows have the length 1 / phi.
        variance = self.width / jnp.square(self.matrix).sum()
        return jnp.matmul(y, self.matrix, precision='highest') * variance + self.mean
