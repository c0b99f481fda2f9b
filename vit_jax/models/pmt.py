"""PMT: a frozen ViT and a light decoder that segments images.

Cavagnero et al., 2026, "Plain Mask Transformer for Image and Video Segmentation with Frozen Vision
Encoders", arXiv:2603.25398.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Mapping
from typing import Any, ClassVar

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax import Array

from vit_jax.array_types import Float
from vit_jax.errors import UserError, check_choice
from vit_jax.models import eomt
from vit_jax.models.vit import attention_positions
from vit_jax.nn.blocks import GELUS, Block, BlockOptions
from vit_jax.nn.maps import AttentionMap, collect
from vit_jax.nn.norms import BatchNorm, LayerNorm
from vit_jax.nn.patches import patch_grid
from vit_jax.nn.rotary import KeySource, Layout, RopeDinov3, Rotary

MAP_NORMS = ('batch', 'none')
_EPS = 1e-5
_ROPE = RopeDinov3(theta=100.0, rescale=2.0)


class Model(eomt.Model):
    """A ViT in evaluation mode and without gradient, and blocks that see its tokens and queries.

    The ViT's parameters are at the top level, as in `vit`. Add them to `config.optim.freeze` too,
    or weight decay will shrink them.

    Attributes:
      num_queries: Q, largest number of segments of an image.
      query_blocks: Number of blocks of the decoder.
      maps: Numbers of the ViT's blocks whose tokens the decoder gets, after the final norm; the
        last is `depth`. None for four evenly spaced ones.
      map_norm: Norm of each of these layers' tokens: 'batch', or 'none'.
      decoder_mlp_dim: Hidden width of the decoder's MLPs; None for `width`, as published.
      dropout: Dropout rate in the decoder.

    Other attributes and errors: see `eomt.Model`. Drop path acts only in the decoder. Positions
    within the decoder's attention are the ViT's if these are rotary, and otherwise those of DINOv3,
    rescaled at random in training.
    """

    query_blocks: int = 6
    maps: tuple[int, ...] | None = None
    map_norm: str = 'batch'
    decoder_mlp_dim: int | None = None

    title: ClassVar[str] = 'a PMT'
    effects: ClassVar = {'query_blocks': '', 'maps': 'binding'}

    def __post_init__(self) -> None:
        check_choice('map_norm', self.map_norm, MAP_NORMS)
        layers = self.map_layers
        if list(layers) != sorted({*layers}) or layers[0] < 1 or layers[-1] != self.depth:
            raise UserError(
                f'maps={self.maps}: must be increasing numbers from 1 to depth={self.depth}'
            )
        if self.decoder_mlp_dim is not None and self.decoder_mlp_dim < 1:
            raise UserError(f'decoder_mlp_dim must be at least 1, not {self.decoder_mlp_dim}')
        super().__post_init__()

    def _check_blocks(self) -> None:
        """Let the decoder have any number of blocks."""

    @property
    def map_layers(self) -> tuple[int, ...]:
        """Numbers of the ViT's blocks whose tokens the decoder gets."""
        if self.maps:
            return self.maps
        return tuple(sorted({-(-self.depth * i // 4) for i in (1, 2, 3, 4)}))

    @property
    def batch_norm_key(self) -> str:
        """Return the key whose value makes a batch norm; empty for none."""
        return 'map_norm' if self.map_norm == 'batch' else ''

    @nn.compact
    def __call__(  # type: ignore[override]  # no masked patches, no padding
        self,
        images: Float[Array, 'B H W C'],
        train: bool = False,
        *,
        mask_probs: Float[Array, '*L'] | None = None,
    ) -> dict[str, Float[Array, 'B ...']]:
        """Segment normalized images; see `eomt.Model`, whose last blocks are the decoder's here.

        Args:
          images: Normalized images.
          train: Whether dropout acts, and whether batch norms take the statistics of this batch.
          mask_probs: Probability, for each block of the decoder or for all of them, that a query of
            an image attends only to patches within its current mask.
        """
        dtype = jnp.dtype(self.dtype)
        grid = patch_grid(images.shape[1], images.shape[2], self.patch_size)
        encoder = self._encoder_blocks(dtype)
        positions: Any = attention_positions(self, grid, None)[0]
        x, total = self._embed(images, None, False, dtype), jnp.zeros((), dtype)
        for i, (first, last) in enumerate(itertools.pairwise((0, *self.map_layers))):
            x = encoder(x, range(first, last), False, positions)
            tokens = jax.lax.stop_gradient(encoder.normed(x))
            lateral = Lateral(self.map_norm, self.block.gelu, dtype, name=f'lateral_{i}')
            total = total + lateral(tokens, train)
        decoder = self._decoder(dtype)
        next_key = functools.partial(self.make_rng, 'dropout') if train else None
        rotary = positions if isinstance(positions, Rotary) else self._rotary(grid, next_key)
        numbers = range(self.query_blocks)
        return self._segment(total, decoder, numbers, grid, rotary, train, mask_probs)

    def _rotary(self, grid: tuple[int, int], next_key: KeySource | None) -> Rotary:
        layout = Layout(grid, self.class_tokens, self.registers)
        return _ROPE(layout, self.width // self.num_heads, next_key)

    def _decoder(self, dtype: Any) -> eomt.Encoder:
        """Make the decoder of DINOv3's blocks."""
        block = functools.partial(
            Block,
            *(self.num_heads, self.decoder_mlp_dim or self.width, self.dropout),
            attention_dropout=self.block.attention_dropout,
            gelu=self.block.gelu,
            norm_eps=_EPS,
            dtype=dtype,
            attention_by=self.attention,
            options=BlockOptions(layer_scale=1.0, no_bias=('key',)),
        )
        return eomt.Encoder(
            block,
            functools.partial(LayerNorm, _EPS, dtype=dtype),
            *(self.query_blocks, self.block.drop_path, self.remat, True, dtype),
            name='decoder',
        )

    def attention_maps(
        self, intermediates: Mapping[str, Any], images: Float[Array, 'B H W C']
    ) -> list[AttentionMap]:
        """Collect attention within the ViT, `encoder/block_i`, and of the decoder's blocks, named
        as those of `eomt`.
        """
        grid = patch_grid(images.shape[1], images.shape[2], self.patch_size)
        maps = collect(intermediates, 'decoder', grid, grid)
        return [
            *collect(intermediates, 'encoder', grid, grid),
            *self._query_maps(maps, intermediates, grid, 0),
        ]


class Lateral(nn.Module):
    """A norm, a residual MLP, and a learned factor for each channel."""

    norm: str
    gelu: str
    dtype: Any

    @nn.compact
    def __call__(self, x: Float[Array, 'B N D'], train: bool) -> Float[Array, 'B N D']:
        width = x.shape[-1]
        if self.norm == 'batch':
            norm = BatchNorm(not train, momentum=0.9, epsilon=_EPS, dtype=self.dtype, name='norm')
            x = norm(x)
        y = eomt.dense(width // 2, dtype=self.dtype, name='fc1')(x)
        x = x + eomt.dense(width, dtype=self.dtype, name='fc2')(GELUS[self.gelu](y))
        scale = self.param('scale', nn.initializers.ones, (width,))
        return x * scale.astype(x.dtype)
