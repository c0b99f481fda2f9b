"""Masked autoencoder: a ViT on the visible patches, and a small one that reconstructs the rest.

He et al., 2022, arXiv:2111.06377. The encoder's parameters have the names of a ViT's.
"""

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any, ClassVar

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from vit_jax.array_types import Float, Float32, Int
from vit_jax.errors import UserError, check_multiple
from vit_jax.models import base
from vit_jax.models.base import Params, Resized, Size, check_fields
from vit_jax.nn import positions
from vit_jax.nn.blocks import Block, BlockOptions, Encoder
from vit_jax.nn.dense import Dense
from vit_jax.nn.maps import ParameterPictures, embedding_filters, position_similarity, require_grid
from vit_jax.nn.options import PlainBlockFields
from vit_jax.nn.patches import PatchEmbed, patch_grid
from vit_jax.nn.stochastic import example_keys

# The ViT encoder's part of the parameters.
ENCODER = ('patch_embed', 'cls_token', 'pos_embed', 'encoder')

_token_init = nn.initializers.normal(0.02)


@dataclasses.dataclass(frozen=True)
class MaeBlockFields(PlainBlockFields):
    """Blocks of both parts.

    Attributes:
      residual_dtype: Dtype of the residual streams; None for the computation dtype. The authors use
        'float32', with matmuls in half precision.
    """

    gelu: str = 'erf'
    residual_dtype: str | None = None


