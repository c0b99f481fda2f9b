"""Norms whose variance is the mean of squared distances from the mean.

By default Flax computes it as E[x^2] - E[x]^2 instead. In float32 that difference of large numbers
has lost the variance where the mean is some hundred times the standard deviation, as in single
channels or tokens of trained Transformers; PyTorch and TensorFlow do not. Models take their norms
from here.
"""

import functools
import math
from collections.abc import Callable, Mapping
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax import Array

from vit_jax.array_types import Float

Initializer = Callable[..., Array]
RMSNorm = nn.RMSNorm  # subtracts no mean


class LayerNorm(nn.Module):
    """(x - mean) / sqrt(variance + epsilon) * scale + bias over the last axis; statistics in
    float32.

    It has the fields of `flax.linen.LayerNorm`.
    """

    epsilon: float = 1e-6
    dtype: Any = None
    param_dtype: Any = jnp.float32
    use_bias: bool = True
    use_scale: bool = True
    bias_init: Initializer = nn.initializers.zeros
    scale_init: Initializer = nn.initializers.ones

    @nn.compact
    def __call__(self, x: Float[Array, '*B D']) -> Float[Array, '*B D']:
        width = x.shape[-1:]
        scale, bias = jnp.ones(width), jnp.zeros(width)
        if self.use_scale:
            scale = self.param('scale', self.scale_init, width, self.param_dtype)
        if self.use_bias:
            bias = self.param('bias', self.bias_init, width, self.param_dtype)
        dtype = self.dtype or jnp.result_type(x, scale, bias)
        return layer_norm(x, scale, bias, self.epsilon, dtype)


# Norms of tokens by the names that configs give them.
NORMS: Mapping[str, Callable[..., nn.Module]] = {'layer': LayerNorm, 'rms': RMSNorm}


# For the tangents of `jax.custom_jvp`: their transpose, the gradient, keeps only the arguments and
# computes all else again. The function puts a barrier before those that it keeps, without which XLA
# finds the same values in the forward pass. By default a checkpoint also has one before the
# gradient that comes in, which then cannot be fused with the matmul that it is the result of.
recompute = functools.partial(jax.checkpoint, prevent_cse=False)


@functools.partial(jax.custom_jvp, nondiff_argnums=(3, 4))
def layer_norm(
    x: Float[Array, '*B D'],
    scale: Float[Array, 'D'],
    bias: Float[Array, 'D'],
    epsilon: float,
    dtype: Any,
) -> Float[Array, '*B D']:
    """`LayerNorm` of given parameters, in `dtype`.

    The backward pass reads `x` and the mean and standard deviation of each token. Automatic
    differentiation computes them once more, and writes float32 arrays as large as `x`.
    """
    return _normalize(x, scale, bias, epsilon, dtype)[0]


def _normalize(
    x: Array, scale: Array, bias: Array, epsilon: float, dtype: Any
) -> tuple[Array, Array, Array]:
    """Normalize, and return also the mean and inverse standard deviation of each token."""
    wide = x.astype(jnp.float32)
    mean = wide.mean(-1, keepdims=True)
    centered = wide - mean
    inverse = jax.lax.rsqrt((centered * centered).mean(-1, keepdims=True) + epsilon)
    y = centered * (inverse * scale) + bias
    return y.astype(dtype), mean, inverse


@layer_norm.defjvp
def _layer_norm_jvp(
    epsilon: float,
    dtype: Any,
    primals: tuple[Array, Array, Array],
    tangents: tuple[Array, Array, Array],
) -> tuple[Array, Array]:
    y, *statistics = _normalize(*primals, epsilon, dtype)

    @recompute
    def push(saved: tuple[Array, ...], dx: Array, dscale: Array, dbias: Array) -> Array:
        x, scale, mean, inverse = jax.lax.optimization_barrier(saved)
        normed = (x.astype(jnp.float32) - mean) * inverse
        inner = dx.astype(jnp.float32) * inverse
        across = normed * (inner * normed).mean(-1, keepdims=True)
        dy = (inner - inner.mean(-1, keepdims=True) - across) * scale
        return (dy + normed * dscale + dbias).astype(dtype)

    return y, push((*primals[:2], *statistics), *tangents)


class GroupNorm(nn.GroupNorm):
    """`LayerNorm` over the positions and channels of each group of channels, of each example."""

    use_fast_variance: bool = False


class BatchNorm(nn.BatchNorm):
    """Normalizes each channel over the batch, or by running statistics."""

    use_fast_variance: bool = False


class FrozenNorm(nn.Module):
    """Scale and bias [C] without a gradient: a batch norm whose statistics are folded into both.

    scale = gamma / sqrt(var + eps), bias = beta - mean * scale. `resnet.normed_conv` applies them.
    """

    features: int

    @nn.compact
    def __call__(self) -> tuple[Float[Array, ' C'], Float[Array, ' C']]:
        scale = self.param('scale', nn.initializers.ones, (self.features,))
        bias = self.param('bias', nn.initializers.zeros, (self.features,))
        return jax.lax.stop_gradient(scale), jax.lax.stop_gradient(bias)


def group_norm(channels: int, most: int, **kwargs: Any) -> GroupNorm:
    """Make a group norm of `most` groups, or fewer if the channels are not a multiple of them."""
    return GroupNorm(math.gcd(most, channels), epsilon=1e-5, **kwargs)


def unit(x: Float[Array, '*B'], axis: int = -1) -> Float[Array, '*B']:
    """Divide vectors by their length, in float32; zeros stay zeros.

    The length is at least 1e-12, as in `torch.nn.functional.normalize`, inside of the root: the
    derivative of the root at 0 is infinite.
    """
    x = x.astype(jnp.float32)
    return x * jax.lax.rsqrt(jnp.maximum(jnp.sum(x * x, axis=axis, keepdims=True), 1e-24))
