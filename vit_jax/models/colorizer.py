"""Colorization of gray images by a ViT on patches and a query for the colors of each patch.

The colors are bins of (a, b), as in Zhang et al., 2016, arXiv:1603.08511; the queries attend to
the patches as in DETR (Carion et al., 2020, arXiv:2005.12872).
"""

import functools
from collections.abc import Mapping
from typing import Any

import flax.linen as nn
import jax.numpy as jnp
from jax import Array

from vit_jax.array_types import Float
from vit_jax.errors import UserError, check_choice, check_multiple
from vit_jax.models import base
from vit_jax.models._resizing import resize_positions
from vit_jax.models.base import Params, Resized, Size, check_counts, check_fields
from vit_jax.nn import positions
from vit_jax.nn.blocks import Block, Encoder, Mlp
from vit_jax.nn.dense import Dense
from vit_jax.nn.maps import (
    AttentionMap,
    ParameterPictures,
    collect,
    embedding_filters,
    position_similarity,
    require_grid,
)
from vit_jax.nn.multi_head import MultiHeadAttention
from vit_jax.nn.norms import LayerNorm
from vit_jax.nn.patches import PatchEmbed, patch_grid, unpatchify
from vit_jax.nn.stochastic import Dropout
from vit_jax.ops.colors import NUM_BINS

POSEMBS = ('sincos1d', 'sincos2d', 'learn')
TABLES = ('pos_embed', 'query_embed')


class Model(base.Model):
    """An encoder of gray patches, and queries that attend to all of them.

    A query starts as its position and never attends to other queries, so that its attention maps
    are the only path from the image.

    Attributes:
      patch_size: Side of a patch in pixels.
      patch_out: Side of the square of colors that each query predicts for its patch.
      width, depth, mlp_dim, num_heads: Sizes of the encoder, see `vit.Model`.
      decoder_depth: Number of blocks of the queries.
      posemb: 'sincos1d', the table of Vaswani et al. over the patches row by row; 'sincos2d'; or
        'learn', one table for the patches and one for the queries.
      dropout: Dropout rate after the position embedding and each dense layer of a block.
      gelu: 'tanh' (approximate) or 'erf' (exact).
      norm_eps: Value added to the variance in layer norms.
      dtype: Computation dtype. Parameters, softmax and logits stay float32.
      attention: Implementation: 'xla', 'pallas', 'cudnn' or 'auto'; see the model `vit`.

    Raises:
      UserError: for an invalid field, or images that do not fit the patches or the positions.
    """

    patch_size: int = 16
    patch_out: int = 4
    width: int = 768
    depth: int = 12
    mlp_dim: int = 3072
    num_heads: int = 12
    decoder_depth: int = 2
    posemb: str = 'learn'
    dropout: float = 0.0
    gelu: str = 'tanh'
    norm_eps: float = 1e-6
    dtype: str = 'float32'
    attention: str = 'auto'

    def __post_init__(self) -> None:
        check_choice('posemb', self.posemb, POSEMBS)
        check_fields(self, 'gelu', 'dtype', 'attention', 'dropout')
        check_counts(self, 'decoder_depth')
        check_multiple('width', self.width, 'num_heads', self.num_heads)
        if self.patch_out < 1 or self.patch_size % self.patch_out:
            raise UserError(
                f'patch_out {self.patch_out} does not divide patch_size {self.patch_size}'
            )
        super().__post_init__()

    @nn.compact
    def __call__(
        self, images: Float[Array, 'B H W 1'], train: bool = False
    ) -> dict[str, Float[Array, 'B ...']]:
        """Predict the colors of gray images.

        Returns:
          tokens: [B N D], output of the encoder after its norm.
          logits: [B h w Q] in float32, of the bins of `ops.colors`; h is
            H / patch_size * patch_out.
        """
        dtype = jnp.dtype(self.dtype)
        _, height, width, _ = images.shape
        grid = patch_grid(height, width, self.patch_size)
        places, queries = (self._positions(name, grid).astype(dtype) for name in TABLES)
        x = PatchEmbed(self.patch_size, self.width, dtype, name='patch_embed')(images)
        x = Dropout(self.dropout)(x + places, train)
        tokens = self._encoder(dtype)(x, train)
        queries = jnp.broadcast_to(queries, tokens.shape)
        colors = self._decoder(dtype)(queries, tokens, places, train)
        logits = Dense(self.patch_out**2 * NUM_BINS, dtype=jnp.float32, name='head')(colors)
        return {'tokens': tokens, 'logits': unpatchify(logits, grid, self.patch_out)}

    def attention_maps(
        self, intermediates: Mapping[str, Any], images: Float[Array, 'B H W 1']
    ) -> list[AttentionMap]:
        """Collect self-attention of the patches, then attention of the queries to patches."""
        _, height, width, _ = images.shape
        grid = patch_grid(height, width, self.patch_size)
        return [
            *collect(intermediates, 'encoder', grid, grid),
            *collect(intermediates, 'decoder', grid, grid, 'cross'),
        ]

    def parameter_pictures(
        self, params: Mapping[str, Any], image_size: Size | None
    ) -> list[ParameterPictures]:
        """Draw similarities of the positions of patches and queries, and the patches' filters."""
        grid = require_grid(image_size, self.patch_size)
        tables = {
            name: params[name] if name in params else self._fixed_embedding(grid) for name in TABLES
        }
        return [
            *(position_similarity(name, table[0], grid) for name, table in tables.items()),
            *embedding_filters(params),
        ]

    def resize_params(
        self, params: Params, old_size: Size | None, new_size: Size, method: str = 'bilinear'
    ) -> Resized:
        """Resize the parameters for images of a different size, see `vit.Model.resize_params`."""
        new, notes = patch_grid(*new_size, self.patch_size), []
        old = old_size and patch_grid(*old_size, self.patch_size)
        for name in TABLES:
            if self.posemb == 'learn' and name in params:
                table = {'pos_embed': params[name]}
                table, note = resize_positions(table, old, new, 0, method)
                params = params | {name: table['pos_embed']}
                notes += [text.replace('pos_embed', name) for text in note]
        return params, notes

    def layer_order(self) -> tuple[str, ...]:
        """List patterns of the layers' parameters from the image on; the decoder comes last."""
        blocks = (f'^encoder/block_{i}/' for i in range(self.depth))
        return '^(patch_embed|pos_embed)(/|$)', *blocks

    def _positions(self, name: str, grid: tuple[int, int]) -> Array:
        """Make the positions of the patches or of the queries, [1 N D]."""
        rows, columns = grid
        if self.posemb == 'learn':
            return positions.learned(self, rows * columns, self.width, name=name)
        return self._fixed_embedding(grid)

    def _fixed_embedding(self, grid: tuple[int, int]) -> Array:
        """Compute sines and cosines, [1 N D], the same for patches and queries."""
        rows, columns = grid
        if self.posemb == 'sincos1d':
            return jnp.asarray(positions.sincos1d(rows * columns, self.width))[None]
        return jnp.asarray(positions.sincos2d(rows, columns, self.width))[None]

    def _encoder(self, dtype: Any) -> Encoder:
        block = functools.partial(Block, **self._block_fields(dtype))
        return Encoder(block, self.depth, norm_eps=self.norm_eps, dtype=dtype, name='encoder')

    def _decoder(self, dtype: Any) -> 'Decoder':
        block = functools.partial(CrossBlock, **self._block_fields(dtype))
        return Decoder(block, self.decoder_depth, self.norm_eps, dtype, name='decoder')

    def _block_fields(self, dtype: Any) -> dict[str, Any]:
        same = ('num_heads', 'mlp_dim', 'dropout', 'gelu', 'norm_eps')
        named = {key: getattr(self, key) for key in same}
        return {**named, 'dtype': dtype, 'attention_by': self.attention}


