"""Parts of detectors on a ViT: its tokens in windows, maps from layers' tokens, and small heads.

RF-DETR, Robinson et al., 2025, arXiv:2511.09554; LW-DETR, Chen et al., 2024, arXiv:2406.03459.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import Any, NamedTuple

import flax.linen as nn
import jax.numpy as jnp
from jax import Array

from vit_jax.array_types import Float
from vit_jax.errors import UserError
from vit_jax.nn.dense import Dense, Enlarge
from vit_jax.nn.norms import FrozenNorm, LayerNorm

# Uniform within 1 / sqrt(fan in), like PyTorch's layers.
UNIFORM = nn.initializers.variance_scaling(1 / 3, 'fan_in', 'uniform')
ZEROS = nn.initializers.zeros
PRIOR = 0.01  # probability of each class at first
DECODER_EPS = 1e-5  # in norms
_EPS = 1e-6  # in the norm after the projector
_WIDE = 512  # channels; LW-DETR halves wider maps before it doubles their sides


NECK_NORMS = ('layer', 'frozen')
SCALES = (0.5, 1.0, 2.0)


@dataclasses.dataclass(frozen=True)
class NeckFields:
    """Convolutions from the maps of a ViT to those that queries read.

    Attributes:
      scales: Sides of each map that queries read, 0.5, 1 or 2 times the grid of patches; (2.0, 0.5)
        in the larger LW-DETRs.
      blocks: Pairs of convolutions.
      eps: Value added to the variance in their norms.
      norm: Their norms: 'layer', or 'frozen', factors without gradient (see `FrozenNorm`).
    """

    scales: tuple[float, ...] = (1.0,)
    blocks: int = 3
    eps: float = 1e-6
    norm: str = 'layer'


class WindowCut(NamedTuple):
    """Layout of an image's tokens in windows, each with a copy of the tokens before the patches.

    Attributes:
      grid: Rows and columns of patches.
      windows: Windows along each side.
      prefix: Tokens before the patches.
    """

    grid: tuple[int, int]
    windows: int
    prefix: int

    def cut(self, x: Float[Array, 'B N D']) -> Float[Array, 'R M D']:
        """Cut the tokens of images into windows, R = B windows^2.

        Raises:
          UserError: if the windows do not tile the grid.
        """
        rows, columns, count = *self.grid, self.windows
        if rows % count or columns % count:
            raise UserError(
                f'images of {columns} x {rows} patches cannot be cut into {count} x {count} '
                'windows: choose sides that are multiples of patch_size times windows'
            )
        shape = (len(x), count, rows // count, count, columns // count, x.shape[-1])
        patches = x[:, self.prefix :].reshape(shape).swapaxes(2, 3)
        patches = patches.reshape(len(x), count**2, -1, x.shape[-1])
        first = jnp.broadcast_to(
            x[:, None, : self.prefix], (len(x), count**2, self.prefix, x.shape[-1])
        )
        x = jnp.concatenate([first, patches], axis=2)
        return x.reshape(-1, *x.shape[2:])

    def join(self, x: Float[Array, '_ _ D']) -> Float[Array, 'B N D']:
        """Invert `cut`, also if the tokens of an image are in one row."""
        rows, columns, count = *self.grid, self.windows
        x = x.reshape(-1, count, count, self.prefix + rows * columns // count**2, x.shape[-1])
        patches = x[:, :, :, self.prefix :]
        shape = (len(x), count, count, rows // count, columns // count, x.shape[-1])
        patches = patches.reshape(shape).swapaxes(2, 3).reshape(len(x), rows * columns, -1)
        return jnp.concatenate([x[:, 0, 0, : self.prefix], patches], axis=1)


def scaled_size(grid: tuple[int, int], scale: float) -> tuple[int, int]:
    """Return the rows and columns of a map of `scale` times the sides of a grid."""
    rows, columns = (math.ceil(scale * side) for side in grid)
    return rows, columns


class Projector(nn.Module):
    """Convolutions from all maps to one, with connections past each pair of them (C2f).

    The maps get `scale` times their sides, by `rescale_0`, ... A convolution of 1 x 1, `conv1`,
    gives two parts. Pairs of 3 x 3, `block_0`, ..., continue from the second; `conv2` of 1 x 1
    reads all results. Each is followed by a norm and SiLU.
    """

    width: int
    scale: float
    neck: NeckFields
    dtype: Any

    @nn.compact
    def __call__(self, maps: list[Float[Array, 'B h w _']]) -> Float[Array, 'B H W D']:
        if self.scale != 1:
            rescale = functools.partial(Rescale, self.scale, self.neck, self.dtype)
            maps = [rescale(name=f'rescale_{i}')(x) for i, x in enumerate(maps)]
        hidden = self.width // 2
        make = functools.partial(ConvPair, neck=self.neck, dtype=self.dtype)
        outer = make((2 * hidden, self.width), 1, name='outer')
        x = outer(jnp.concatenate(maps, axis=-1), 1)
        parts = jnp.split(x, 2, axis=-1)
        for i in range(self.neck.blocks):
            block = make((hidden, hidden), 3, name=f'block_{i}')
            parts.append(block(block(parts[-1], 1), 2))
        x = outer(jnp.concatenate(parts, axis=-1), 2)
        return LayerNorm(_EPS, dtype=self.dtype, name='norm')(x)


class Rescale(nn.Module):
    """Double the sides of a map by a transposed convolution, or halve them by one of 3 x 3.

    A convolution, `conv`, of 1 x 1 for wide maps that are doubled, is followed by a norm and ReLU.
    """

    scale: float
    neck: NeckFields
    dtype: Any

    @nn.compact
    def __call__(self, x: Float[Array, 'B h w C']) -> Float[Array, 'B H W _']:
        channels = x.shape[-1]
        if self.scale < 1:
            return self._convolve(x, channels, 3, strides=2)
        if is_narrowed(channels):
            channels //= 2
            x = self._convolve(x, channels, 1)
        return Enlarge(2, channels // 2, self.dtype, name='enlarge')(x)

    def _convolve(self, x: Array, channels: int, side: int, strides: int = 1) -> Array:
        conv = _conv(channels, side, self.dtype, strides=strides, name='conv')
        norm = _norm(channels, self.neck, self.dtype, name='norm')
        return nn.relu(_normalize(norm, conv(x)))


def is_narrowed(channels: int) -> bool:
    """Return whether a map of so many channels gets half of them before its sides are doubled."""
    return channels > _WIDE


class ConvPair(nn.Module):
    """Two convolutions, `conv1` and `conv2`, each with a norm and SiLU."""

    channels: tuple[int, int]
    side: int
    neck: NeckFields
    dtype: Any

    def setup(self) -> None:
        self.conv1, self.conv2 = (_conv(count, self.side, self.dtype) for count in self.channels)
        self.norm1, self.norm2 = (_norm(count, self.neck, self.dtype) for count in self.channels)

    def __call__(self, x: Float[Array, 'B h w _'], number: int) -> Float[Array, 'B h w _']:
        """Apply the first or the second convolution."""
        conv, norm = (self.conv1, self.norm1) if number == 1 else (self.conv2, self.norm2)
        return nn.silu(_normalize(norm, conv(x)))


def _conv(channels: int, side: int, dtype: Any, **options: Any) -> nn.Conv:
    """Make a convolution without biases, zero outside of the map."""
    return nn.Conv(
        channels,
        (side, side),
        use_bias=False,
        kernel_init=UNIFORM,
        dtype=dtype,
        padding=side // 2,
        **options,
    )


def _norm(
    channels: int, neck: NeckFields, dtype: Any, name: str | None = None
) -> LayerNorm | FrozenNorm:
    if neck.norm == 'frozen':
        return FrozenNorm(channels, name=name)
    return LayerNorm(neck.eps, dtype=dtype, name=name)


def _normalize(norm: LayerNorm | FrozenNorm, x: Array) -> Array:
    if isinstance(norm, LayerNorm):
        return norm(x)
    scale, bias = norm()
    return x * scale.astype(x.dtype) + bias.astype(x.dtype)


class Layers(nn.Module):
    """Dense layers `layer_0`, `layer_1`, ... with ReLUs between them, the last in float32.

    With `zero` the output is zero at first.
    """

    widths: tuple[int, ...]
    dtype: Any = jnp.float32
    zero: bool = False

    @nn.compact
    def __call__(self, x: Float[Array, '*B _']) -> Float[Array, '*B D']:
        *inner, outputs = self.widths
        for i, width in enumerate(inner):
            x = nn.relu(Dense(width, True, self.dtype, UNIFORM, ZEROS, name=f'layer_{i}')(x))
        init = ZEROS if self.zero else UNIFORM
        return Dense(outputs, True, jnp.float32, init, ZEROS, name=f'layer_{len(inner)}')(x)


class ClassHeads(nn.Module):
    """Scores of classes: of the decoder, and of each group in the first stage.

    The first has the parameters `kernel` and `bias`, the others `group_0/kernel` and so on.
    """

    num_classes: int
    groups: int

    def setup(self) -> None:
        bias = nn.initializers.constant(-math.log((1 - PRIOR) / PRIOR))
        make = functools.partial(Dense, self.num_classes, True, jnp.float32, UNIFORM, bias)
        self.last, self.group = make(), [make() for _ in range(self.groups)]
        nn.share_scope(self, self.last)

    def __call__(self, x: Float[Array, '*B D']) -> Float[Array, '*B C']:
        """Score the queries of the decoder."""
        return self.last(x)

    def of_group(self, x: Float[Array, '*B D'], number: int) -> Float[Array, '*B C']:
        """Score the cells for a group."""
        return self.group[number](x)


class Proposals(nn.Module):
    """Features of each cell, and the change of its box, for the first stage of a group."""

    width: int
    dtype: Any

    @nn.compact
    def __call__(
        self, tokens: Float[Array, 'B N D']
    ) -> tuple[Float[Array, 'B N D'], Float[Array, 'B N 4']]:
        x = Dense(self.width, dtype=self.dtype, kernel_init=UNIFORM, name='proj')(tokens)
        x = LayerNorm(DECODER_EPS, dtype=self.dtype, name='norm')(x)
        layers = Layers((self.width, self.width, 4), self.dtype, zero=True, name='bbox_embed')
        return x, layers(x)
