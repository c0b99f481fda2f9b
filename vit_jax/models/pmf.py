"""pMF: a plain ViT on pixels that predicts average velocities, conditioned by tokens.

Lu et al., 2026, "One-step Latent-free Image Generation with Pixel Mean Flows", arXiv:2601.22158;
conditions in context and two heads of iMF, arXiv:2512.02012, section 4.3.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping
from typing import Any

import flax.linen as nn
import jax.numpy as jnp
from jax import Array

from vit_jax.array_types import Float, Int
from vit_jax.errors import UserError, check_choice
from vit_jax.models import jit
from vit_jax.models._generator import Generator, GeneratorInputs, among_patches
from vit_jax.models.base import check_counts
from vit_jax.nn.attention import recompute_in_backward
from vit_jax.nn.blocks import SwiGlu
from vit_jax.nn.maps import AttentionMap, collect
from vit_jax.nn.multi_head import MultiHeadAttention
from vit_jax.nn.norms import RMSNorm
from vit_jax.nn.patches import patch_grid
from vit_jax.nn.rotary import Layout, Rotary, rope

# name: width, depth, mlp_dim, num_heads, bottleneck, head_depth
VARIANTS = {
    'mu': (32, 2, 84, 2, 8, 1),
    'B': (768, 16, 2048, 12, 128, 8),
    'L': (1024, 32, 2730, 16, 128, 8),
    'H': (1280, 48, 3413, 16, 256, 8),
}

_zeros = nn.initializers.zeros


def variant(name: str) -> dict[str, int]:
    """Return the fields of `Model` for a name such as 'B/16': a shape and a patch size.

    Raises:
      UserError: if there is no such shape, or the patch size is not a positive number.
    """
    shape, slash, patch = name.partition('/')
    check_choice('pMF variant', shape, VARIANTS)
    if not slash or not patch.isdigit() or not int(patch):
        raise UserError(f'pMF variant {name!r} needs a patch size, for example {shape}/16')
    fields = ('width', 'depth', 'mlp_dim', 'num_heads', 'bottleneck', 'head_depth')
    return {'patch_size': int(patch), **dict(zip(fields, VARIANTS[shape], strict=True))}


class Model(Generator):
    """A ViT with tokens of class, guidance and span before the patches, and two heads.

    The time itself is not an input, only the span (arXiv:2502.13129). The conditions are the span,
    1 - 1/w of the guidance w, and the noise levels between which it acts; None for a span of 0
    without guidance. Besides `image`, the end of the average velocity, the output `instant` is that
    of the velocity at t.

    Attributes:
      depth: Number of blocks from the pixels to a prediction.
      head_depth: Number of these blocks that belong to one of the two heads.
      class_tokens, guidance_tokens, interval_tokens, span_tokens: Numbers of tokens of the class,
        of the guidance, of each end of its interval, and of the span.
      attention: Implementation; see the model `vit`. Training needs 'xla', since the other kernels
        have no forward mode.

    Raises:
      UserError: for an invalid field, or images that do not fit the patches.
    """

    depth: int = 16
    head_depth: int = 8
    class_tokens: int = 8
    guidance_tokens: int = 4
    interval_tokens: int = 2
    span_tokens: int = 4
    attention: str = 'xla'

    head_layers = ('final', 'instant_final')
    patch_bias = True

    def __post_init__(self) -> None:
        check_counts(self, 'class_tokens', 'guidance_tokens', 'interval_tokens', 'span_tokens')
        if not 0 <= self.head_depth <= self.depth:
            raise UserError(f'head_depth={self.head_depth}: must be from 0 to depth={self.depth}')
        super().__post_init__()

    def predict_patches(self, inputs: GeneratorInputs) -> dict[str, Float[Array, 'B N P']]:
        """Predict images at the end of the average velocity, and of the instant."""
        x = inputs.tokens
        tokens = self._condition_tokens(inputs.labels, inputs.conditions).astype(x.dtype)
        x = jnp.concatenate([tokens, x], axis=1)
        posemb = self.param('posemb', nn.initializers.normal(0.02), (1, *x.shape[1:]))
        x = (x + posemb).astype(self.block.residual_dtype or jnp.dtype(self.dtype))
        prefix, size = tokens.shape[1], self.width // self.num_heads
        positions = rope(Layout(inputs.grid, first=prefix), size)
        shared = self.depth - self.head_depth
        x = self._encode(x, positions, [f'block_{i}' for i in range(shared)])
        patches = {}
        for output, head in (('image', ''), ('instant', 'instant_')):
            names = [f'{head}block_{i}' for i in range(shared, self.depth)]
            y = self._encode(x, positions, names)[:, prefix:].astype(jnp.float32)
            y = RMSNorm(self.block.norm_eps, name=f'{head}norm')(y)
            layer = nn.Dense(inputs.values, kernel_init=_zeros, name=f'{head}final')
            patches[output] = layer(y)
        return patches

    def attention_maps(
        self, intermediates: Mapping[str, Any], images: Float[Array, 'B H W C'], *_: Any
    ) -> list[AttentionMap]:
        """Collect attention among patches in the blocks that lead to the average velocity.

        The weights of a patch are divided by their sum over patches.
        """
        grid = patch_grid(images.shape[1], images.shape[2], self.patch_size)
        return among_patches(collect({'encoder': intermediates}, 'encoder', grid, grid), grid)

    def layer_order(self) -> tuple[str, ...]:
        """List patterns of the layers' parameters from the image on, in order."""
        first = '^(patch_embed|embed|posemb|class_embed|.*_embed|.*_tokens)(/|$)'
        blocks = (f'^(instant_)?block_{i}/' for i in range(self.depth))
        return first, *blocks

    def _condition_tokens(
        self, labels: Int[Array, ' B'], conditions: Float[Array, 'B 4'] | None
    ) -> Float[Array, 'B n D']:
        """Embed the class and each condition, and add the embedding to learned tokens."""
        normal = nn.initializers.normal(1 / math.sqrt(self.width))
        if conditions is None:
            conditions = jnp.tile(jnp.array([0.0, 0.0, 0.0, 1.0]), (len(labels), 1))
        span, guidance, low, high = conditions.T
        classes = self.num_classes or 0
        table = self.param('class_embed', normal, (classes + 1, self.width))
        embeddings = {'class': table[jnp.where(labels < 0, classes, labels)]}
        numbers = {'guidance': guidance, 'low': low, 'high': high, 'span': span}
        for name, x in numbers.items():
            embeddings[name] = jit.TimeEmbed(self.width, name=f'{name}_embed')(x)
        ends = dict.fromkeys(('low', 'high'), self.interval_tokens)
        counts = {'class': self.class_tokens, 'guidance': self.guidance_tokens, **ends}
        counts['span'] = self.span_tokens
        return jnp.concatenate(
            [
                self.param(f'{name}_tokens', normal, (1, count, self.width))
                + embeddings[name][:, None]
                for name, count in counts.items()
            ],
            axis=1,
        )

    def _encode(self, x: Array, positions: Rotary, names: list[str]) -> Float[Array, 'B N D']:
        """Apply the blocks with these names."""

        def apply(block: nn.Module, x: Array, positions: Rotary) -> Array:
            return block(x, positions)

        apply = recompute_in_backward(apply, self.remat)
        for name in names:
            block = GatedBlock(
                self.num_heads,
                self.mlp_dim,
                self.block.norm_eps,
                jnp.dtype(self.dtype),
                self.attention,
                name=name,
            )
            x = apply(block, x, positions)
        return x


class GatedBlock(nn.Module):
    """A pre-norm block without biases whose branches have learned gates that start at zero."""

    num_heads: int
    mlp_dim: int
    norm_eps: float
    dtype: Any
    attention_by: str

    @nn.compact
    def __call__(self, x: Float[Array, 'B N D'], positions: Rotary) -> Float[Array, 'B N D']:
        norm = functools.partial(RMSNorm, self.norm_eps, dtype=self.dtype)
        y = MultiHeadAttention(
            self.num_heads,
            dtype=self.dtype,
            attention=self.attention_by,
            no_bias=('query', 'key', 'value', 'out'),
            qk_norm=functools.partial(RMSNorm, self.norm_eps),
            name='attention',
        )(norm(name='norm1')(x), rotary=positions)
        x = x + self._gate('gate1', y)
        mlp = SwiGlu(self.mlp_dim, dtype=self.dtype, use_bias=False, name='mlp')
        return x + self._gate('gate2', mlp(norm(name='norm2')(x)))

    def _gate(self, name: str, y: Array) -> Array:
        return y * self.param(name, _zeros, y.shape[-1:]).astype(y.dtype)
