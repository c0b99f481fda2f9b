"""Patches of images: cutting, embedding, and leaving some out in training."""

import math
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax import Array

from vit_jax.array_types import Bool, Float
from vit_jax.errors import UserError
from vit_jax.nn.dense import affine
from vit_jax.nn.stochastic import check_rate, example_keys


def patch_grid(height: int, width: int, patch_size: int) -> tuple[int, int]:
    """Rows and columns of patches in an image.

    Raises:
      UserError: if the image cannot be cut into whole patches.
    """
    for side, name in ((height, 'height'), (width, 'width')):
        if side < patch_size or side % patch_size:
            raise UserError(
                f'images are {width} x {height}: their {name} is not a positive multiple of '
                f'patch_size {patch_size}; resize them or choose another patch size'
            )
    return height // patch_size, width // patch_size


def patchify(images: Float[Array, 'B H W C'], patch_size: int) -> Float[Array, 'B N P']:
    """Patches as vectors of P = patch_size^2 C values, row by row; channels run fastest."""
    batch, height, width, channels = images.shape
    rows, columns = patch_grid(height, width, patch_size)
    x = images.reshape(batch, rows, patch_size, columns, patch_size, channels)
    return x.swapaxes(2, 3).reshape(batch, rows * columns, patch_size**2 * channels)


def unpatchify(
    patches: Float[Array, 'B N P'], grid: tuple[int, int], patch_size: int
) -> Float[Array, 'B H W C']:
    """Join patches to images, the inverse of `patchify`; `grid` is rows and columns."""
    rows, columns = grid
    x = patches.reshape(len(patches), rows, columns, patch_size, patch_size, -1)
    return x.swapaxes(2, 3).reshape(len(patches), rows * patch_size, columns * patch_size, -1)


class PatchEmbed(nn.Module):
    """Linear projection E of flattened patches, equation 1 of arXiv:2010.11929.

    It equals a convolution with stride `patch_size`, but as one matmul. Kernel
    [patch_size, patch_size, C, D], bias [D] if any.
    """

    patch_size: int
    width: int
    dtype: Any = jnp.float32
    use_bias: bool = True

    @nn.compact
    def __call__(
        self, images: Float[Array, 'B H W C'] | Float[Array, 'B N P']
    ) -> Float[Array, 'B N D']:
        """Embed images, or patches made by `patchify`.

        Raises:
          UserError: if images cannot be cut into whole patches, or patches have a different size.
        """
        x, pixels, cut = images.astype(self.dtype), self.patch_size**2, images.ndim == 3
        if cut and images.shape[-1] % pixels:
            raise UserError(
                f'patches of {images.shape[-1]} values are not of patch_size {self.patch_size}, '
                f'with a multiple of {pixels}: give the plan the patch_size of the model'
            )
        channels = images.shape[-1] // pixels if cut else images.shape[-1]
        kernel = self._kernel(channels)
        bias = self.param('bias', nn.initializers.zeros, (self.width,)) if self.use_bias else None
        x = x if cut else patchify(x, self.patch_size)
        return affine(x, kernel.reshape(-1, self.width), bias, self.dtype)

    def _kernel(self, channels: int) -> Float[Array, 'p p C D']:
        shape = (self.patch_size, self.patch_size, channels, self.width)
        return self.param('kernel', nn.initializers.lecun_normal(), shape)


class PatchDropout(nn.Module):
    """Leave out patches at random, so that sequences become shorter and steps cheaper.

    NaViT, arXiv:2307.06304, section 3.2. The random stream is named `dropout`; an example drops
    the same patches on any device.

    Attributes:
      rate: Share of each image's patches that is left out.

    Raises:
      UserError: if `rate` is outside [0, 1).
    """

    rate: float

    @nn.compact
    def __call__(
        self, x: Float[Array, 'B N D'], real: Bool[Array, 'B N']
    ) -> tuple[Float[Array, 'B K D'], Bool[Array, 'B K']]:
        """Drop tokens; return the others in random order, and which of them are real.

        Args:
          x: Tokens with their positions.
          real: False for padding, which is left out first.

        Returns:
          K = ceil((1 - rate) N) tokens, of which ceil((1 - rate) n) belong to an image of n
          patches.
        """
        check_rate('patch_dropout', self.rate)
        tokens = x.shape[1]
        keys = example_keys(self.make_rng('dropout'), x.shape[0])
        noise = jax.vmap(lambda key: jax.random.uniform(key, (tokens,)))(keys)
        order = jnp.argsort(jnp.where(real, noise, 2.0), axis=1)
        count = math.ceil((1 - self.rate) * tokens)
        real_count = jnp.ceil((1 - self.rate) * real.sum(axis=1, keepdims=True))
        x = jnp.take_along_axis(x, order[:, :count, None], axis=1)
        return x, jnp.arange(count) < real_count
