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

from vit_jax.array_types import Float, Int, Key
from vit_jax.errors import UserError, check_choice, check_multiple
from vit_jax.models import base, jit
from vit_jax.models.base import Size, check_counts, check_fields
from vit_jax.nn.attention import recomputed
from vit_jax.nn.blocks import SwiGlu
from vit_jax.nn.dense import Dense
from vit_jax.nn.maps import AttentionMap, ParameterPictures, collect, embedding_filters
from vit_jax.nn.multi_head import MultiHeadAttention
from vit_jax.nn.norms import RMSNorm
from vit_jax.nn.patches import PatchEmbed, patch_grid, unpatchify
from vit_jax.nn.rotary import Layout, Rotary, rope
from vit_jax.nn.stochastic import example_keys

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


class Model(base.Model):
    """A ViT with tokens of class, guidance and span before the patches, and two heads.

    The time itself is not an input, only the span (arXiv:2502.13129).

    Attributes:
      num_classes: Number of classes; None or 0 for generation without classes.
      patch_size: Side of a patch in pixels.
      width: D, token width.
      depth: Number of blocks from the pixels to a prediction.
      head_depth: Number of these blocks that belong to one of the two heads.
      mlp_dim: Hidden width of SwiGLU.
      num_heads: Number of attention heads; divides width.
      bottleneck: Width between the two linear layers that embed a patch.
      class_tokens, guidance_tokens, interval_tokens, span_tokens: Numbers of tokens of the class,
        of the guidance, of each end of its interval, and of the span.
      norm_eps: Number added to the mean square in RMS norms.
      remat: Recomputation in the backward pass; see the model `vit`.
      attention: Implementation; see the model `vit`. Training needs 'xla', since the other kernels
        have no forward mode.
      dtype: Computation dtype. Parameters, conditions, norms' statistics, softmax and the last
        layers stay float32.
      residual_dtype: Dtype of the residual stream; the computation's if None.

    Raises:
      UserError: if a field has no such value, or images do not fit the patches.
    """

    num_classes: int | None = None
    patch_size: int = 16
    width: int = 768
    depth: int = 16
    head_depth: int = 8
    mlp_dim: int = 2048
    num_heads: int = 12
    bottleneck: int = 128
    class_tokens: int = 8
    guidance_tokens: int = 4
    interval_tokens: int = 2
    span_tokens: int = 4
    norm_eps: float = 1e-6
    remat: bool | str = False
    attention: str = 'xla'
    dtype: str = 'float32'
    residual_dtype: str | None = None

    head_layers = ('final', 'instant_final')

    def __post_init__(self) -> None:
        check_fields(self, 'attention', 'dtype', 'residual_dtype', 'remat')
        check_counts(self, 'bottleneck', 'depth', 'class_tokens', 'guidance_tokens')
        check_counts(self, 'interval_tokens', 'span_tokens')
        check_multiple('width', self.width, 'num_heads', self.num_heads)
        if not 0 <= self.head_depth <= self.depth:
            raise UserError(f'head_depth={self.head_depth}: must be from 0 to depth={self.depth}')
        super().__post_init__()

    @nn.compact
    def __call__(
        self,
        images: Float[Array, 'B H W C'],
        time: Float[Array, ' B'],
        labels: Int[Array, ' B'],
        given: Float[Array, 'B H W c'] | None = None,
        conditions: Float[Array, 'B 4'] | None = None,
        train: bool = False,
    ) -> dict[str, Float[Array, 'B H W C']]:
        """Predict images from noisy ones: at the end of the average velocity, and of the instant.

        Args:
          images: Z = t x + (1 - t) e.
          time: T; not an input of the layers.
          labels: Classes; -1 for none.
          given: Further channels of the input, which are not predicted; None for none.
          conditions: Span, 1 - 1/w of the guidance w, and the noise levels between which it acts;
            None for a span of 0 without guidance.
          train: No effect: there is no dropout.

        Returns:
          image, instant: Predictions of the two heads, float32.
        """
        del time, train
        _, height, width, channels = images.shape
        grid, dtype = patch_grid(height, width, self.patch_size), jnp.dtype(self.dtype)
        pixels = images if given is None else jnp.concatenate([images, given], axis=-1)
        x = PatchEmbed(self.patch_size, self.bottleneck, dtype, name='patch_embed')(pixels)
        x = Dense(self.width, dtype=dtype, name='embed')(x)
        x = jnp.concatenate([self._condition_tokens(labels, conditions).astype(x.dtype), x], axis=1)
        posemb = self.param('posemb', nn.initializers.normal(0.02), (1, *x.shape[1:]))
        x = (x + posemb).astype(self.residual_dtype or dtype)
        prefix, size = x.shape[1] - math.prod(grid), self.width // self.num_heads
        positions = rope(Layout(grid, first=prefix), size)
        shared = self.depth - self.head_depth
        x = self._encode(x, positions, [f'block_{i}' for i in range(shared)])
        outputs = {}
        for output, head in (('image', ''), ('instant', 'instant_')):
            names = [f'{head}block_{i}' for i in range(shared, self.depth)]
            y = self._encode(x, positions, names)[:, prefix:].astype(jnp.float32)
            y = RMSNorm(self.norm_eps, name=f'{head}norm')(y)
            values = self.patch_size**2 * channels
            y = nn.Dense(values, kernel_init=_zeros, name=f'{head}final')(y)
            outputs[output] = unpatchify(y, grid, self.patch_size)
        return outputs

    def example_keys(self, rows: int) -> Key[Array, ' B']:
        """Return a key for each row from the random stream 'noise'."""
        return example_keys(self.make_rng('noise'), rows)

    def attention_maps(
        self, intermediates: Mapping[str, Any], images: Float[Array, 'B H W C'], *_: Any
    ) -> list[AttentionMap]:
        """Return attention among patches in the blocks that lead to the average velocity.

        The weights of a patch are divided by their sum over patches.
        """
        grid = patch_grid(images.shape[1], images.shape[2], self.patch_size)
        maps = []
        for name, weights, *_grids in collect({'encoder': intermediates}, 'encoder', grid, grid):
            among = jnp.asarray(weights)[..., -math.prod(grid) :, -math.prod(grid) :]
            maps.append(AttentionMap(name, among / among.sum(-1, keepdims=True), grid, grid))
        return maps

    def parameter_pictures(
        self, params: Mapping[str, Any], image_size: Size | None
    ) -> list[ParameterPictures]:
        """Return the filters that embed patches."""
        del image_size
        return embedding_filters(params)

    def layer_order(self) -> tuple[str, ...]:
        """Return patterns of the layers' parameters from the image on; the last layer is last."""
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

        apply = recomputed(apply, self.remat)
        for name in names:
            block = Block(
                self.num_heads,
                self.mlp_dim,
                self.norm_eps,
                jnp.dtype(self.dtype),
                self.attention,
                name=name,
            )
            x = apply(block, x, positions)
        return x


class Block(nn.Module):
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
