"""JiT: a plain ViT on the pixels of noisy images, which learns to generate.

Li and He, 2025, "Back to Basics: Let Denoising Generative Models Denoise", arXiv:2511.13720.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import re
from collections.abc import Mapping
from typing import Any, ClassVar

import flax.linen as nn
import jax.numpy as jnp
import numpy as np
from jax import Array

from vit_jax.array_types import Float, Float32, Int
from vit_jax.errors import UserError, check_choice
from vit_jax.models._generator import (
    Generator,
    GeneratorBlockFields,
    GeneratorInputs,
    among_patches,
)
from vit_jax.models.base import check_fields
from vit_jax.nn.attention import recompute_in_backward
from vit_jax.nn.blocks import SwiGlu
from vit_jax.nn.maps import AttentionMap, collect
from vit_jax.nn.multi_head import MultiHeadAttention
from vit_jax.nn.norms import RMSNorm
from vit_jax.nn.patches import patch_grid
from vit_jax.nn.positions import sincos2d
from vit_jax.nn.rotary import Layout, Rotary, rope
from vit_jax.nn.stochastic import Dropout

# name: width, depth, mlp_dim, num_heads, bottleneck, context_start (table 9)
VARIANTS = {
    'mu': (32, 2, 84, 2, 8, 1),
    'B': (768, 12, 2048, 12, 128, 4),
    'L': (1024, 24, 2730, 16, 128, 8),
    'H': (1280, 32, 3413, 16, 256, 10),
}
FREQUENCIES = 256  # features of a time before the MLP
MAX_PERIOD = 10_000.0

_normal = nn.initializers.normal(0.02)
_zeros = nn.initializers.zeros


def variant(name: str) -> dict[str, int]:
    """Look up keywords of `Model` for a name such as 'B/16': a shape of VARIANTS and a patch size.

    Raises:
      UserError: if there is no such shape, or the patch size is not a positive number.
    """
    shape, slash, patch = name.partition('/')
    check_choice('JiT variant', shape, VARIANTS)
    if not slash or not re.fullmatch('[1-9][0-9]*', patch):
        raise UserError(f'JiT variant {name!r} needs a patch size, for example {shape}/16')
    fields = ('width', 'depth', 'mlp_dim', 'num_heads', 'bottleneck', 'context_start')
    return {'patch_size': int(patch), **dict(zip(fields, VARIANTS[shape], strict=True))}


@dataclasses.dataclass(frozen=True)
class JitBlockFields(GeneratorBlockFields):
    """Blocks modulated by time and class.

    Attributes:
      attention_dropout: Dropout rate of the attention weights, in the middle half of blocks.
    """

    attention_dropout: float = 0.0


class Model(Generator):
    """A ViT whose blocks are modulated by time and class. Images that whole patches tile.

    Attributes:
      block: Options of the blocks, see `JitBlockFields`.
      context_tokens: Number of tokens of the class before the patches.
      context_start: Number of blocks before the first with these tokens.
      dropout: Dropout rate after attention and inside of the SwiGLU, in the middle half of blocks.

    Raises:
      UserError: for an invalid field, or images that do not fit the patches.
    """

    block: JitBlockFields = JitBlockFields()
    context_tokens: int = 32
    context_start: int = 4
    dropout: float = 0.0

    effects: ClassVar = {'context_start': 'binding'}
    head_layers = ('final',)
    patch_bias = False

    def __post_init__(self) -> None:
        check_fields(self, 'dropout', 'block.attention_dropout')
        if self.context_tokens < 0 or not 0 <= self.context_start < self.depth:
            raise UserError(
                f'context_tokens={self.context_tokens}, context_start={self.context_start}: must '
                f'be at least 0, and the start below depth={self.depth}'
            )
        super().__post_init__()

    def predict_patches(self, inputs: GeneratorInputs) -> dict[str, Float[Array, 'B N P']]:
        """Predict one image; conditions are embedded like the time."""
        label, grid = self._embed_labels(inputs.labels), inputs.grid
        condition = TimeEmbed(self.width, name='time_embed')(inputs.time) + label
        for i, number in enumerate([] if inputs.conditions is None else inputs.conditions.T):
            condition += TimeEmbed(self.width, name=f'condition_embed_{i}')(number)
        condition = nn.silu(condition)
        residual = self.block.residual_dtype or jnp.dtype(self.dtype)
        table = sincos2d(*grid, self.width, endpoint=False)
        x = inputs.tokens.astype(residual) + table.astype(residual)
        x = self._encode(x, condition, label, grid, inputs.train)
        x = RMSNorm(self.block.norm_eps, name='norm')(x.astype(jnp.float32))
        shift, scale = _modulations(condition, 2, self.width, jnp.float32, 'final_modulation')
        layer = nn.Dense(inputs.values, kernel_init=_zeros, name='final')
        return {'image': layer(x * (1 + scale) + shift)}

    def attention_maps(
        self, intermediates: Mapping[str, Any], images: Float[Array, 'B H W C'], *_: Any
    ) -> list[AttentionMap]:
        """Collect attention among patches, `encoder/block_i`, and of the class to patches.

        In blocks with tokens of the class, the weights of a patch are divided by their sum over
        patches, so that all blocks have maps of one size. `context/block_i/cross` has a query for
        each token of the class; its keys are these tokens and then the patches.
        """
        grid = patch_grid(images.shape[1], images.shape[2], self.patch_size)
        maps, context = collect({'encoder': intermediates}, 'encoder', grid, grid), []
        for name, weights, *_grids in maps:
            array = jnp.asarray(weights)
            if first := array.shape[-1] - math.prod(grid):
                name = f'{name.replace("encoder", "context")}/cross'
                context.append(AttentionMap(name, array[:, :, :first], (first,), grid))
        return [*context, *among_patches(maps, grid)]

    def layer_order(self) -> tuple[str, ...]:
        """List patterns of the layers' parameters from the image on, in order."""
        first = '^(patch_embed|embed|time_embed|condition_embed_.*|class_embed|context_embed)(/|$)'
        return first, *(f'^block_{i}/' for i in range(self.depth))

    def _embed_labels(self, labels: Int[Array, ' B']) -> Float[Array, 'B D']:
        """Embed classes; the last row of the table is for no class."""
        classes = self.num_classes or 0
        table = self.param('class_embed', _normal, (classes + 1, self.width))
        return table[jnp.where(labels < 0, classes, labels)]

    def _encode(
        self, x: Array, condition: Array, label: Array, grid: tuple[int, int], train: bool
    ) -> Float[Array, 'B N D']:
        """Apply all blocks to the patches' tokens."""

        def apply(block: nn.Module, x: Array, condition: Array, positions: Rotary) -> Array:
            return block(x, condition, positions, train)

        apply = recompute_in_backward(apply, self.remat)
        size = self.width // self.num_heads
        positions = rope(Layout(grid), size)
        for i in range(self.depth):
            if i == self.context_start and self.context_tokens:
                shape = (1, self.context_tokens, self.width)
                context = label[:, None] + self.param('context_embed', _normal, shape)
                x = jnp.concatenate([context.astype(x.dtype), x], axis=1)
                positions = rope(Layout(grid, first=self.context_tokens), size)
            x = apply(self._block(i), x, condition, positions)
        return x[:, self.context_tokens :]

    def _block(self, number: int) -> ModulatedBlock:
        drops = in_the_middle(number, self.depth)
        return ModulatedBlock(
            self.num_heads,
            self.mlp_dim,
            self.dropout if drops else 0.0,
            self.block.attention_dropout if drops else 0.0,
            self.block.norm_eps,
            jnp.dtype(self.dtype),
            self.attention,
            name=f'block_{number}',
        )


