"""Hybrid: a Vision Transformer on the feature map of a ResNet, instead of on raw patches.

Dosovitskiy et al., 2021, arXiv:2010.11929, section 3.1. The smaller ones are from Steiner et al.,
2021, arXiv:2106.10270.
"""

import functools
from typing import Any, ClassVar

import flax.linen as nn
import jax.numpy as jnp
from jax import Array

from vit_jax.array_types import Float
from vit_jax.errors import UserError, check_choice
from vit_jax.models import vit
from vit_jax.nn.norms import GroupNorm
from vit_jax.nn.patches import PatchEmbed
from vit_jax.nn.resnet import Stage, StdConv, block_order, check_layers

# name: blocks of each ResNet stage, ViT of width and depth, patch size on the feature map. The
# names are the papers'; R+Ti/16 has one token for 32 x 32 pixels, despite its name.
VARIANTS = {
    'R+Ti/16': ((), 'Ti', 8),
    'R26+S/32': ((2, 2, 2, 2), 'S', 1),
    'R26+B/32': ((2, 2, 2, 2), 'B', 1),
    'R50+B/16': ((3, 4, 9), 'B', 1),
    'R50+L/32': ((3, 4, 6, 3), 'L', 1),
}

# Added to the variance and the standard deviation of kernels, and to the variance of group norms.
# The authors' first is far below rounding error: it keeps the derivative of the standard deviation
# of a constant kernel finite.
EPSILONS = {'authors': (1e-20, 1e-5, 1e-6), 'timm': (1e-8, 0.0, 1e-5)}


def parts(epsilons: str, dtype: Any) -> tuple[Any, Any]:
    """Make factories of convolutions and norms with one of EPSILONS."""
    var_eps, std_eps, norm_eps = EPSILONS[epsilons]
    return (
        functools.partial(StdConv, var_eps=var_eps, std_eps=std_eps, dtype=dtype),
        functools.partial(GroupNorm, num_groups=32, epsilon=norm_eps, dtype=dtype),
    )


def variant(name: str) -> dict[str, Any]:
    """Look up keywords of `Model` for a name of VARIANTS, such as 'R50+B/16'.

    Raises:
      UserError: if there is no such variant.
    """
    check_choice('hybrid variant', name, VARIANTS)
    layers, shape, patch_size = VARIANTS[name]
    return {**vit.variant(f'{shape}/{patch_size}'), 'layers': layers}


class Model(vit.Model):
    """A ResNet without its head, whose feature map is cut into the patches of a ViT.

    Attributes:
      layers: Blocks of each ResNet stage; () for only the root.
      epsilons: Source of the ResNet's epsilons: 'authors' or 'timm'.
      patch_size: Side of a patch on the feature map, which is 4, 8, 16 or 32 times smaller than
        the image after 0 or 1, 2, 3 or 4 stages.
    For the others see `vit.Model`.

    Raises:
      UserError: for an invalid field, or images that do not fit the stride or `pos_embed`.
    """

    layers: tuple[int, ...] = (3, 4, 9)
    patch_size: int = 1
    epsilons: str = 'authors'

    effects: ClassVar = {'epsilons': 'noted'}

    def __post_init__(self) -> None:
        check_layers(self.layers)
        check_choice('epsilons', self.epsilons, EPSILONS)
        super().__post_init__()

    @property
    def stride(self) -> int:
        """Side in pixels of the square of one token."""
        return 4 * 2 ** max(len(self.layers) - 1, 0) * self.patch_size

    def layer_order(self) -> tuple[str, ...]:
        """List patterns of the layers' parameters in order: the ResNet's root and blocks, then the
        embeddings and blocks of the ViT.
        """
        return '^resnet/root/', *block_order('resnet/', self.layers), *super().layer_order()

    def _patches(self, images: Array, dtype: Any) -> Array:
        """Embed each patch of the feature map as a token, row by row, [B N D]."""
        height, width = images.shape[1:3]
        if 0 in (height, width) or height % self.stride or width % self.stride:
            raise UserError(
                f'images are {width} x {height}: this hybrid needs positive multiples of '
                f'{self.stride} pixels; resize them or choose other layers or patch_size'
            )
        x = ResNet(self.layers, dtype, self.epsilons, name='resnet')(images)
        return PatchEmbed(self.patch_size, self.width, dtype, name='patch_embed')(x)


class ResNet(nn.Module):
    """A root of stride 4, and stages of 256, 512, ... channels; all but the first have stride 2."""

    layers: tuple[int, ...]
    dtype: Any = jnp.float32
    epsilons: str = 'authors'

    @nn.compact
    def __call__(self, images: Float[Array, 'B H W C']) -> Float[Array, 'B h w D']:
        common = {'dtype': self.dtype, 'epsilons': self.epsilons}
        x = Root(64, **common, name='root')(images)
        for i, depth in enumerate(self.layers):
            block = functools.partial(Bottleneck, width=64 * 2**i, **common)
            x = Stage(block, depth, stride=1 if i == 0 else 2, name=f'stage_{i}')(x)
        return x


class Root(nn.Module):
    """Convolution, norm, ReLU and max pooling; the first and the last have stride 2."""

    width: int
    dtype: Any = jnp.float32
    epsilons: str = 'authors'

    @nn.compact
    def __call__(self, images: Float[Array, 'B H W C']) -> Float[Array, 'B h w D']:
        conv, norm = parts(self.epsilons, self.dtype)
        x = conv(self.width, 7, stride=2, name='conv')(images)
        x = nn.relu(norm(name='norm')(x))
        return nn.max_pool(x, window_shape=(3, 3), strides=(2, 2), padding='SAME')


class Bottleneck(nn.Module):
    """A bottleneck to 4 x `width` channels, normalized after each convolution, unlike BiT's.

        z'' = GN(proj(z)) where the shape changes, else z
        z   = ReLU(z'' + GN(conv3(ReLU(GN(conv2(ReLU(GN(conv1(z)))))))))

    He et al., 2015, arXiv:1512.03385, with the stride in the 3 x 3 convolution. The scale of the
    last norm starts at zero, so that the branch does.
    """

    width: int
    stride: int = 1
    dtype: Any = jnp.float32
    epsilons: str = 'authors'

    @nn.compact
    def __call__(self, x: Float[Array, 'B H W C']) -> Float[Array, 'B h w D']:
        conv, norm = parts(self.epsilons, self.dtype)
        y = nn.relu(norm(name='norm1')(conv(self.width, name='conv1')(x)))
        y = conv(self.width, 3, self.stride, name='conv2')(y)
        y = conv(4 * self.width, name='conv3')(nn.relu(norm(name='norm2')(y)))
        y = norm(scale_init=nn.initializers.zeros, name='norm3')(y)
        if self.stride != 1 or x.shape[-1] != 4 * self.width:
            x = conv(4 * self.width, stride=self.stride, name='proj')(x)
            x = norm(name='proj_norm')(x)
        return nn.relu(x + y)
