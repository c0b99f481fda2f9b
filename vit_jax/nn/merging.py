"""Swin's layers between stages, which merge 2 x 2 neighboring patches to one.

Liu et al., 2021, arXiv:2103.14030, section 3.1. Feature maps are [B H W D].
"""

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax import Array

from vit_jax.array_types import Float
from vit_jax.nn.windows import INIT, pad_to_multiple


class PatchMerging(nn.Module):
    """Halve the map, [H W D] to [H/2 W/2 2D], by a norm and a linear layer on 2 x 2 neighbors.

    The neighbors are joined in the order upper left, lower left, upper right, lower right. An odd
    number of rows or columns is padded with zeros.
    """

    norm_eps: float = 1e-5
    dtype: Any = jnp.float32

    @nn.compact
    def __call__(self, x: Float[Array, 'B H W D']) -> Float[Array, 'B h w _']:
        x = pad_to_multiple(x, 2)
        x, scale, bias = NeighborNorm(self.norm_eps, self.dtype, name='norm')(x)
        return Reduction(self.dtype, name='reduction')(x, scale, bias)


class NeighborNorm(nn.Module):
    """Layer norm of the 4D values of 2 x 2 neighbors, in place.

    On TPUs, neighbors in separate axes would take 2.7 times the memory, and here in float32.
    """

    epsilon: float
    dtype: Any

    @nn.compact
    def __call__(
        self, x: Float[Array, 'B H W D']
    ) -> tuple[Float[Array, 'B H W D'], Float[Array, ' C'], Float[Array, ' C']]:
        """Normalize the map without scale and bias; return it with these, [4D]."""
        scale = self.param('scale', nn.initializers.ones, (4 * x.shape[-1],))
        bias = self.param('bias', nn.initializers.zeros, (4 * x.shape[-1],))
        x = x.astype(jnp.float32)
        centered = x - _over_neighbors(x.mean(-1))[..., None]
        variance = _over_neighbors((centered * centered).mean(-1))[..., None]
        return (centered * jax.lax.rsqrt(variance + self.epsilon)).astype(self.dtype), scale, bias


def _over_neighbors(x: Float[Array, 'B H W']) -> Float[Array, 'B H W']:
    """Average each token's 2 x 2 neighbors."""
    batch, height, width = x.shape
    mean = x.reshape(batch, height // 2, 2, width // 2, 2).mean((2, 4))
    return mean.repeat(2, 1).repeat(2, 2)


class Reduction(nn.Module):
    """Merge 2 x 2 neighbors of a map to one token by a matrix [4D 2D], without bias."""

    dtype: Any

    @nn.compact
    def __call__(
        self,
        x: Float[Array, 'B H W D'],
        scale: Float[Array, ' C'] | None = None,
        bias: Float[Array, ' C'] | None = None,
    ) -> Float[Array, 'B h w _']:
        """Merge neighbors, [4D], or their products with `scale` plus `bias`."""
        width = x.shape[-1]
        kernel = self.param('kernel', INIT, (4 * width, 2 * width))
        scaled = kernel if scale is None else scale[:, None] * kernel
        y = jax.lax.platform_dependent(
            *(x.astype(self.dtype), scaled.astype(self.dtype)),
            tpu=_convolve,
            default=lambda x, kernel: _merge_neighbors(x) @ kernel,
        )
        return y if bias is None else y + (bias[:, None] * kernel).sum(0).astype(self.dtype)


def _merge_neighbors(x: Float[Array, 'B H W D']) -> Float[Array, 'B h w _']:
    """Join 2 x 2 neighbors of the map to one token of width 4D."""
    batch, height, width, features = x.shape
    x = x.reshape(batch, height // 2, 2, width // 2, 2, features)
    return x.transpose(0, 1, 3, 4, 2, 5).reshape(batch, height // 2, width // 2, 4 * features)


def _convolve(x: Float[Array, 'B H W D'], kernel: Float[Array, '_ E']) -> Float[Array, 'B h w E']:
    """Multiply the 2 x 2 neighbors by a matrix [4D E]; CPUs take longer for its gradient."""
    by_column = kernel.reshape(2, 2, x.shape[-1], -1)
    return jax.lax.conv_general_dilated(
        *(x, by_column.swapaxes(0, 1), (2, 2), 'VALID'),
        dimension_numbers=('NHWC', 'HWIO', 'NHWC'),
    )
