"""Pooling of tokens into one vector."""

from typing import Any

import flax.linen as nn
import jax.numpy as jnp
from jaxtyping import Array, Float

from vit_jax.nn.blocks import Mlp
from vit_jax.nn.multi_head import MultiHeadAttention


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
    def __call__(self, x: Float[Array, 'B N D'], train: bool = False) -> Float[Array, 'B D']:
        batch, _, width = x.shape
        probe = self.param('probe', nn.initializers.xavier_uniform(), (1, 1, width))
        probe = jnp.broadcast_to(probe, (batch, 1, width)).astype(self.dtype)
        attention = MultiHeadAttention(
            self.num_heads, kernels=('q', 'kv'), dtype=self.dtype, name='attention'
        )
        x = attention(probe, x)
        y = nn.LayerNorm(self.norm_eps, dtype=self.dtype, name='norm')(x)
        x = x + Mlp(self.mlp_dim, gelu=self.gelu, dtype=self.dtype, name='mlp')(y, train)
        return x[:, 0]
