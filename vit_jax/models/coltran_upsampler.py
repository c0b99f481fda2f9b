"""ColTran's upsamplers: every byte of a color image at once, from a coarse version of it.

Kumar et al., 2021, arXiv:2102.04432, section 4.2. The color upsampler starts from 8 levels a
channel, the spatial upsampler from all 256 levels of an image with few pixels, enlarged.
"""

import functools
from collections.abc import Mapping
from typing import Any

import flax.linen as nn
import jax.numpy as jnp
from jax import Array

from vit_jax.array_types import Float, Int, UInt8
from vit_jax.errors import UserError, check_multiple
from vit_jax.models import base
from vit_jax.models._resizing import resize_axial
from vit_jax.models.base import Params, Resized, Size, check_fields
from vit_jax.nn.axial import AxialEncoder, AxialLayer, axial_maps
from vit_jax.nn.blocks import XAVIER
from vit_jax.nn.maps import AttentionMap

BYTES = 256


class Model(base.Model):
    """Axial attention over one channel of the coarse image and the gray image.

    Attributes:
      levels: Number of levels of a channel of the coarse image, a divisor of 256: 8 for the color
        upsampler, 256 for the spatial one.
      width: D, width of a position.
      num_heads: Attention heads; divides width.
      mlp_dim: Hidden width of the feed-forward layers.
      depth: Pairs of row and column attention.
      norm_eps: Value added to the variance in layer norms.
      dtype: Computation dtype. Parameters, layer norm statistics, softmax and logits stay float32.
      attention: Implementation: 'xla', 'pallas' or 'auto'; see the model `swin`.

    Raises:
      UserError: for an invalid field.
    """

    levels: int = 8
    width: int = 512
    num_heads: int = 4
    mlp_dim: int = 512
    depth: int = 4
    norm_eps: float = 1e-3
    dtype: str = 'float32'
    attention: str = 'auto'

    def __post_init__(self) -> None:
        check_fields(self, 'attention', 'dtype')
        if self.levels < 1 or BYTES % self.levels:
            raise UserError(f'levels must be a divisor of {BYTES}, not {self.levels}')
        check_multiple('width', self.width, 'num_heads', self.num_heads)
        super().__post_init__()

    @nn.compact
    def __call__(
        self,
        gray: UInt8[Array, 'B H W'],
        coarse: UInt8[Array, 'B H W C'],
        channels: Int[Array, 'B C'],
        train: bool = False,
    ) -> dict[str, Float[Array, 'B H W C V']]:
        """Score every byte of some channels, each predicted independently.

        Args:
          gray: Gray image.
          coarse: Channels of the coarse image, in bytes, which are quantized to `levels`.
          channels: Indices of the channels, 0 for red, 1 for green and 2 for blue.
          train: Has no effect without dropout.

        Returns:
          logits: [B H W C 256].
        """
        dtype = jnp.dtype(self.dtype)
        embed = functools.partial(nn.Embed, features=self.width, dtype=dtype)
        dense = functools.partial(nn.Dense, kernel_init=XAVIER)
        count = coarse.shape[-1]

        values = coarse.astype(jnp.int32) // (BYTES // self.levels)
        values = values + self.levels * channels[:, None, None]
        x = embed(3 * self.levels, name='embed_channel')(values)
        guide = embed(BYTES, name='embed_grey')(gray.astype(jnp.int32))
        guide = jnp.broadcast_to(guide[..., None, :], x.shape)
        x = dense(self.width, dtype=dtype, name='embed')(jnp.concatenate([x, guide], axis=-1))

        # Channels are separate examples.
        x = jnp.moveaxis(x, 3, 1)
        grids = x.reshape(-1, *x.shape[2:])
        layer = functools.partial(
            AxialLayer,
            self.num_heads,
            self.mlp_dim,
            norm_eps=self.norm_eps,
            dtype=dtype,
            attention_by=self.attention,
        )
        features = AxialEncoder(self.depth, layer, name='encoder')(grids)
        logits = dense(BYTES, name='head')(features)
        logits = logits.reshape(-1, count, *logits.shape[1:])
        return {'logits': jnp.moveaxis(logits, 1, 3)}

    def attention_maps(
        self,
        intermediates: Mapping[str, Any],
        gray: UInt8[Array, 'B H W'],
        coarse: UInt8[Array, 'B H W C'],
        channels: Int[Array, 'B C'],
    ) -> list[AttentionMap]:
        """Collect the attention of each place for the first channel, mapped to the image."""
        grid, stride = (gray.shape[1], gray.shape[2]), channels.shape[1]
        return axial_maps(intermediates, ('encoder',), grid, stride)

    def resize_params(
        self, params: Params, old_size: Size | None, new_size: Size, method: str = 'bilinear'
    ) -> Resized:
        """Resize the parameters for images of a different size, see `vit.Model.resize_params`.

        Positions and relative biases change.
        """
        del old_size
        return resize_axial(params, new_size, method)
