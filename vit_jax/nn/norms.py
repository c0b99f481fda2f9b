"""Norms whose variance is the mean of squared distances from the mean.

By default Flax computes it as E[x^2] - E[x]^2 instead. In float32 that difference of large numbers
has lost the variance where the mean is some hundred times the standard deviation, as in single
channels or tokens of trained Transformers; PyTorch and TensorFlow do not. Models take their norms
from here.
"""

import math
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax import Array

from vit_jax.array_types import Float

RMSNorm = nn.RMSNorm  # subtracts no mean


class LayerNorm(nn.LayerNorm):
    """(x - mean) / sqrt(variance + epsilon) * scale + bias over the last axis; statistics in
    float32.
    """

    use_fast_variance: bool = False


class GroupNorm(nn.GroupNorm):
    """`LayerNorm` over the positions and channels of each group of channels, of each example."""

    use_fast_variance: bool = False


class BatchNorm(nn.BatchNorm):
    """Normalizes each channel over the batch, or by running statistics."""

    use_fast_variance: bool = False


class FrozenNorm(nn.Module):
    """x * scale + bias, without a gradient: a batch norm whose statistics are folded into both.

    scale = gamma / sqrt(var + eps), bias = beta - mean * scale.
    """

    dtype: Any = jnp.float32

    @nn.compact
    def __call__(self, x: Float[Array, '*B C']) -> Float[Array, '*B C']:
        scale = self.param('scale', nn.initializers.ones, x.shape[-1:])
        bias = self.param('bias', nn.initializers.zeros, x.shape[-1:])
        scale, bias = (jax.lax.stop_gradient(p).astype(self.dtype) for p in (scale, bias))
        return x * scale + bias


def group_norm(channels: int, most: int, **kwargs: Any) -> GroupNorm:
    """Group norm with `most` groups, or fewer if the channels are not a multiple of them."""
    return GroupNorm(math.gcd(most, channels), epsilon=1e-5, **kwargs)


def unit(x: Float[Array, '*B'], axis: int = -1) -> Float[Array, '*B']:
    """Divide vectors by their length, in float32; zeros stay zeros.

    The length is at least 1e-12, as in `torch.nn.functional.normalize`, inside of the root: the
    derivative of the root at 0 is infinite.
    """
    x = x.astype(jnp.float32)
    return x * jax.lax.rsqrt(jnp.maximum(jnp.sum(x * x, axis=axis, keepdims=True), 1e-24))