def in_the_middle(number: int, depth: int) -> bool:
    """Return whether a block is in the second or third quarter of all, each rounded down."""
    return depth // 4 <= number < 3 * (depth // 4)


class ModulatedBlock(nn.Module):
    """A pre-norm block modulated by a condition: adaLN-Zero (DiT, arXiv:2212.09748, section 3.2).

    Each branch f becomes x + gate * f(norm(x) * (1 + scale) + shift). The layer of shift, scale and
    gate starts at zero, so that the block starts as the identity.
    """

    num_heads: int
    mlp_dim: int
    dropout: float
    attention_dropout: float
    norm_eps: float
    dtype: Any
    attention_by: str

    @nn.compact
    def __call__(
        self,
        x: Float[Array, 'B N D'],
        condition: Float[Array, 'B D'],
        positions: Rotary,
        train: bool,
    ) -> Float[Array, 'B N D']:
        norm = functools.partial(RMSNorm, self.norm_eps, dtype=self.dtype)
        modulations = _modulations(condition, 6, x.shape[-1], self.dtype, 'modulation')
        shift1, scale1, gate1, shift2, scale2, gate2 = modulations
        y = MultiHeadAttention(
            self.num_heads,
            dropout=self.attention_dropout,
            dtype=self.dtype,
            attention=self.attention_by,
            qk_norm=functools.partial(RMSNorm, self.norm_eps),
            name='attention',
        )(norm(name='norm1')(x) * (1 + scale1) + shift1, rotary=positions, train=train)
        x = x + gate1 * Dropout(self.dropout)(y, train)
        mlp = SwiGlu(self.mlp_dim, self.dropout, dtype=self.dtype, name='mlp')
        return x + gate2 * mlp(norm(name='norm2')(x) * (1 + scale2) + shift2, train)


class TimeEmbed(nn.Module):
    """Sines and cosines of a time in [0, 1] through an MLP, in float32 (DiT)."""

    width: int

    @nn.compact
    def __call__(self, time: Float[Array, ' B']) -> Float[Array, 'B D']:
        y = nn.Dense(self.width, kernel_init=_normal, name='fc1')(time_features(time))
        return nn.Dense(self.width, kernel_init=_normal, name='fc2')(nn.silu(y))


def time_features(time: Float[Array, ' B']) -> Float32[Array, 'B F']:
    """Compute cosines and then sines of t at frequencies from 1 to nearly 1 / MAX_PERIOD."""
    half = FREQUENCIES // 2
    frequencies = (MAX_PERIOD ** -(np.arange(half) / half)).astype(np.float32)
    angles = time.astype(jnp.float32)[:, None] * frequencies
    return jnp.concatenate([jnp.cos(angles), jnp.sin(angles)], axis=-1)


def _modulations(
    condition: Array, count: int, width: int, dtype: Any, name: str
) -> list[Float[Array, 'B 1 D']]:
    """Compute shifts, scales and gates of all tokens by a layer that starts at zero."""
    layer = nn.Dense(count * width, dtype=dtype, kernel_init=_zeros, name=name)
    return jnp.split(layer(condition)[:, None], count, axis=-1)
