"""ColTran core: coarse colors of a gray image, pixel by pixel.

Kumar et al., 2021, arXiv:2102.04432, sections 3 and 4.1. Pixels are drawn row by row. The outer
decoder encodes the rows above a pixel, the inner one the pixels to its left; both are conditioned
on the encoded gray image.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax import Array

from vit_jax.array_types import Float, Int, Key, UInt8
from vit_jax.errors import check_multiple
from vit_jax.models import base
from vit_jax.models._resizing import resize_axial
from vit_jax.models.base import Params, Resized, Size, check_fields
from vit_jax.nn.axial import AxialEncoder, AxialLayer, Context, GridPositions, axial_maps
from vit_jax.nn.blocks import XAVIER
from vit_jax.nn.maps import AttentionMap
from vit_jax.nn.multi_head import KeyValue
from vit_jax.nn.norms import LayerNorm
from vit_jax.nn.stochastic import example_keys
from vit_jax.ops.colors import NUM_COARSE_BINS

GRAYS = 256
Summaries = tuple[tuple[Float[Array, 'B 1 1 D'], ...], ...]  # of every layer


class Cache(NamedTuple):
    """State between pixels. Axis 0 of every array is the image.

    Attributes:
      gray: Encoded gray image.
      row: Colors of the current row.
      above: Outer decoder's encoding of all rows above the current one.
      outer, inner: Keys and values of the causal layers, along columns and along the row.
      outer_summaries, inner_summaries: Summaries of the gray image for the layers' norms.
    """

    gray: Float[Array, 'B H W D']
    row: Int[Array, 'B W']
    above: Float[Array, 'B 1 W D']
    outer: tuple[KeyValue, ...]
    inner: tuple[KeyValue, ...]
    outer_summaries: Summaries
    inner_summaries: Summaries


class Model(base.Model):
    """Encoder of the gray image, outer and inner decoder, and a parallel head on the encoder.

    Attributes:
      width: D, width of a position.
      num_heads: Attention heads; divides width.
      mlp_dim: Hidden width of the feed-forward layers.
      encoder_depth: Pairs of row and column attention over the gray image.
      outer_depth: Pairs of row attention and causal column attention over the rows above.
      inner_depth: Layers of causal row attention over the pixels to the left.
      norm_eps: Value added to the variance in layer norms.
      dtype: Computation dtype. Parameters, layer norm statistics, softmax and logits stay float32.
      attention: Implementation: 'xla', 'pallas' or 'auto'; see the model `swin`.

    Raises:
      UserError: for an invalid field.
    """

    width: int = 512
    num_heads: int = 4
    mlp_dim: int = 512
    encoder_depth: int = 4
    outer_depth: int = 2
    inner_depth: int = 2
    norm_eps: float = 1e-3
    dtype: str = 'float32'
    attention: str = 'auto'

    def __post_init__(self) -> None:
        check_fields(self, 'attention', 'dtype')
        check_multiple('width', self.width, 'num_heads', self.num_heads)
        super().__post_init__()

    def setup(self) -> None:
        dtype = jnp.dtype(self.dtype)
        layer = functools.partial(
            AxialLayer,
            self.num_heads,
            self.mlp_dim,
            norm_eps=self.norm_eps,
            dtype=dtype,
            attention_by=self.attention,
        )
        self.embed_grey = nn.Embed(GRAYS, self.width, dtype=dtype)
        self.encoder = AxialEncoder(self.encoder_depth, layer)
        self.embed_color = nn.Embed(NUM_COARSE_BINS, self.width, dtype=dtype)
        self.outer = OuterDecoder(self.outer_depth, layer)
        self.inner = InnerDecoder(self.inner_depth, layer)
        self.norm = LayerNorm(self.norm_eps, dtype=dtype)
        self.head = nn.Dense(NUM_COARSE_BINS, kernel_init=XAVIER)
        self.parallel_head = nn.Dense(NUM_COARSE_BINS, use_bias=False, kernel_init=XAVIER)

    def __call__(
        self,
        gray: UInt8[Array, 'B H W'],
        bins: Int[Array, 'B H W'],
        train: bool = False,
    ) -> dict[str, Float[Array, 'B H W V']]:
        """Score every pixel's color, given the true colors of earlier pixels.

        Args:
          gray: Image to be colored.
          bins: Its coarse colors, see `ops.colors`.
          train: Has no effect without dropout.

        Returns:
          logits: [B H W 512], for a pixel given the gray image, the rows above it and the pixels to
            its left.
          parallel_logits: [B H W 512], given only the gray image.
        """
        encoded, colors = self._encode(gray), self.embed_color(bins)
        above = self.outer(colors, encoded)
        context = self.inner(colors, above, encoded)
        return {
            'logits': self.head(self.norm(context)),
            'parallel_logits': self.parallel_head(encoded),
        }

    def start(self, gray: UInt8[Array, 'B H W']) -> Cache:
        """Make the cache before the first pixel."""
        encoded = self._encode(gray)
        batch, height, width, _ = encoded.shape
        return Cache(
            encoded,
            jnp.zeros((batch, width), jnp.int32),
            jnp.zeros_like(encoded[:, :1]),
            tuple(layer.empty(batch, width, height, self.width) for layer in self.outer.columns),
            tuple(layer.empty(batch, 1, width, self.width) for layer in self.inner.rows),
            self.outer.summaries(encoded),
            self.inner.summaries(encoded),
        )

    def decode_step(
        self, cache: Cache, colors: Int[Array, 'B'], position: Int[Array, '']
    ) -> tuple[Float[Array, 'B V'], Cache]:
        """Score the pixel at `position`, counted row by row, given the color before it.

        The outer decoder runs once a row, the inner one once a pixel. The color before the first
        pixel is ignored.
        """
        width = cache.row.shape[1]
        row, column = position // width, position % width
        cache = cache._replace(row=cache.row.at[:, column - 1].set(colors))
        above, outer = nn.cond(
            (column == 0) & (row > 0),
            lambda model: model.outer.step(model.embed_color(cache.row)[:, None], row - 1, cache),
            lambda _: (cache.above, cache.outer),
            self,
        )
        cache = cache._replace(above=above, outer=outer)
        left_color = jnp.where(column == 0, 0, self.embed_color(colors))[:, None, None]
        context, inner = self.inner.step(left_color, row, column, cache)
        return self.head(self.norm(context))[:, 0, 0], cache._replace(inner=inner)

    def sample_keys(self, batch: int) -> Key[Array, 'B']:
        """Derive a key for each example from the random stream 'sample'."""
        return example_keys(self.make_rng('sample'), batch)

    def attention_maps(
        self,
        intermediates: Any,
        gray: UInt8[Array, 'B H W'],
        bins: Int[Array, 'B H W'],
    ) -> list[AttentionMap]:
        """Collect the attention of each place to the image, layer by layer."""
        return axial_maps(
            intermediates, ('encoder', 'outer', 'inner'), (gray.shape[1], gray.shape[2])
        )

    def resize_params(
        self, params: Params, old_size: Size | None, new_size: Size, method: str = 'bilinear'
    ) -> Resized:
        """Resize the parameters for images of a different size, see `vit.Model.resize_params`.

        Positions, relative biases and the weights of summaries change.
        """
        del old_size
        return resize_axial(params, new_size, method)

    def _encode(self, gray: Array) -> Float[Array, 'B H W D']:
        return self.encoder(self.embed_grey(gray.astype(jnp.int32)))


class OuterDecoder(nn.Module):
    """Encoder of all rows above each row: causal over rows, shifted down by one (section 3.2).

    Attributes:
      depth: Pairs of row attention and causal column attention.
      layer: Factory of layers, called with `axis` and `causal`.
    """

    depth: int
    layer: Callable[..., AxialLayer]

    def setup(self) -> None:
        self.positions = GridPositions()
        self.rows = [self.layer(axis='row') for _ in range(self.depth)]
        self.columns = [self.layer(axis='column', causal=True) for _ in range(self.depth)]

    def __call__(
        self, colors: Float[Array, 'B H W D'], gray: Float[Array, 'B H W D']
    ) -> Float[Array, 'B H W D']:
        """Encode the rows above each row; zero for the first."""
        x = colors + self.positions(*gray.shape[1:]).astype(gray.dtype) + gray
        for row, column in zip(self.rows, self.columns, strict=True):
            x = row(x, Context(gray, row.summaries(gray)))
            x = column(x, Context(gray, column.summaries(gray)))
        return jnp.pad(x, ((0, 0), (1, 0), (0, 0), (0, 0)))[:, :-1]

    def step(
        self, colors: Float[Array, 'B 1 W D'], number: Int[Array, ''], cache: Cache
    ) -> tuple[Float[Array, 'B 1 W D'], tuple[KeyValue, ...]]:
        """Encode the rows up to row `number`, and add this row to the caches."""
        gray = jax.lax.dynamic_slice_in_dim(cache.gray, number, 1, axis=1)
        positions = self.positions(*cache.gray.shape[1:]).astype(gray.dtype)
        x = colors + jax.lax.dynamic_slice_in_dim(positions, number, 1) + gray
        summaries, pasts = iter(cache.outer_summaries), []
        for row, column, past in zip(self.rows, self.columns, cache.outer, strict=True):
            x = row(x, Context(gray, next(summaries)))
            x, past = column.step(x, past, number, Context(gray, next(summaries)))
            pasts.append(past)
        return x, tuple(pasts)

    def summaries(self, gray: Float[Array, 'B H W D']) -> Summaries:
        """Summarize the gray image for the layers along rows and columns in turn."""
        pairs = zip(self.rows, self.columns, strict=True)
        return tuple(layer.summaries(gray) for pair in pairs for layer in pair)


class InnerDecoder(nn.Module):
    """Encoder of the pixels to the left of each pixel, shifted right by one (section 3.2).

    Attention and MLP are conditioned on the gray image and the rows above, norms on a summary of
    only the gray image: a summary of the rows above would leak later rows.

    Attributes:
      depth: Layers of causal row attention.
      layer: Factory of layers, called with `axis` and `causal`.
    """

    depth: int
    layer: Callable[..., AxialLayer]

    def setup(self) -> None:
        self.positions = GridPositions()
        self.rows = [self.layer(axis='row', causal=True) for _ in range(self.depth)]

    def __call__(
        self,
        colors: Float[Array, 'B H W D'],
        above: Float[Array, 'B H W D'],
        gray: Float[Array, 'B H W D'],
    ) -> Float[Array, 'B H W D']:
        """Encode each pixel's context."""
        left = jnp.pad(colors, ((0, 0), (0, 0), (1, 0), (0, 0)))[:, :, :-1]
        x = left + self.positions(*gray.shape[1:]).astype(gray.dtype) + gray + above
        places = jnp.concatenate([gray, above], axis=-1)
        for layer in self.rows:
            x = layer(x, Context(places, layer.summaries(gray)))
        return x

    def step(
        self,
        left: Float[Array, 'B 1 1 D'],
        row: Int[Array, ''],
        column: Int[Array, ''],
        cache: Cache,
    ) -> tuple[Float[Array, 'B 1 1 D'], tuple[KeyValue, ...]]:
        """Encode the context of the pixel right of `left`, and add it to the caches."""
        _, height, width, features = cache.gray.shape
        positions = self.positions(height, width, features)[None].astype(left.dtype)
        gray, positions = (
            jax.lax.dynamic_slice(x, (0, row, column, 0), (len(x), 1, 1, features))
            for x in (cache.gray, positions)
        )
        above = jax.lax.dynamic_slice_in_dim(cache.above, column, 1, axis=2)
        x = left + positions + gray + above
        places, pasts = jnp.concatenate([gray, above], axis=-1), []
        for layer, past, summary in zip(self.rows, cache.inner, cache.inner_summaries, strict=True):
            x, past = layer.step(x, past, column, Context(places, summary))
            pasts.append(past)
        return x, tuple(pasts)

    def summaries(self, gray: Float[Array, 'B H W D']) -> Summaries:
        return tuple(layer.summaries(gray) for layer in self.rows)