class Model(base.Model):
    """An asymmetric encoder and decoder (section 3). Images of any size that whole patches tile.

    Attributes:
      patch_size: Side of a patch in pixels.
      width, depth, mlp_dim, num_heads: Sizes of the encoder, see `vit.Model`.
      decoder_width, decoder_depth, decoder_mlp_dim, decoder_heads: Sizes of the decoder.
      mask_ratio: Share of the patches hidden from the encoder.
      block: Options of the blocks, see `MaeBlockFields`.
      qkv_bias: Whether queries, keys and values have biases.
      scan: One scanned block instead of unrolled ones; see `Encoder`.
      remat: Recomputation in the backward pass; see the model `vit`.
      attention: Implementation: 'xla', 'pallas', 'cudnn' or 'auto'; see the model `vit`.
      dtype: Computation dtype. Parameters, layer norm statistics and softmax stay float32.

    Raises:
      UserError: for an invalid field, or images that do not fit the patches or the positions, or
        have so few patches that none is visible.
    """

    patch_size: int = 16
    width: int = 768
    depth: int = 12
    mlp_dim: int = 3072
    num_heads: int = 12
    decoder_width: int = 512
    decoder_depth: int = 8
    decoder_mlp_dim: int = 2048
    decoder_heads: int = 16
    mask_ratio: float = 0.75
    block: MaeBlockFields = MaeBlockFields()
    qkv_bias: bool = True
    scan: bool = False
    remat: bool | str = False
    attention: str = 'auto'
    dtype: str = 'float32'

    effects: ClassVar = {'mask_ratio': 'outputs'}

    def __post_init__(self) -> None:
        check_fields(self, 'block.gelu', 'block.residual_dtype')
        check_fields(self, 'attention', 'dtype', 'remat', 'mask_ratio')
        for width, heads in (('width', 'num_heads'), ('decoder_width', 'decoder_heads')):
            check_multiple(width, getattr(self, width), heads, getattr(self, heads))
        super().__post_init__()

    def setup(self) -> None:
        dtypes = jnp.dtype(self.dtype), jnp.dtype(self.block.residual_dtype or self.dtype)
        encoder = self._transformer(self.depth, self.num_heads, self.mlp_dim)
        self.vit = VisibleEncoder(encoder, self.patch_size, self.width, *dtypes)
        nn.share_scope(self, self.vit)  # its parameters are at the top level, as in a ViT
        decoder = self._transformer(self.decoder_depth, self.decoder_heads, self.decoder_mlp_dim)
        self.decoder = Decoder(decoder, self.patch_size, self.decoder_width, *dtypes)

    def __call__(
        self,
        images: Float[Array, 'B H W C'],
        noise: Float[Array, 'B N'] | None = None,
        train: bool = False,
    ) -> dict[str, Float[Array, 'B *rest']]:
        """Reconstruct all patches from the visible ones.

        Args:
          images: Normalized images.
          noise: Numbers of which the lowest select the visible patches; by default drawn from the
            random stream 'mask'.
          train: Has no effect: MAE has no dropout, and draws its masks in evaluation too.

        Returns:
          patches: [B N P] in float32, in the order of `nn.patches.patchify`.
          mask: [B N], 1 for a hidden patch and 0 for a visible one.
          tokens: [B 1+K D], the class token and the visible patches after the encoder's norm.
        """
        _, height, width, channels = images.shape
        grid = patch_grid(height, width, self.patch_size)
        if noise is None:
            noise = self._noise(len(images), grid[0] * grid[1])
        order = jnp.argsort(noise, axis=1)
        places = jnp.argsort(order, axis=1)  # the rank of every patch in this order
        visible = self._count_visible(noise.shape[1])
        tokens = self.vit(images, order[:, :visible], train)
        patches = self.decoder(tokens, places, grid, channels, train)
        mask = (places >= visible).astype(jnp.float32)
        return {'patches': patches, 'mask': mask, 'tokens': tokens}

    def features(self, images: Float[Array, 'B H W C']) -> Float[Array, 'B _ D']:
        """Encode whole images to the tokens of the class and of every patch, after the norm."""
        return self.vit(images, None, False)

    def transferable(self) -> tuple[dict[str, Any], tuple[str, ...]]:
        """Describe the encoder as a ViT: keywords of `config.model`, and parameter paths."""
        same = ('patch_size', 'width', 'depth', 'mlp_dim', 'num_heads')
        model = {'name': 'vit', **{key: getattr(self, key) for key in same}}
        model['block'] = {'gelu': self.block.gelu, 'norm_eps': self.block.norm_eps}
        return model | {'no_bias': () if self.qkv_bias else ('query', 'key', 'value')}, ENCODER

    def parameter_pictures(
        self, params: Mapping[str, Any], image_size: Size | None
    ) -> list[ParameterPictures]:
        """Draw similarities of the patches' positions in both parts, and the encoder's filters."""
        grid = require_grid(image_size, self.patch_size)
        tables = {
            'pos_embed': params['pos_embed'],
            'decoder/pos_embed': params['decoder']['pos_embed'],
        }
        return [
            *(position_similarity(name, table[0, 1:], grid) for name, table in tables.items()),
            *embedding_filters(params),
        ]

    def layer_order(self) -> tuple[str, ...]:
        """List patterns of the layers' parameters from the image on; the decoder comes last."""
        blocks = (f'^encoder/block_{i}/' for i in range(self.depth))
        return '^(patch_embed|cls_token|pos_embed)(/|$)', *blocks

    def resize_params(
        self, params: Params, old_size: Size | None, new_size: Size, method: str = 'bilinear'
    ) -> Resized:
        """Recompute the fixed positions for images of a different size.

        Raises:
          UserError: if the images cannot be cut into patches.
        """
        del old_size, method
        grid = patch_grid(*new_size, self.patch_size)
        params, notes = _recompute_positions(params, grid, self.width)
        if 'decoder' in params:
            decoder, more = _recompute_positions(params['decoder'], grid, self.decoder_width)
            params, notes = params | {'decoder': decoder}, [*notes, *(f'decoder/{n}' for n in more)]
        return params, notes

    def _transformer(self, depth: int, num_heads: int, mlp_dim: int) -> Callable[..., Encoder]:
        """Make a factory of blocks and a final norm, called with `name`."""
        shared: dict[str, Any] = {'norm_eps': self.block.norm_eps, 'dtype': jnp.dtype(self.dtype)}
        block = functools.partial(
            Block,
            num_heads=num_heads,
            mlp_dim=mlp_dim,
            gelu=self.block.gelu,
            attention_by=self.attention,
            options=BlockOptions(no_bias=() if self.qkv_bias else ('query', 'key', 'value')),
            **shared,
        )
        return functools.partial(Encoder, block, depth, scan=self.scan, remat=self.remat, **shared)

    def _noise(self, batch: int, patches: int) -> Float[Array, 'B N']:
        """Draw noise, uniform on [0, 1), independently for each example."""
        keys = example_keys(self.make_rng('mask'), batch)
        return jax.vmap(lambda key: jax.random.uniform(key, (patches,)))(keys)

    def _count_visible(self, patches: int) -> int:
        visible = int(patches * (1 - self.mask_ratio))
        if not visible:
            raise UserError(
                f'mask_ratio {self.mask_ratio} leaves none of {patches} patches to be seen: lower '
                'it, or choose smaller patches'
            )
        return visible


