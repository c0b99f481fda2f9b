"""Residual networks: the ResNet of detectors, and parts that others share.

He et al., 2015, arXiv:1512.03385, in version 1.5: bottlenecks normalized after each convolution,
with the stride in the 3 x 3 one; outputs of all stages; symmetric padding, as in PyTorch.
Convolutions with standardized kernels follow Qiao et al., 2019, arXiv:1903.10520.
"""

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax import Array

from vit_jax.array_types import Float
from vit_jax.errors import UserError
from vit_jax.nn.norms import FrozenNorm, group_norm

# Kaiming normal, by the number of outputs.
KERNEL = nn.initializers.variance_scaling(2.0, 'fan_out', 'normal')


class ResNet(nn.Module):
    """A root of stride 2, pooled to 4, and stages of 4, 8, 16, ... times `width` channels, of
    stride 2 except for the first.

    Attributes:
      layers: Blocks of each stage.
      width: Channels of the root; 64 in the paper.
      norm: 'frozen' (see `FrozenNorm`), for trained weights, or 'group', for training from scratch.
      dilate: Whether the last stage keeps its resolution and dilates its convolutions instead (DC5
        of Carion et al., 2020, arXiv:2005.12872, section 4).
      frozen_stages: Number of parts without gradient: 1 for the root, 2 for the root and the first
        stage.
      dtype: Computation dtype.

    Raises:
      UserError: if a stage has no block.
    """

    layers: tuple[int, ...] = (3, 4, 6, 3)
    width: int = 64
    norm: str = 'frozen'
    dilate: bool = False
    frozen_stages: int = 0
    dtype: Any = jnp.float32

    def __post_init__(self) -> None:
        check_layers(self.layers)
        super().__post_init__()

    @nn.compact
    def __call__(self, images: Float[Array, 'B H W C']) -> list[Float[Array, 'B _ _ _']]:
        """Return the feature maps of the root, before pooling, and of all stages in order."""
        root = self._frozen(Root(self.width, self.norm, self.dtype, name='root')(images), 1)
        x, maps = max_pool(root), [root]
        for i, depth in enumerate(self.layers):
            stride = 1 if i == 0 else 2
            dilate = self.dilate and i == len(self.layers) - 1
            block = functools.partial(
                Bottleneck, self.width * 2**i, norm=self.norm, dtype=self.dtype
            )
            x = Stage(block, depth, stride, dilate, name=f'stage_{i}')(x)
            x = self._frozen(x, i + 2)
            maps.append(x)
        return maps

    def _frozen(self, x: Array, stage: int) -> Array:
        return jax.lax.stop_gradient(x) if stage <= self.frozen_stages else x


class Stage(nn.Module):
    """`depth` residual blocks, `block_0`, `block_1`, ...

    Attributes:
      block: Factory of blocks, called with `stride` and `name`, and with `dilation` if `dilate`.
      depth: Number of blocks.
      stride: Stride of the first block; the others have stride 1.
      dilate: Whether the convolutions of the other blocks are dilated by the stride, instead of
        striding in the first.
    """

    block: Callable[..., nn.Module]
    depth: int
    stride: int
    dilate: bool = False

    @nn.compact
    def __call__(self, x: Float[Array, 'B H W C']) -> Float[Array, 'B h w D']:
        first = {'stride': 1, 'dilation': 1} if self.dilate else {'stride': self.stride}
        later = {'stride': 1, 'dilation': self.stride} if self.dilate else {'stride': 1}
        for j in range(self.depth):
            x = self.block(**later if j else first, name=f'block_{j}')(x)
        return x


class Root(nn.Module):
    """Convolution of stride 2, norm and ReLU."""

    width: int
    norm: str = 'frozen'
    dtype: Any = jnp.float32

    @nn.compact
    def __call__(self, images: Float[Array, 'B H W C']) -> Float[Array, 'B h w D']:
        conv = functools.partial(normed_conv, norm=self.norm, dtype=self.dtype)
        return RELUS[self.norm](conv(images, self.width, 7, stride=2, names=('conv', 'norm')))


class Bottleneck(nn.Module):
    """Convolutions of 1 x 1, 3 x 3 and 1 x 1 pixels, the last to 4 x `width` channels.

        z'' = N(proj(z)) where the shape changes, else z
        z   = ReLU(z'' + N(conv3(ReLU(N(conv2(ReLU(N(conv1(z)))))))))

    The scale of the last group norm starts at zero, so that the branch does.
    """

    width: int
    stride: int = 1
    dilation: int = 1
    norm: str = 'frozen'
    dtype: Any = jnp.float32

    @nn.compact
    def __call__(self, x: Float[Array, 'B H W C']) -> Float[Array, 'B h w D']:
        conv = functools.partial(normed_conv, norm=self.norm, dtype=self.dtype)
        relu = RELUS[self.norm]
        y = relu(conv(x, self.width, names=('conv1', 'norm1')))
        y = relu(conv(y, self.width, 3, self.stride, self.dilation, names=('conv2', 'norm2')))
        zeros = nn.initializers.zeros
        y = conv(y, 4 * self.width, names=('conv3', 'norm3'), scale_init=zeros)
        if x.shape[-1] != 4 * self.width or self.stride > 1:
            x = conv(x, 4 * self.width, stride=self.stride, names=('proj', 'proj_norm'))
        return relu(x + y)


