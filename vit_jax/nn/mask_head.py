"""The mask head of a detector: attention maps of the objects, refined to masks.

Carion et al., 2020, arXiv:2005.12872, section 4.4 and figure 8.
"""

import functools
import math
from collections.abc import Sequence
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax import Array

from vit_jax.array_types import Float, Shaped
from vit_jax.nn.attention import masked_softmax
from vit_jax.nn.encoder_decoder import Memory
from vit_jax.nn.multi_head import Heads
from vit_jax.nn.norms import group_norm

# Kaiming uniform with gain 1, the initialization of the authors' head.
KERNEL = nn.initializers.lecun_uniform()


class ObjectMaps(nn.Module):
    """Attention maps of each object over the image, without values. Parameter `qk`.

    The softmax is taken over all heads and cells together.
    """

    num_heads: int
    dtype: Any = jnp.float32

    @nn.compact
    def __call__(self, queries: Float[Array, 'B Q D'], memory: Memory) -> Float[Array, 'B Q N H']:
        """The weight of each cell for each query and head, in float32."""
        query, key = Heads(self.num_heads, self.dtype, name='qk')(queries, memory.tokens)
        products = jnp.einsum('bhqk,bhnk->bqnh', query, key, preferred_element_type=jnp.float32)
        scores = products * math.sqrt(self.num_heads / queries.shape[-1])
        mask = memory.mask.swapaxes(-1, -2)  # [B 1 N 1], the same for all queries and heads
        flat, seen = (
            x.reshape(*x.shape[:2], -1) for x in (scores, jnp.broadcast_to(mask, scores.shape))
        )
        return masked_softmax(flat, seen).reshape(scores.shape)


class MaskHead(nn.Module):
    """Convolutions that enlarge the maps of objects to those of finer stages of a ResNet.

    Two 3 x 3 convolutions with group norms, `conv_0` and `conv_1`, then one for each finer stage,
    three in the paper: before it the maps are resized to that stage, and its features are added by
    `adapter_0`, `adapter_1`, ... Then `out`. The features shared by all objects of an image are
    computed once.

    Attributes:
      width: of the features; the channels fall from there to a sixteenth of it.
      dtype: computation dtype; the masks are float32.
    """

    width: int
    dtype: Any = jnp.float32

    @nn.compact
    def __call__(
        self,
        features: Float[Array, 'B h w D'],
        maps: Float[Array, 'B Q h w N'],
        stages: Sequence[Float[Array, 'B _ _ _']],
    ) -> Float[Array, 'B Q H W']:
        """Logits of each object's pixels.

        Args:
          features: of the image, in the grid of the maps.
          maps: N maps of each object.
          stages: feature maps of the image from coarse to fine; the last has the size of the masks.
        """
        queries = maps.shape[1]
        make = functools.partial(nn.Conv, dtype=self.dtype, kernel_init=KERNEL)
        norm = functools.partial(group_norm, most=8, dtype=self.dtype)
        channels = features.shape[-1] + maps.shape[-1]
        x = ObjectConv(channels, self.dtype, name='conv_0')(features, maps)
        x = nn.relu(norm(channels, name='norm_0')(x))
        for i in range(len(stages) + 1):
            if i > 0:
                finer = make(x.shape[-1], (1, 1), name=f'adapter_{i - 1}')(stages[i - 1])
                x = resize_nearest(x, finer.shape[1:3]) + jnp.repeat(finer, queries, axis=0)
            channels = self.width // 2 ** (i + 1)
            x = make(channels, (3, 3), name=f'conv_{i + 1}')(x)
            x = nn.relu(norm(channels, name=f'norm_{i + 1}')(x))
        x = make(1, (3, 3), name='out')(x).astype(jnp.float32)
        return x.reshape(-1, queries, *x.shape[1:3])


class ObjectConv(nn.Module):
    """A convolution of 3 x 3 pixels of an image's features and an object's maps, concatenated.

    Being linear, it convolves the image's features once for all objects.
    """

    channels: int
    dtype: Any = jnp.float32

    @nn.compact
    def __call__(
        self, features: Float[Array, 'B h w D'], maps: Float[Array, 'B Q h w N']
    ) -> Float[Array, 'M h w C']:
        """The objects of all images one after the other, M = B Q."""
        width = features.shape[-1]
        kernel = self.param('kernel', KERNEL, (3, 3, width + maps.shape[-1], self.channels))
        bias = self.param('bias', nn.initializers.zeros, (self.channels,))

        def conv(x: Array, kernel: Array) -> Array:
            layout = ('NHWC', 'HWIO', 'NHWC')
            x, kernel = x.astype(self.dtype), kernel.astype(self.dtype)
            return jax.lax.conv_general_dilated(x, kernel, (1, 1), 'SAME', dimension_numbers=layout)

        common = conv(features, kernel[:, :, :width]) + bias.astype(self.dtype)
        own = conv(maps.reshape(-1, *maps.shape[2:]), kernel[:, :, width:])
        return own + jnp.repeat(common, maps.shape[1], axis=0)


def resize_nearest(x: Shaped[Array, 'B H W *C'], size: Sequence[int]) -> Shaped[Array, 'B h w *C']:
    """Resize so that each new pixel has the value of the old one below its upper left corner.

    It is PyTorch's `nearest`; that of `jax.image.resize` takes the pixel below its center.
    """
    rows, columns = (
        jnp.arange(new) * old // new for old, new in zip(x.shape[1:3], size, strict=True)
    )
    return x[:, rows[:, None], columns]
