"""Embeddings of tokens, and the scores of tokens at the output."""

from typing import Any

import flax.linen as nn
import jax.numpy as jnp
from jax import Array

from vit_jax.array_types import Float, Int


class Embeddings(nn.Module):
    """Vectors of the source's and the target's tokens, and the matrix before the softmax.

    Tied, they are one matrix, Press and Wolf, 2017, arXiv:1608.05859: parameter `shared` [V D].
    Otherwise three: `source`, `target` and `output`. Entries start with variance 1 / D.
    """

    vocab_size: int
    width: int
    tied: bool = True
    dtype: Any = jnp.float32

    def setup(self) -> None:
        def table(name: str) -> Array:
            init = nn.initializers.normal(self.width**-0.5)
            return self.param(name, init, (self.vocab_size, self.width))

        names = ('shared',) if self.tied else ('source', 'target', 'output')
        tables = [table(name) for name in names]
        self.tables = tables * 3 if self.tied else tables

    def source(self, tokens: Int[Array, '*B']) -> Float[Array, '*B D']:
        """The vectors of tokens of the source."""
        return jnp.take(self.tables[0], tokens, axis=0).astype(self.dtype)

    def target(self, tokens: Int[Array, '*B']) -> Float[Array, '*B D']:
        """The vectors of tokens of the target."""
        return jnp.take(self.tables[1], tokens, axis=0).astype(self.dtype)

    def logits(self, x: Float[Array, '*B D']) -> Float[Array, '*B V']:
        """The scores of the next token, in float32."""
        table = self.tables[2].astype(self.dtype)
        return jnp.einsum(
            '...d,vd->...v', x.astype(self.dtype), table, preferred_element_type=jnp.float32
        )