def normed_conv(
    x: Float[Array, 'B H W C'],
    features: int,
    size: int = 1,
    stride: int = 1,
    dilation: int = 1,
    *,
    names: tuple[str, str],
    norm: str,
    dtype: Any,
    scale_init: Callable[..., Any] = nn.initializers.ones,
) -> Float[Array, 'B h w D']:
    """Apply a convolution and a norm of NORMS, which become submodules of the caller by `names`.

    A frozen norm scales the kernel instead of the map, which saves passes over maps: 6 of the 50
    ms that memory needs for a step of DETR on TPU v5e. It has the scale of a checkpoint, or 1;
    `scale_init` is for group norms.
    """
    conv = Conv(features, size, stride, dilation, dtype, name=names[0])
    if norm == 'frozen':
        scale, bias = FrozenNorm(features, name=names[1])()
        return conv(x, scale) + bias.astype(dtype)
    of_group = group_norm(features, most=32, dtype=dtype, scale_init=scale_init, name=names[1])
    return of_group(conv(x))


@jax.custom_jvp
def relu_by_result(x: Float[Array, '*B']) -> Float[Array, '*B']:
    """max(x, 0), differentiated by its result, which the next layer's gradient keeps anyway.

    For `nn.relu`, XLA keeps a mask of x as well.
    """
    return jnp.maximum(x, 0)


# Without the barrier XLA simplifies max(x, 0) > 0 to x > 0.
relu_by_result.defjvps(lambda dx, y, _: jnp.where(jax.lax.optimization_barrier(y) > 0, dx, 0))

# By norm. The results of group norms are not kept, but computed again.
RELUS: dict[str, Callable[[Array], Array]] = {'frozen': relu_by_result, 'group': nn.relu}
NORMS = tuple(RELUS)


class Conv(nn.Module):
    """A square convolution without bias; its output is `stride` times smaller, rounded up."""

    features: int
    size: int = 1
    stride: int = 1
    dilation: int = 1
    dtype: Any = jnp.float32

    @nn.compact
    def __call__(
        self, x: Float[Array, 'B H W C'], scale: Float[Array, ' D'] | None = None
    ) -> Float[Array, 'B h w D']:
        """Convolve `x`; `scale` multiplies the channels of the output, or the kernel if smaller."""
        size, stride = self.size, self.stride
        kernel = self.param('kernel', KERNEL, (size, size, x.shape[-1], self.features))
        outputs = math.prod(x.shape[:-1]) // stride**2 * self.features
        if scale is not None and kernel.size < outputs:
            kernel, scale = kernel * scale, None
        y = self._convolve(x.astype(self.dtype), kernel.astype(self.dtype))
        return y if scale is None else y * scale.astype(self.dtype)

    def _convolve(self, x: Array, kernel: Array) -> Array:
        if self.size == 1:  # as a matmul, whose derivative is faster on CPUs
            return x[:, :: self.stride, :: self.stride] @ kernel[0, 0]
        padding = self.size // 2 * self.dilation
        return jax.lax.conv_general_dilated(
            *(x, kernel, (self.stride,) * 2, [(padding, padding)] * 2),
            rhs_dilation=(self.dilation,) * 2,
            dimension_numbers=('NHWC', 'HWIO', 'NHWC'),
        )


def max_pool(x: Float[Array, 'B H W C']) -> Float[Array, 'B h w C']:
    """Max pooling of 3 x 3 with stride 2; padding is ignored.

    On CPUs it is computed from slices, since XLA takes ten times as long for the derivative of
    `nn.max_pool`; results and gradients are the same.
    """
    return jax.lax.platform_dependent(x, cpu=_max_of_slices, default=_max_pool)


def _max_pool(x: Array) -> Array:
    return nn.max_pool(x, (3, 3), strides=(2, 2), padding=[(1, 1), (1, 1)])


def _max_of_slices(x: Array) -> Array:
    """Pool within rows, then within columns; of equal values the first one gets the gradient."""
    for axis in (2, 1):
        size = x.shape[axis]
        widths = [(1, 1) if i == axis else (0, 0) for i in range(4)]
        padded = jnp.pad(x, widths, constant_values=-jnp.inf)
        parts = (jax.lax.slice_in_dim(padded, i, i + size, 2, axis) for i in range(3))
        x = functools.reduce(lambda a, b: jnp.where(b > a, b, a), parts)
    return x


def block_order(parent: str, layers: Sequence[int]) -> tuple[str, ...]:
    """List a pattern of each block's parameters below `parent`, which ends in '/' or is empty."""
    return tuple(
        f'^{parent}stage_{i}/block_{j}/' for i, depth in enumerate(layers) for j in range(depth)
    )


def check_layers(layers: Sequence[int]) -> None:
    """Raise UserError unless every stage has a block."""
    if any(depth < 1 for depth in layers):
        raise UserError(f'layers {tuple(layers)}: every stage needs at least one block')


def standardize(
    kernel: Float[Array, 'h w C D'], var_eps: float, std_eps: float
) -> Float[Array, 'h w C D']:
    """(K - mean) / (sqrt(var + var_eps) + std_eps) of each output's inputs, in float32.

    Equation 6 of Qiao et al. has no epsilon; implementations differ in where they add it.
    """
    kernel = kernel.astype(jnp.float32)
    mean = kernel.mean(axis=(0, 1, 2))
    var = kernel.var(axis=(0, 1, 2))
    return (kernel - mean) / (jnp.sqrt(var + var_eps) + std_eps)


class StdConv(nn.Module):
    """A square convolution without bias, by a standardized kernel [k k C D].

    Attributes:
      features: D, channels of the output.
      kernel_size: K.
      stride: Stride of rows and columns.
      padding: 'same', as in TensorFlow: an odd row or column of zeros goes to the end.
        'symmetric', as in PyTorch: k // 2 zeros on every side. They differ for an even image and
        stride 2.
      var_eps, std_eps: See `standardize`.
      dtype: Dtype of the convolution; the kernel is stored and standardized in float32.
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
