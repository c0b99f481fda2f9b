"""Pooling of tokens into one vector, or into one for each of several sequences in a row."""

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax import Array

from vit_jax.array_types import Float, Int
from vit_jax.nn.attention import Segments
from vit_jax.nn.blocks import Mlp
from vit_jax.nn.multi_head import MultiHeadAttention
from vit_jax.nn.norms import LayerNorm


def segment_mean(
    x: Float[Array, 'B N D'], segments: Int[Array, 'B N'], num_segments: int = 1
) -> Float[Array, 'B S D']:
    """Mean of the tokens of each segment, accumulated in float32.

    Args:
      x: tokens.
      segments: numbers 1 ... S of the tokens' segments; tokens with other numbers, such as 0, are
        ignored.
      num_segments: S; a segment without tokens gets zeros.
    """
    own = jax.nn.one_hot(segments - 1, num_segments, dtype=jnp.float32)
    sums = jnp.einsum('bns,bnd->bsd', own, x.astype(jnp.float32), precision='highest')
    return (sums / jnp.maximum(own.sum(axis=1), 1)[..., None]).astype(x.dtype)


class MapHead(nn.Module):
    """Multi-head attention pooling: a learned probe attends to all tokens, then an MLP refines it.

    Zhai et al., 2021, arXiv:2106.04560. Parameters `probe` [1 1 D], `attention`, `norm` and `mlp`.
    """

    num_heads: int
    mlp_dim: int
    gelu: str = 'tanh'
    norm_eps: float = 1e-6
    dtype: Any = jnp.float32

    @nn.compact
    def __call__(
        self,
        x: Float[Array, 'B N D'],
        train: bool = False,
        segments: Int[Array, 'B N'] | None = None,
        num_segments: int = 1,
    ) -> Float[Array, 'B D'] | Float[Array, 'B S D']:
        """One vector for each row; with `segments` one for each of 1 ... S, as in `segment_mean`.

        The vector of a segment without tokens is that of uniform attention to all tokens.
        """
        batch, _, width = x.shape
        probe = self.param('probe', nn.initializers.xavier_uniform(), (1, 1, width))
        probe = jnp.broadcast_to(probe, (batch, num_segments, width)).astype(self.dtype)
        attention = MultiHeadAttention(
            self.num_heads, kernels=('q', 'kv'), dtype=self.dtype, name='attention'
        )
        own = None
        if segments is not None:
            numbers = jnp.arange(1, num_segments + 1, dtype=segments.dtype)
            own = Segments(jnp.broadcast_to(numbers, (batch, num_segments)), segments)
        x = attention(probe, x, segments=own)
        y = LayerNorm(self.norm_eps, dtype=self.dtype, name='norm')(x)
        x = x + Mlp(self.mlp_dim, gelu=self.gelu, dtype=self.dtype, name='mlp')(y, train)
        return x[:, 0] if segments is None else x
