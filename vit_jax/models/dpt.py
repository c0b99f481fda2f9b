"""DPT: a ViT with convolutions that predict depth, normals or classes of every pixel.

Ranftl et al., 2021, arXiv:2103.13413; Depth Anything, Yang et al., 2024, arXiv:2401.10891; TIPSv2.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import flax.linen as nn
import jax.numpy as jnp
import numpy as np
from jax import Array

from vit_jax.array_types import Float
from vit_jax.errors import UserError, check_choice
from vit_jax.models import base, vit
from vit_jax.models.base import check_counts
from vit_jax.models.eomt import Encoder
from vit_jax.models.vit import attention_positions, block_factory, make_norm
from vit_jax.nn.blocks import GELUS
from vit_jax.nn.dense import Enlarge
from vit_jax.nn.options import BlockFields, PoolFields, PositionFields
from vit_jax.nn.patches import patch_grid
from vit_jax.ops.resize import align_corners_matrix, linear_matrix

READOUTS = ('ignore', 'add', 'project')
DEPTH, NORMALS, CLASSES = 'depth', 'normals', 'classes'
FUSION = 'fusion'  # in `no_bias`
# The fields of the ViT.
BACKBONE = (
    *('patch_size', 'width', 'depth', 'mlp_dim', 'num_heads', 'registers', 'dropout', 'no_bias'),
    *('block', 'positions', 'remat', 'attention', 'dtype'),
)

# Uniform within 1 / sqrt(fan in), like PyTorch's layers.
_uniform = nn.initializers.variance_scaling(1 / 3, 'fan_in', 'uniform')


class Model(base.PatchModel):
    """DPT on a plain ViT. Images of any size that whole patches tile, square or not.

    Attributes:
      num_classes: Number of classes, for the output 'classes'.
      patch_size, width, depth, mlp_dim, num_heads, registers, dropout: See `vit.Model`.
      no_bias: Layers without biases, see `vit.Model`; 'fusion' for residual convolutions of maps.
      class_token: Whether the ViT has a class token.
      maps: Layer, factor and channels of each map that the head reads, in order of layers: 1 is the
        first block, the last is `depth`. The map's side is `factor` times that of the grid of
        patches, N or 1 / N. Tokens go through the final norm, if `block.final_norm` (Depth
        Anything; not in DPT).
      readout: What each patch takes from the class token: 'ignore' for nothing, 'add' for the sum,
        or 'project' for a dense layer of both.
      readout_gelu: GELU of 'project'; None for the blocks'.
      fusion_width: Channels of all maps when they are added up, from the deepest.
      output: 'depth', 'normals' or 'classes' of pixels.
      head_width: Channels before the output; 0 for a linear layer of the maps, which are then not
        enlarged to the output (TIPSv2).
      fits_image: Whether maps are enlarged to the size of the next one, and depth to the image's
        (Depth Anything), instead of twice their size; the same for patches of 16 pixels and an
        even grid.
      max_depth: Largest depth, which a sigmoid approaches; None for a ReLU.
      bins: Number, least and largest of the depths whose average is the output (AdaBins,
        arXiv:2011.14141); the least is also added to their weights. Empty for no bins.
      block, positions: See `vit.Model`; neither norms after the sums nor relative positions.
      remat, attention, dtype: See `vit.Model`.

    Raises:
      UserError: for an invalid field, or images that do not fit the patches or `pos_embed`.
    """

    num_classes: int | None = None
    patch_size: int = 14
    width: int = 384
    depth: int = 12
    mlp_dim: int = 1536
    num_heads: int = 6
    registers: int = 0
    dropout: float = 0.0
    no_bias: tuple[str, ...] = ()
    class_token: bool = True
    maps: tuple[tuple[int, float, int], ...] = (
        (3, 4, 48),
        (6, 2, 96),
        (9, 1, 192),
        (12, 0.5, 384),
    )
    readout: str = 'ignore'
    readout_gelu: str | None = None
    fusion_width: int = 64
    output: str = DEPTH
    head_width: int = 32
    fits_image: bool = True
    max_depth: float | None = None
    bins: tuple[float, ...] = ()
    block: BlockFields = BlockFields()
    positions: PositionFields = PositionFields()
    remat: bool | str = False
    attention: str = 'auto'
    dtype: str = 'float32'

    effects: ClassVar = {
        **dict.fromkeys(('maps', 'fits_image', 'readout', 'readout_gelu', 'output'), 'binding'),
        **dict.fromkeys(('max_depth', 'bins'), 'noted'),
    }
    head_layers: ClassVar[tuple[str, ...]] = ('decoder/values',)

    def __post_init__(self) -> None:
        check_counts(self, 'fusion_width')
        check_choice('readout', self.readout, READOUTS)
        self._check_maps()
        self._check_output()
        if self.readout != 'ignore' and not self.class_token:
            raise UserError(f'readout={self.readout!r} needs a class token: set class_token=True')
        if self.block.norm_place == 'post' or self.positions.kind == 'relative':
            raise UserError(
                "a DPT has no block.norm_place 'post', and no positions.kind 'relative'"
            )
        self.backbone_module()
        super().__post_init__()

    def _check_maps(self) -> None:
        if not self.maps or any(len(entry) != 3 for entry in self.maps):
            raise UserError(f'maps={self.maps}: give a layer, a factor and channels for each map')
        layers = self.hidden_layers
        if list(layers) != sorted({*layers}) or layers[0] < 1:
            raise UserError(f'maps={self.maps}: layers must be increasing numbers from 1')
        if layers[-1] != self.depth:
            raise UserError(f'maps={self.maps}: the last layer must be depth={self.depth}')
        for factor in self.factors:
            if factor <= 0 or (factor % 1 and (1 / factor) % 1):
                raise UserError(f'maps={self.maps}: factors must be N or 1 / N for whole numbers N')

    def _check_output(self) -> None:
        check_choice('output', self.output, (DEPTH, NORMALS, CLASSES))
        if self.readout_gelu is not None:
            check_choice('readout_gelu', self.readout_gelu, GELUS)
        if self.head_width < 0:
            raise UserError(f'head_width must be at least 0, not {self.head_width}')
        if self.max_depth is not None and self.max_depth <= 0:
            raise UserError(f'max_depth must be positive, not {self.max_depth}')
        if self.bins:
            count, least, largest = (*self.bins, 0, 0, 0)[:3]
            if len(self.bins) != 3 or count % 1 or count < 2 or not 0 < least < largest:
                raise UserError(
                    f'bins={self.bins}: give their number, and the least and the largest depth, '
                    'such as (256, 0.001, 10.0)'
                )

    @property
    def channels(self) -> int:
        """Number of values of a pixel before they become the output."""
        count = int(self.bins[0]) if self.bins else 1
        return {DEPTH: count, NORMALS: 3, CLASSES: self.num_classes or 0}[self.output]

    @property
    def hidden_layers(self) -> tuple[int, ...]:
        """Numbers of the layers whose tokens the head reads."""
        return tuple(layer for layer, _, _ in self.maps)

    @property
    def factors(self) -> tuple[float, ...]:
        """Side of each map in parts of the grid of patches."""
        return tuple(factor for _, factor, _ in self.maps)

    def backbone_module(self) -> Tokens:
        """Make the module of the ViT, which is not bound."""
        fields = {name: getattr(self, name) for name in BACKBONE}
        fields['no_bias'] = tuple(layer for layer in self.no_bias if layer != FUSION)
        pool = PoolFields('cls' if self.class_token else 'gap')
        return Tokens(**fields, pool=pool, hidden_layers=self.hidden_layers, parent=None)

    @property
    def class_tokens(self) -> int:
        """Number of class tokens."""
        return int(self.class_token)

    @property
    def prefix_tokens(self) -> int:
        """Number of tokens before the patches."""
        return self.class_tokens + self.registers

    @property
    def positioned_tokens(self) -> int:
        """Number of tokens before the patches that have a row of `pos_embed`."""
        return self.backbone_module().positioned_tokens

    @property
    def stride(self) -> int:
        """Side in pixels of the square of one token."""
        return self.patch_size

    @property
    def kernel_side(self) -> int:
        """Side in pixels of the patches that `patch_embed` has its kernel for."""
        return self.patch_size

    def setup(self) -> None:
        dtype = jnp.dtype(self.dtype)
        self.vit = self.backbone_module()
        nn.share_scope(self, self.vit)  # its parameters are at the top level, as in a ViT
        gelu = self.readout_gelu or self.block.gelu
        self.reassemble = [
            Reassemble(channels, factor, self.readout, gelu, dtype)
            for _, factor, channels in self.maps
        ]
        self.neck = [_conv(self.fusion_width, 3, dtype, use_bias=False) for _ in self.maps]
        self.fusion = [Fusion(FUSION not in self.no_bias, dtype) for _ in self.maps]
        activates = self.output == DEPTH
        self.decoder = Decoder(self.head_width, self.channels, activates, dtype)

    def __call__(
        self, images: Float[Array, 'B H W C'], train: bool = False
    ) -> dict[str, Float[Array, 'B h w *C']]:
        """Predict the `output` for normalized images.

        Maps have the image's size, except without `fits_image`: 16 times the rows and columns of
        patches, and half of that without `head_width`.

        Returns:
          depth: [B h w] in float32. What it measures is a matter of the task.
          normals: [B h w 3], not of length 1.
          logits: [B h w num_classes].
        """
        grid = patch_grid(images.shape[1], images.shape[2], self.patch_size)
        maps = []
        states = self.vit(images, train)
        for tokens, reassemble, conv in zip(states, self.reassemble, self.neck, strict=True):
            maps.append(conv(reassemble(tokens, grid, self.prefix_tokens)))
        maps.reverse()
        sizes = [y.shape[1:3] if self.fits_image else None for y in maps[1:]] + [None]
        x = self.fusion[0](maps[0], None, sizes[0])
        for fuse, residual, enlarged in zip(self.fusion[1:], maps[1:], sizes[1:], strict=True):
            x = fuse(x, residual, enlarged)
        size = images.shape[1:3] if self.fits_image else (2 * x.shape[1], 2 * x.shape[2])
        values = self.decoder(x, size)
        if self.output != DEPTH:
            return {'normals' if self.output == NORMALS else 'logits': values}
        return {'depth': self._depth(values)}

    def _depth(self, values: Float[Array, 'B h w K']) -> Float[Array, 'B h w']:
        if self.bins:
            count, least, largest = self.bins
            weights = nn.relu(values) + least
            depths = jnp.linspace(least, largest, int(count))
            return (weights @ depths) / weights.sum(-1)
        depth = values[..., 0]
        return nn.relu(depth) if self.max_depth is None else self.max_depth * nn.sigmoid(depth)


class Tokens(vit.Model):
    """A ViT that returns the tokens after some of its layers.

    Attributes:
      hidden_layers: Numbers of layers, 1 for the first block.

    Other attributes: see `vit.Model`.
    """

    hidden_layers: tuple[int, ...] = ()

    @nn.compact
    def __call__(  # type: ignore[override]  # other outputs
        self, images: Float[Array, 'B H W C'], train: bool = False
    ) -> list[Float[Array, 'B N D']]:
        """Compute the tokens of all layers of `hidden_layers`, after the final norm if any."""
        dtype, block = jnp.dtype(self.dtype), self.block
        grid = patch_grid(images.shape[1], images.shape[2], self.patch_size)
        next_key = functools.partial(self.make_rng, 'dropout') if train else None
        positions: Any = attention_positions(self, grid, next_key)[0]
        encoder = Encoder(
            block_factory(self, dtype),
            functools.partial(make_norm(self), block.norm_eps, dtype=dtype),
            *(self.depth, block.drop_path, self.remat, block.final_norm, dtype),
            name='encoder',
        )
        x = self._embed(images, None, train, dtype)
        states = []
        for first, last in itertools.pairwise((0, *self.hidden_layers)):
            x = encoder(x, range(first, last), train, positions)
            states.append(encoder.normed(x))
        return states


def _conv(features: int, side: int, dtype: Any, **options: Any) -> nn.Conv:
    """Make a convolution that keeps the size of maps, initialized like PyTorch's."""
    fixed: dict[str, Any] = {'padding': side // 2, 'kernel_init': _uniform, 'dtype': dtype}
    return nn.Conv(features, (side, side), **fixed, **options)


def resize(
    x: Float[Array, 'B H W C'], size: Sequence[int], matrix: Callable[[int, int], np.ndarray]
) -> Float[Array, 'B h w C']:
    """Resize maps by products with `matrix(old, new)` of rows and of columns, in float32."""
    if x.shape[1:3] == tuple(size):
        return x
    rows, columns = (matrix(old, new) for old, new in zip(x.shape[1:3], size, strict=True))
    y = x.astype(jnp.float32)
    y = jnp.einsum('ai,bijc->bajc', rows, y, precision='highest')
    return jnp.einsum('aj,bijc->biac', columns, y, precision='highest').astype(x.dtype)


class Reassemble(nn.Module):
    """Arrange the tokens of a layer as a map of `factor` times the grid (section 3.1)."""

    channels: int
    factor: float
    readout: str
    gelu: str
    dtype: Any

    @nn.compact
    def __call__(
        self, tokens: Float[Array, 'B N D'], grid: tuple[int, int], prefix: int
    ) -> Float[Array, 'B h w C']:
        x, width = tokens[:, prefix:], tokens.shape[-1]
        if self.readout == 'project':
            x = jnp.concatenate([x, jnp.broadcast_to(tokens[:, :1], x.shape)], axis=-1)
            dense = nn.Dense(width, kernel_init=_uniform, dtype=self.dtype, name='readout')
            x = GELUS[self.gelu](dense(x))
        elif self.readout == 'add':
            x = x + tokens[:, :1]
        x = x.reshape(len(x), *grid, width)
        x = _conv(self.channels, 1, self.dtype, name='projection')(x)
        if self.factor > 1:
            return Enlarge(int(self.factor), self.channels, self.dtype, name='resize')(x)
        if self.factor < 1:
            strides = round(1 / self.factor)
            return _conv(self.channels, 3, self.dtype, strides=strides, name='resize')(x)
        return x


class ResidualUnit(nn.Module):
    """x + conv2(relu(conv1(relu(x)))), convolutions of 3 x 3."""

    use_bias: bool
    dtype: Any

    @nn.compact
    def __call__(self, x: Float[Array, 'B H W C']) -> Float[Array, 'B H W C']:
        y = x
        for i in (1, 2):
            conv = _conv(x.shape[-1], 3, self.dtype, use_bias=self.use_bias, name=f'conv{i}')
            y = conv(nn.relu(y))
        return x + y


class Fusion(nn.Module):
    """Add the map of a layer to the sum of the deeper ones, and enlarge it (figure 1, right)."""

    use_bias: bool
    dtype: Any

    @nn.compact
    def __call__(
        self,
        x: Float[Array, 'B H W C'],
        residual: Float[Array, 'B _ _ C'] | None,
        size: Sequence[int] | None,
    ) -> Float[Array, 'B _ _ C']:
        """Fuse maps; `size` is twice the map's by default, the first has no `residual`."""
        if residual is not None:
            residual = resize(residual, x.shape[1:3], linear_matrix)
            x = x + ResidualUnit(self.use_bias, self.dtype, name='unit1')(residual)
        x = ResidualUnit(self.use_bias, self.dtype, name='unit2')(x)
        x = resize(x, size or (2 * x.shape[1], 2 * x.shape[2]), align_corners_matrix)
        return _conv(x.shape[-1], 1, self.dtype, name='projection')(x)


class Decoder(nn.Module):
    """Convolutions from the sum of maps to values of pixels.

    Attributes:
      width: Channels before the values; 0 for a linear layer without enlarging the map.
      channels: Values of a pixel.
      activates: Whether a ReLU comes before the linear layer.
    """

    width: int
    channels: int
    activates: bool
    dtype: Any

    @nn.compact
    def __call__(self, x: Float[Array, 'B H W C'], size: Sequence[int]) -> Float[Array, 'B h w K']:
        values = _conv(self.channels, 1, jnp.float32, name='values')
        width = x.shape[-1]
        if not self.width:
            x = _conv(width, 3, self.dtype, name='conv1')(x)
            return values(nn.relu(x) if self.activates else x)
        x = _conv(width // 2, 3, self.dtype, name='conv1')(x)
        x = resize(x, size, align_corners_matrix)
        return values(nn.relu(_conv(self.width, 3, self.dtype, name='conv2')(x)))
