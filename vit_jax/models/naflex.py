"""NaFlex: a ViT on images of any size and aspect ratio.

SigLIP 2, Tschannen et al., 2025, arXiv:2502.14786, section 2.4.2, after NaViT (arXiv:2307.06304)
and FlexiViT (arXiv:2212.08013): one table of positions is stretched over the grid of each image,
and one kernel may be resized to patches of any size.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import flax.linen as nn
import jax.numpy as jnp
from jax import Array

from vit_jax.array_types import Bool, Float
from vit_jax.errors import UserError
from vit_jax.models import base, vit
from vit_jax.models.base import check_counts, check_fields
from vit_jax.nn.maps import AttentionMap, HiddenState, ParameterPictures
from vit_jax.nn.options import PoolFields
from vit_jax.nn.patches import PatchDropout, PatchEmbed, patch_grid, patchify
from vit_jax.nn.positions import learned, resized
from vit_jax.ops.resize import pinv_matrix
from vit_jax.ops.sequences import Sequences, side_and_channels


class Model(vit.Model):
    """Model `vit` on sequences of patches, or on images that whole patches tile.

    It has the fields of `vit`, but positions are learned (`positions.embed='learn'`), and attention
    has none (`positions.kind='none'`).

    Attributes:
      pos_grid: Rows and columns of the table of positions, parameter `pos_embed`.
      kernel_size: Side in pixels of the kernel, such as FlexiViT's 32, which is resized to patches
        of any size; None for only patches of `patch_size`. Images are cut by `patch_size`.
      patch_dropout: Share of each image's patches that training leaves out.
    """

    pool: PoolFields = PoolFields(kind='map')
    pos_grid: int = 16
    kernel_size: int | None = None
    patch_dropout: float = 0.0

    def __post_init__(self) -> None:
        check_fields(self, 'patch_dropout')
        check_counts(self, 'pos_grid', 'kernel_size')
        positions = self.positions
        if positions.embed != 'learn' or positions.kind != 'none':
            raise UserError(
                f'positions.embed={positions.embed!r}, positions.kind={positions.kind!r}: naflex '
                "stretches learned positions over each image; take positions.embed='learn' and "
                "positions.kind='none'"
            )
        super().__post_init__()

    @property
    def own_size(self) -> base.Size:
        """Height and width in pixels of images that use the table of positions as it is."""
        return (self.pos_grid * self.patch_size,) * 2

    @property
    def kernel_side(self) -> int:
        return self.kernel_size or self.patch_size

    @nn.compact
    def __call__(
        self,
        images: Float[Array, 'B H W C'] | Sequences,
        train: bool = False,
        *,
        mask: Bool[Array, 'B N'] | None = None,
        masked: Bool[Array, 'B N'] | None = None,
    ) -> dict[str, Float[Array, 'B *rest']]:
        """Classify normalized images; padding and other images have no effect.

        Args:
          images: Normalized images.
          train: Whether dropout acts, also on patches.
          mask: False for patches to leave out in addition to the padding.
          masked: True for patches to replace by `mask_token`, see the model `vit`.

        Returns:
          The outputs of the model `vit`; tokens of padding are not defined.
        """
        dtype, first = jnp.dtype(self.dtype), self.prefix_tokens
        images = images if isinstance(images, Sequences) else self._cut(images)
        x, real = self._embed(images, masked, train, dtype), images.real
        real = real if mask is None else real & mask
        if train and self.patch_dropout:
            patches, real = PatchDropout(self.patch_dropout)(x[:, first:], real)
            x = jnp.concatenate([x[:, :first], patches], axis=1)
        # Tokens before the patches are always real.
        segments = jnp.pad(real.astype(int), ((0, 0), (first, 0)), constant_values=1)
        tokens = self._encoder(dtype, None)(x, train, segments)
        return vit.outputs(self, tokens, segments, train)

    def attention_maps(
        self, intermediates: Mapping[str, Any], images: Float[Array, 'B H W C'] | Sequences
    ) -> list[AttentionMap]:
        """Collect attention maps of images with the first one's grid, without padding."""
        if not isinstance(images, Sequences):
            return super().attention_maps(intermediates, images)
        rows, columns = map(int, images.grid[0])
        tokens = self.prefix_tokens + rows * columns
        size = (1, rows * self.patch_size, columns * self.patch_size, 1)
        maps = super().attention_maps(intermediates, jnp.zeros(size))
        return [m._replace(weights=jnp.asarray(m.weights)[..., :tokens, :tokens]) for m in maps]

    def collect_hidden_states(
        self,
        collection: Mapping[str, Any],
        images: Float[Array, 'B H W C'] | Sequences,
        *others: Any,
    ) -> list[HiddenState]:
        """Collect the states of the encoder's layers; sequences have no common grid."""
        if not isinstance(images, Sequences):
            return super().collect_hidden_states(collection, images)
        size = (1, self.patch_size, self.patch_size, 1)
        states = super().collect_hidden_states(collection, jnp.zeros(size))
        return [dataclasses.replace(state, grid=(), real=images.real) for state in states]

    def parameter_pictures(
        self, params: Mapping[str, Any], image_size: base.Size | None
    ) -> list[ParameterPictures]:
        """Draw the pictures of the model `vit`, with the unchanged table of positions."""
        del image_size
        return super().parameter_pictures(params, self.own_size)

    def _cut(self, images: Array) -> Sequences:
        """Cut images of one size into sequences."""
        _, height, width, _ = images.shape
        grid = jnp.array(patch_grid(height, width, self.patch_size))
        values = patchify(images, self.patch_size)
        return Sequences(values, jnp.broadcast_to(grid, (len(images), 2)))

    def _patches(self, images: Sequences, dtype: Any) -> Array:
        if self.kernel_size is None:
            return super()._patches(images.values, dtype)
        side, _ = side_and_channels(images.values.shape[-1])
        biased = 'patch_embed' not in self.no_bias
        embed = _FlexiblePatchEmbed(
            side, self.width, dtype, biased, self.kernel_size, name='patch_embed'
        )
        return embed(images.values)

    def _positions(self, tokens: int, images: Sequences) -> Array:
        first, side = self.positioned_tokens, self.pos_grid
        table = learned(self, first + side**2, self.width, self.positions.std)
        of_patches = table[0, first:].reshape(side, side, -1)
        stretched = resized(of_patches, images.grid, tokens - first)
        prefix = jnp.broadcast_to(table[:, :first], (len(stretched), first, self.width))
        return jnp.concatenate([prefix, stretched], axis=1)


class _FlexiblePatchEmbed(PatchEmbed):
    """Patch embedding whose kernel is resized to the patches: FlexiViT, section 3.4.

    Kernel [kernel_size, kernel_size, C, D].
    """

    kernel_size: int = 32

    def _kernel(self, channels: int) -> Float[Array, 'p p C D']:
        shape = (self.kernel_size, self.kernel_size, channels, self.width)
        kernel = self.param('kernel', nn.initializers.lecun_normal(), shape)
        if self.kernel_size == self.patch_size:
            return kernel
        side = jnp.asarray(pinv_matrix(self.kernel_size, self.patch_size), kernel.dtype)
        return jnp.einsum('pi,qj,ijcd->pqcd', side, side, kernel, precision='highest')
