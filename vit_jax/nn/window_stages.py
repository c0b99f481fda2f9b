"""Stages of a hierarchy of feature maps: blocks with windows, and the merging of patches.

Liu et al., 2021, arXiv:2103.14030, section 3.1.
"""

from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax.numpy as jnp
from jax import Array

from vit_jax.array_types import Float
from vit_jax.nn.blocks import Mlp
from vit_jax.nn.norms import LayerNorm
from vit_jax.nn.recompute import recomputed
from vit_jax.nn.stochastic import Dropout, DropPath
from vit_jax.nn.windows import WindowAttention

# The initialization of all kernels, as in the authors' code.
INIT = nn.initializers.normal(0.02)


class Stage(nn.Module):
    """Blocks with plain and shifted windows in turn, followed by `merge` except in the last stage.

    Attributes:
      block: makes a block, given whether it is shifted, and its name.
      drop_paths: rate of each block.
      merging: makes the layer that merges four neighbors into one token; None for the last stage.
      remat: recomputation in the backward pass; see `vit_jax.nn.recompute`.
      norm_eps: added to the variance in the norm of the merging.
      dtype: computation dtype.
    """

    block: Callable[..., nn.Module]
    drop_paths: tuple[float, ...]
    merging: Callable[..., nn.Module] | None
    remat: bool | str = False
    norm_eps: float = 1e-5
    dtype: Any = jnp.float32

    @nn.compact
    def __call__(self, x: Float[Array, 'B H W D'], train: bool = False) -> Float[Array, 'B h w _']:
        def apply(block: nn.Module, x: Array, rate: float) -> Array:
            return block(x, train, rate)

        apply = recomputed(apply, self.remat, static_argnums=2)
        for j, rate in enumerate(self.drop_paths):
            x = apply(self.block(shifted=is_shifted(j), name=f'block_{j}'), x, rate)
        return self.merging(self.norm_eps, self.dtype, name='merge')(x) if self.merging else x


class Block(nn.Module):
    """A pre-norm block whose attention stays in windows, equation 3 of arXiv:2103.14030.

        z' = W-MSA(LN(z)) + z, or SW-MSA if windows are shifted
        z  = MLP(LN(z')) + z'

    Each sum is preceded by dropout and, with probability `drop_path`, by dropping the whole branch.
    `attention_by` is the `attention` of `WindowAttention`.
    """

    num_heads: int
    window: int
    shifted: bool
    mlp_ratio: float = 4.0
    dropout: float = 0.0
    attention_dropout: float = 0.0
    gelu: str = 'erf'
    norm_eps: float = 1e-5
    dtype: Any = jnp.float32
    attention_by: str = 'xla'

    @nn.compact
    def __call__(
        self, x: Float[Array, 'B H W D'], train: bool = False, drop_path: float = 0.0
    ) -> Float[Array, 'B H W D']:
        def add(branch: Array) -> Array:
            return x + DropPath()(Dropout(self.dropout)(branch, train), drop_path, train)

        norm = LayerNorm(self.norm_eps, dtype=self.dtype, name='norm1')
        x = add(self._attention(WindowAttention)(norm(x), train))
        norm = LayerNorm(self.norm_eps, dtype=self.dtype, name='norm2')
        return add(self._mlp(x.shape[-1])(norm(x), train))

    def _attention(self, kind: Callable[..., nn.Module], **options: Any) -> nn.Module:
        return kind(
            self.num_heads,
            self.window,
            self.shifted,
            self.attention_dropout,
            dtype=self.dtype,
            attention=self.attention_by,
            name='attention',
            **options,
        )

    def _mlp(self, width: int) -> Mlp:
        hidden = int(self.mlp_ratio * width)
        return Mlp(hidden, self.dropout, self.gelu, self.dtype, INIT, name='mlp')


class PatchMerging(nn.Module):
    """Halve the map, [H W D] to [H/2 W/2 2D], by a norm and a linear layer on 2 x 2 neighbors.

    The neighbors are joined in the order upper left, lower left, upper right, lower right. An odd
    number of rows or columns is padded with zeros.
    """

    norm_eps: float = 1e-5
    dtype: Any = jnp.float32

    @nn.compact
    def __call__(self, x: Float[Array, 'B H W D']) -> Float[Array, 'B h w _']:
        x = LayerNorm(self.norm_eps, dtype=self.dtype, name='norm')(joined(x))
        return reduction(x.shape[-1] // 2, self.dtype)(x)


def joined(x: Float[Array, 'B H W D']) -> Float[Array, 'B h w _']:
    """The 2 x 2 neighbors of the map as one token of width 4D."""
    x = pad_to_multiple(x, 2)
    batch, height, width, features = x.shape
    x = x.reshape(batch, height // 2, 2, width // 2, 2, features)
    return x.transpose(0, 1, 3, 4, 2, 5).reshape(batch, height // 2, width // 2, 4 * features)


def reduction(features: int, dtype: Any) -> nn.Dense:
    """The linear layer of the merging."""
    return nn.Dense(features, use_bias=False, kernel_init=INIT, dtype=dtype, name='reduction')


def pad_to_multiple(x: Float[Array, 'B H W C'], multiple: int) -> Float[Array, 'B h w C']:
    """Pad with rows of zeros at the bottom and columns at the right to multiples."""
    below, right = (-side % multiple for side in x.shape[1:3])
    return jnp.pad(x, ((0, 0), (0, below), (0, right), (0, 0))) if below or right else x


def is_shifted(block: int) -> bool:
    """Whether the windows of a stage's block are shifted; those of every second block are."""
    return block % 2 == 1
