"""Convolutions with standardized kernels: Qiao et al., 2019, arXiv:1903.10520."""

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax import Array

from vit_jax.array_types import Float


def standardize(
    kernel: Float[Array, 'h w C D'], var_eps: float, std_eps: float
) -> Float[Array, 'h w C D']:
    """(K - mean) / (sqrt(var + var_eps) + std_eps) of each output's inputs, in float32.

    The paper's equation 6 has no epsilon; implementations differ in where they add it.
    """
    kernel = kernel.astype(jnp.float32)
    mean = kernel.mean(axis=(0, 1, 2))
    var = kernel.var(axis=(0, 1, 2))
    return (kernel - mean) / (jnp.sqrt(var + var_eps) + std_eps)


class StdConv(nn.Module):
    """A square convolution without bias, by a standardized kernel [k k C D].

    Attributes:
      features: D, channels of the output.
      kernel_size: k.
      stride: of rows and of columns.
      padding: 'same', as in TensorFlow: an odd row or column of zeros goes to the end.
        'symmetric', as in PyTorch: k // 2 zeros on every side. They differ for an even image and
        stride 2.
      var_eps, std_eps: see `standardize`.
      dtype: of the convolution; the kernel is stored and standardized in float32.
    """

    features: int
    kernel_size: int = 1
    stride: int = 1
    padding: str = 'same'
    var_eps: float = 1e-10
    std_eps: float = 0.0
    dtype: Any = jnp.float32

    @nn.compact
    def __call__(self, x: Float[Array, 'B H W C']) -> Float[Array, 'B h w D']:
        k = self.kernel_size
        init = nn.initializers.lecun_normal()
        kernel = self.param('kernel', init, (k, k, x.shape[-1], self.features))
        kernel = standardize(kernel, self.var_eps, self.std_eps)
        return jax.lax.conv_general_dilated(
            x.astype(self.dtype),
            kernel.astype(self.dtype),
            window_strides=(self.stride, self.stride),
            padding='SAME' if self.padding == 'same' else [(k // 2, k // 2)] * 2,
            dimension_numbers=('NHWC', 'HWIO', 'NHWC'),
        )
