"""Inception v3 as FID uses it: the network of December 2015, with its resizing and its pooling.

Szegedy et al., 2016, arXiv:1512.00567, table 1 and figures 5 to 7. The released graph differs from
the paper: average pooling leaves the border out, the last block takes the maximum instead of the
average, and the head has 1,008 outputs. Batch norms are folded into a scale and a bias without
gradient: this model measures, it is not trained.
"""

from __future__ import annotations

import functools
from typing import Any, ClassVar

import flax.linen as nn
import jax.numpy as jnp
import numpy as np
from jax import Array

from vit_jax.array_types import Float
from vit_jax.errors import UserError
from vit_jax.models import base
from vit_jax.models.base import check_fields
from vit_jax.nn.dense import class_head
from vit_jax.nn.norms import FrozenNorm

# Channels of the average pooling's branch in the three blocks 5, and of the 7 x 7 branches in the
# four blocks 6.
_POOLED = {'mixed_5b': 32, 'mixed_5c': 64, 'mixed_5d': 64}
_SEVENS = {'mixed_6b': 128, 'mixed_6c': 160, 'mixed_6d': 160, 'mixed_6e': 192}


class Model(base.Model):
    """Inception v3. Images of any size, which it resizes itself.

    Attributes:
      num_classes: Outputs of the head; None or 0 leaves the head out.
      image_size: Side in pixels that images are resized to.
      width_factor: Factor of the channels of all layers.
      dtype: Computation dtype.

    Raises:
      UserError: if a field has no such value.
    """

    num_classes: int | None = 1008
    image_size: int = 299
    width_factor: float = 1.0
    dtype: str = 'float32'

    effects: ClassVar = {'width_factor': 'outputs'}

    def __post_init__(self) -> None:
        check_fields(self, 'dtype')
        if self.image_size < 75:  # nothing would be left for the last block
            raise UserError(f'image_size={self.image_size}: must be at least 75 pixels')
        super().__post_init__()

    @nn.compact
    def __call__(
        self, images: Float[Array, 'B H W C'], train: bool = False
    ) -> dict[str, Float[Array, 'B *rest']]:
        """Class scores of images in [-1, 1].

        Returns:
          features: [B h w D], D = 2,048, the last block's.
          pre_logits: [B D], their mean, the features of FID.
          logits: [B num_classes] in float32; absent without a head.
        """
        del train
        conv = functools.partial(Conv, self.width_factor, dtype=jnp.dtype(self.dtype))
        x = resize(images, self.image_size)
        x = conv(32, (3, 3), 2, name='conv_1a')(x)
        x = conv(32, (3, 3), padding='VALID', name='conv_2a')(x)
        x = conv(64, (3, 3), name='conv_2b')(x)
        x = conv(80, name='conv_3b')(_halve(x))
        x = conv(192, (3, 3), padding='VALID', name='conv_4a')(x)
        x = _halve(x)
        for name, pooled in _POOLED.items():
            x = BlockA(conv, pooled, name=name)(x)
        x = BlockB(conv, name='mixed_6a')(x)
        for name, channels in _SEVENS.items():
            x = BlockC(conv, channels, name=name)(x)
        x = BlockD(conv, name='mixed_7a')(x)
        x = BlockE(conv, _average, name='mixed_7b')(x)
        x = BlockE(conv, _maximum, name='mixed_7c')(x)
        outputs = {'features': x, 'pre_logits': x.mean(axis=(1, 2))}
        if self.num_classes:
            outputs['logits'] = class_head(self.num_classes, name='head')(outputs['pre_logits'])
        return outputs

    def layer_order(self) -> tuple[str, ...]:
        """Patterns of the layers' parameters from the image on."""
        stem = ('conv_1a', 'conv_2a', 'conv_2b', 'conv_3b', 'conv_4a')
        blocks = (*_POOLED, 'mixed_6a', *_SEVENS, 'mixed_7a', 'mixed_7b', 'mixed_7c')
        return tuple(f'^{name}/' for name in (*stem, *blocks))


def resize(images: Float[Array, 'B H W C'], size: int) -> Float[Array, 'B size size C']:
    """Resize bilinearly as TensorFlow 1 does: output i samples the input at i * old / new.

    There are neither half-pixel centers nor antialiasing, which FID depends on.
    """
    rows, columns = (_resize_matrix(old, size) for old in images.shape[1:3])
    x = images.astype(jnp.float32)
    return jnp.einsum('yh,bhwc,xw->byxc', rows, x, columns, precision='highest')


def _resize_matrix(old: int, new: int) -> Float[np.ndarray, 'new old']:
    """Build the weights of the two nearest inputs for each output."""
    position = np.arange(new, dtype=np.float32) * np.float32(old / new)
    low = position.astype(np.int64)
    share = position - low
    matrix = np.zeros((new, old), np.float32)
    np.add.at(matrix, (np.arange(new), low), 1 - share)
    np.add.at(matrix, (np.arange(new), np.minimum(low + 1, old - 1)), share)
    return matrix