class VisibleEncoder(nn.Module):
    """A ViT without pooling on some of the patches; its parameters have the names of a ViT's.

    Attributes:
      transformer: Factory of the blocks and the final norm, called with `name`.
      patch_size: Side of a patch in pixels.
      width: Token width.
      dtype: Computation dtype.
      residual: Dtype of the residual stream.
    """

    transformer: Callable[..., nn.Module]
    patch_size: int
    width: int
    dtype: Any = jnp.float32
    residual: Any = jnp.float32

    @nn.compact
    def __call__(
        self, images: Float[Array, 'B H W C'], visible: Int[Array, 'B K'] | None, train: bool
    ) -> Float[Array, 'B _ D']:
        """Encode the class token and the patches of indices `visible`; None for all."""
        _, height, width, _ = images.shape
        grid = patch_grid(height, width, self.patch_size)
        table = positions.fixed(self, fixed_positions(grid, self.width)).astype(self.residual)
        x = PatchEmbed(self.patch_size, self.width, self.dtype, name='patch_embed')(images)
        x = x.astype(self.residual) + table[:, 1:]
        if visible is not None:
            x = jnp.take_along_axis(x, visible[..., None], axis=1)
        token = self.param('cls_token', _token_init, (1, 1, self.width)).astype(self.residual)
        token = jnp.broadcast_to(token + table[:, :1], (len(x), 1, self.width))
        return self.transformer(name='encoder')(jnp.concatenate([token, x], axis=1), train)


class Decoder(nn.Module):
    """Decoder from tokens of the visible patches, and a mask token for every other, to pixels.

    It has the attributes of `VisibleEncoder`.
    """

    transformer: Callable[..., nn.Module]
    patch_size: int
    width: int
    dtype: Any = jnp.float32
    residual: Any = jnp.float32

    @nn.compact
    def __call__(
        self,
        tokens: Float[Array, 'B _ E'],
        places: Int[Array, 'B N'],
        grid: tuple[int, int],
        channels: int,
        train: bool,
    ) -> Float[Array, 'B N P']:
        """Predict the values of every patch.

        Args:
          tokens: Encoded class token and visible patches.
          places: Index of every patch among the visible ones, K or more if it is hidden.
          grid: Rows and columns of patches.
          channels: Number of channels of the images.
          train: Whether dropout acts.
        """
        x = Dense(self.width, dtype=self.dtype, name='embed')(tokens).astype(self.residual)
        token = self.param('mask_token', _token_init, (1, 1, self.width)).astype(self.residual)
        hidden = places.shape[1] - (x.shape[1] - 1)
        patches = jnp.concatenate(
            [x[:, 1:], jnp.broadcast_to(token, (len(x), hidden, self.width))], axis=1
        )
        patches = jnp.take_along_axis(patches, places[..., None], axis=1)
        x = jnp.concatenate([x[:, :1], patches], axis=1)
        x = x + positions.fixed(self, fixed_positions(grid, self.width)).astype(self.residual)
        x = self.transformer(name='transformer')(x, train)
        values = self.patch_size**2 * channels
        return Dense(values, dtype=jnp.float32, name='head')(x[:, 1:])


def fixed_positions(grid: tuple[int, int], dim: int) -> Float32[np.ndarray, 'N D']:
    """Compute sine-cosine positions of the patches; the row of the class token is 0."""
    return np.pad(positions.sincos2d(*grid, dim, endpoint=False), ((1, 0), (0, 0)))


def _recompute_positions(params: Params, grid: tuple[int, int], width: int) -> Resized:
    """Compute `pos_embed` for this grid, with a note if it was for a different one."""
    table, old = fixed_positions(grid, width)[None], params.get('pos_embed')
    # Different grids with as many patches have tables of equal shape.
    if old is None or (old.shape == table.shape and np.allclose(old, table, atol=1e-4)):
        return params, []
    note = f'pos_embed: computed for {grid[1]} x {grid[0]} patches'
    return params | {'pos_embed': table}, [note]