class CrossBlock(nn.Module):
    """A pre-norm block of cross-attention, without self-attention of the queries.

        x' = A(LN(x), tokens + positions, tokens) + x
        x  = MLP(LN(x')) + x'

    where A(q, k, v) is multi-head attention. For the attributes see `nn.blocks.Block`.
    """

    num_heads: int
    mlp_dim: int
    dropout: float = 0.0
    gelu: str = 'tanh'
    norm_eps: float = 1e-6
    dtype: Any = jnp.float32
    attention_by: str = 'xla'

    @nn.compact
    def __call__(
        self,
        x: Float[Array, 'B Q D'],
        tokens: Float[Array, 'B N D'],
        places: Float[Array, '#B N D'],
        train: bool = False,
    ) -> Float[Array, 'B Q D']:
        norm = LayerNorm(self.norm_eps, dtype=self.dtype, name='norm1')
        cross = MultiHeadAttention(
            self.num_heads,
            ('q', 'kv'),
            dtype=self.dtype,
            attention=self.attention_by,
            name='cross',
        )
        y = cross(norm(x), tokens + places, tokens, train=train)
        x = x + Dropout(self.dropout)(y, train)
        norm = LayerNorm(self.norm_eps, dtype=self.dtype, name='norm2')
        mlp = Mlp(self.mlp_dim, self.dropout, self.gelu, self.dtype, name='mlp')
        return x + Dropout(self.dropout)(mlp(norm(x), train), train)


class Decoder(nn.Module):
    """Blocks `block_0`, `block_1`, ... and a final layer norm, called with the blocks' inputs."""

    block: Any
    depth: int
    norm_eps: float = 1e-6
    dtype: Any = jnp.float32

    @nn.compact
    def __call__(self, x: Float[Array, 'B Q D'], *inputs: Any) -> Float[Array, 'B Q D']:
        for i in range(self.depth):
            x = self.block(name=f'block_{i}')(x, *inputs)
        return LayerNorm(self.norm_eps, dtype=self.dtype, name='norm')(x)