class Conv(nn.Module):
    """A convolution without bias, a folded batch norm and a ReLU."""

    width_factor: float
    features: int
    size: tuple[int, int] = (1, 1)
    stride: int = 1
    padding: str = 'SAME'
    dtype: Any = jnp.float32

    @nn.compact
    def __call__(self, x: Float[Array, 'B H W C']) -> Float[Array, 'B h w D']:
        features = max(round(self.features * self.width_factor), 1)
        padding = 'VALID' if self.stride > 1 else self.padding
        y = nn.Conv(
            *(features, self.size, self.stride, padding),
            use_bias=False,
            dtype=self.dtype,
            name='conv',
        )(x)
        scale, bias = FrozenNorm(features, name='norm')()
        return nn.relu(y * scale.astype(self.dtype) + bias.astype(self.dtype))


def _average(x: Array) -> Array:
    """Average each pixel's 3 x 3 neighbors inside of the image."""
    return nn.avg_pool(x, (3, 3), padding='SAME', count_include_pad=False)


def _maximum(x: Array) -> Array:
    """Take the maximum of each pixel's 3 x 3 neighbors."""
    return nn.max_pool(x, (3, 3), padding='SAME')


def _halve(x: Array) -> Array:
    """Take the maximum of 3 x 3 pixels at every second pixel, without padding."""
    return nn.max_pool(x, window_shape=(3, 3), strides=(2, 2))


def _join(*branches: Array) -> Array:
    return jnp.concatenate(branches, axis=-1)


class BlockA(nn.Module):
    """Figure 5: a 5 x 5 branch, and two 3 x 3 convolutions in a row."""

    conv: Any
    pooled: int

    @nn.compact
    def __call__(self, x: Float[Array, 'B H W C']) -> Float[Array, 'B H W D']:
        conv = self.conv
        five = conv(48, name='branch5x5_1')(x)
        double = conv(64, name='branch3x3dbl_1')(x)
        double = conv(96, (3, 3), name='branch3x3dbl_2')(double)
        return _join(
            conv(64, name='branch1x1')(x),
            conv(64, (5, 5), name='branch5x5_2')(five),
            conv(96, (3, 3), name='branch3x3dbl_3')(double),
            conv(self.pooled, name='branch_pool')(_average(x)),
        )


class BlockB(nn.Module):
    """From blocks 5 to blocks 6: half the resolution (figure 10)."""

    conv: Any

    @nn.compact
    def __call__(self, x: Float[Array, 'B H W C']) -> Float[Array, 'B h w D']:
        conv = self.conv
        double = conv(64, name='branch3x3dbl_1')(x)
        double = conv(96, (3, 3), name='branch3x3dbl_2')(double)
        return _join(
            conv(384, (3, 3), 2, name='branch3x3')(x),
            conv(96, (3, 3), 2, name='branch3x3dbl_3')(double),
            _halve(x),
        )


class BlockC(nn.Module):
    """Figure 6: 7 x 7 convolutions as 1 x 7 and 7 x 1, once and twice."""

    conv: Any
    channels: int

    @nn.compact
    def __call__(self, x: Float[Array, 'B H W C']) -> Float[Array, 'B H W D']:
        conv, channels = self.conv, self.channels
        seven = conv(channels, name='branch7x7_1')(x)
        seven = conv(channels, (1, 7), name='branch7x7_2')(seven)
        double = conv(channels, name='branch7x7dbl_1')(x)
        for i, size in ((2, (7, 1)), (3, (1, 7)), (4, (7, 1))):
            double = conv(channels, size, name=f'branch7x7dbl_{i}')(double)
        return _join(
            conv(192, name='branch1x1')(x),
            conv(192, (7, 1), name='branch7x7_3')(seven),
            conv(192, (1, 7), name='branch7x7dbl_5')(double),
            conv(192, name='branch_pool')(_average(x)),
        )


class BlockD(nn.Module):
    """From blocks 6 to blocks 7: half the resolution."""

    conv: Any

    @nn.compact
    def __call__(self, x: Float[Array, 'B H W C']) -> Float[Array, 'B h w D']:
        conv = self.conv
        three = conv(192, name='branch3x3_1')(x)
        seven = conv(192, name='branch7x7x3_1')(x)
        seven = conv(192, (1, 7), name='branch7x7x3_2')(seven)
        seven = conv(192, (7, 1), name='branch7x7x3_3')(seven)
        return _join(
            conv(320, (3, 3), 2, name='branch3x3_2')(three),
            conv(192, (3, 3), 2, name='branch7x7x3_4')(seven),
            _halve(x),
        )


class BlockE(nn.Module):
    """Figure 7: branches that end in a 1 x 3 and a 3 x 1 convolution side by side."""

    conv: Any
    pool: Any

    @nn.compact
    def __call__(self, x: Float[Array, 'B H W C']) -> Float[Array, 'B H W D']:
        conv = self.conv
        three = conv(384, name='branch3x3_1')(x)
        double = conv(448, name='branch3x3dbl_1')(x)
        double = conv(384, (3, 3), name='branch3x3dbl_2')(double)
        return _join(
            conv(320, name='branch1x1')(x),
            conv(384, (1, 3), name='branch3x3_2a')(three),
            conv(384, (3, 1), name='branch3x3_2b')(three),
            conv(384, (1, 3), name='branch3x3dbl_3a')(double),
            conv(384, (3, 1), name='branch3x3dbl_3b')(double),
            conv(192, name='branch_pool')(self.pool(x)),
        )
