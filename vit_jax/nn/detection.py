"""Parts of detectors on a ViT: its tokens in windows, one map from several, and small heads.

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
from vit_jax.nn.dense import Dense
from vit_jax.nn.norms import FrozenNorm, LayerNorm

# Uniform within 1 / sqrt(fan in), like PyTorch's layers.
UNIFORM = nn.initializers.variance_scaling(1 / 3, 'fan_in', 'uniform')
ZEROS = nn.initializers.zeros
PRIOR = 0.01  # probability of each class at first
DECODER_EPS = 1e-5  # in norms
_EPS = 1e-6  # in the norm after the projector


NECK_NORMS = ('layer', 'frozen')


@dataclasses.dataclass(frozen=True)
class NeckFields:
    """Convolutions from the maps of a ViT to one.

    Attributes:
      blocks: Pairs of convolutions.
      eps: Value added to the variance in their norms.
      norm: Their norms: 'layer', or 'frozen', factors without gradient (see `FrozenNorm`).
    """

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


class Projector(nn.Module):
    """Convolutions from all maps to one, with connections past each pair of them (C2f).

    A convolution of 1 x 1, `conv1`, gives two parts. Pairs of 3 x 3, `block_0`, ..., continue from
    the second; `conv2` of 1 x 1 reads all results. Each is followed by a norm and SiLU.
    """

    width: int
    neck: NeckFields
    dtype: Any

    @nn.compact
    def __call__(self, maps: list[Float[Array, 'B h w _']]) -> Float[Array, 'B h w D']:
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


class ConvPair(nn.Module):
    """Two convolutions, `conv1` and `conv2`, each with a norm and SiLU."""

    channels: tuple[int, int]
    side: int
    neck: NeckFields
    dtype: Any

    def setup(self) -> None:
        self.conv1, self.conv2 = (
            nn.Conv(
                *(channels, (self.side, self.side)),
                **{'use_bias': False, 'kernel_init': UNIFORM, 'dtype': self.dtype},
            )
            for channels in self.channels
        )
        self.norm1, self.norm2 = (self._norm(channels) for channels in self.channels)

    def _norm(self, channels: int) -> nn.Module:
        if self.neck.norm == 'frozen':
            return FrozenNorm(channels)
        return LayerNorm(self.neck.eps, dtype=self.dtype)

    def __call__(self, x: Float[Array, 'B h w _'], number: int) -> Float[Array, 'B h w _']:
        """Apply the first or the second convolution."""
        conv, norm = (self.conv1, self.norm1) if number == 1 else (self.conv2, self.norm2)
        x = conv(x)
        if self.neck.norm == 'layer':
            return nn.silu(norm(x))
        scale, bias = norm()
        return nn.silu(x * scale.astype(x.dtype) + bias.astype(x.dtype))


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
