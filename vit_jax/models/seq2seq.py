"""Encoder-decoder Transformer of Vaswani et al., 2017, arXiv:1706.03762.

Tokens are integers; 0 is padding, which is masked in the source. The decoder reads the target
shifted right, so that its output at t is the score of token t given the earlier ones.
"""

import functools
import math
from collections.abc import Mapping
from typing import Any, ClassVar

import jax.numpy as jnp
from jax import Array

from vit_jax.array_types import Float, Int
from vit_jax.errors import check_choice, check_multiple
from vit_jax.models import base
from vit_jax.models.base import check_counts, check_fields
from vit_jax.nn.attention import padding_mask
from vit_jax.nn.encoder_decoder import (
    ACTIVATIONS,
    NORMS,
    Cache,
    DecoderBlock,
    Embeddings,
    EncoderBlock,
    Memory,
    Stack,
)
from vit_jax.nn.maps import AttentionMap, collect
from vit_jax.nn.positions import LAYOUTS, sincos1d
from vit_jax.nn.stochastic import Dropout

# name: width, depth, mlp_dim, num_heads, dropout; base and big are from table 3.
VARIANTS = {
    'tiny': (128, 4, 256, 4, 0.1),
    'base': (512, 6, 2048, 8, 0.1),
    'big': (1024, 6, 4096, 16, 0.3),
}


def variant(name: str) -> dict[str, int | float]:
    """Look up keywords of `Model` for a name of VARIANTS.

    Raises:
      UserError: if there is no such variant.
    """
    check_choice('seq2seq variant', name, VARIANTS)
    fields = ('width', 'depth', 'mlp_dim', 'num_heads', 'dropout')
    return dict(zip(fields, VARIANTS[name], strict=True))


class Model(base.EncoderDecoder):
    """Transformer from one sequence of tokens to another.

    Besides the call it has methods for decoding step by step, `encode`, `init_cache` and
    `decode_step`, called as `model.apply(variables, ..., method='encode')`.

    Attributes:
      vocab_size: V, number of ids of source and target together.
      width: D, token width.
      depth: N, blocks of the encoder and blocks of the decoder.
      num_heads: Attention heads; divides width.
      mlp_dim: Hidden width of the feed-forward layers.
      norm: 'post', as in the paper, or 'pre', which has a final layer norm after both stacks.
      positions: 'interleaved' sines and cosines, as in the paper, or 'concatenated' ones.
      dropout: Dropout rate of the sums of embedding and position, and of each branch.
      attention_dropout: Dropout rate of the attention weights.
      activation: Activation of the feed-forward layers: 'relu', 'gelu' (exact) or 'swish'.
      tied: Whether both embeddings and the scores share one matrix, as in section 3.4.
      norm_eps: Value added to the variance in layer norms.
      dtype: Computation dtype. Parameters, layer norm statistics, softmax and logits stay float32.
      attention: Implementation: 'xla', 'pallas', 'cudnn' or 'auto'; see the model `vit`.

    Raises:
      UserError: for an invalid field.
    """

    vocab_size: int
    width: int = 512
    depth: int = 6
    num_heads: int = 8
    mlp_dim: int = 2048
    norm: str = 'post'
    positions: str = 'interleaved'
    dropout: float = 0.1
    attention_dropout: float = 0.0
    activation: str = 'relu'
    tied: bool = True
    norm_eps: float = 1e-6
    dtype: str = 'float32'
    attention: str = 'auto'

    effects: ClassVar = {'activation': 'binding'}
    mup_kinds = (
        ('^embed/(source|target)$', 'embedding'),
        ('^embed/output$', 'output'),
        ('^embed/shared$', 'tied'),
    )

    def __post_init__(self) -> None:
        check_choice('norm', self.norm, NORMS)
        check_choice('positions', self.positions, LAYOUTS)
        check_choice('activation', self.activation, ACTIVATIONS)
        check_fields(self, 'dtype', 'attention', 'dropout', 'attention_dropout')
        check_counts(self, 'depth')
        check_multiple('width', self.width, 'num_heads', self.num_heads)
        super().__post_init__()

    def setup(self) -> None:
        dtype = jnp.dtype(self.dtype)
        fields: dict[str, Any] = dict(
            num_heads=self.num_heads,
            mlp_dim=self.mlp_dim,
            norm=self.norm,
            dropout=self.dropout,
            attention_dropout=self.attention_dropout,
            activation=self.activation,
            norm_eps=self.norm_eps,
            dtype=dtype,
            attention_by=self.attention,
        )
        self.embed = Embeddings(self.vocab_size, self.width, self.tied, dtype)
        self.encoder = Stack(functools.partial(EncoderBlock, **fields), self.depth)
        self.decoder = Stack(functools.partial(DecoderBlock, **fields, causal=True), self.depth)
        self.drop = Dropout(self.dropout)

    def layer_order(self) -> tuple[str, ...]:
        """List patterns of the layers' parameters: embeddings, the encoder's blocks, the decoder's.

        The encoder's final norm goes with its last block.
        """
        last = self.depth - 1
        return (
            '^embed/(shared|source|target)$',
            *(f'^encoder/block_{i}/' for i in range(last)),
            f'^encoder/(block_{last}|norm)/',
            *(f'^decoder/block_{i}/' for i in range(self.depth)),
        )

    def encode(self, source: Int[Array, 'B S'], train: bool = False) -> Memory:
        """Encode the source for the decoder."""
        mask = padding_mask(source)
        x = self._add_positions(self.embed.source(source), self._position_table(source.shape[1]))
        return Memory(self.encoder(self.drop(x, train), mask, train), mask)

    def decode(
        self, memory: Memory, target_in: Int[Array, 'B T'], train: bool = False
    ) -> Float[Array, 'B T V']:
        """Score every next token, given the true ones before it."""
        tokens = target_in.shape[1]
        x = self._add_positions(self.embed.target(target_in), self._position_table(tokens))
        x = self.decoder(self.drop(x, train), memory, train)
        return self.embed.logits(x)

    def init_cache(self, memory: Memory, max_len: int) -> Cache:
        """Make the decoder's state before its first step, with room for `max_len` tokens."""
        return self.decoder.start(memory, max_len)

    def decode_step(
        self, cache: Cache, token: Int[Array, 'B'], position: int | Int[Array, '']
    ) -> tuple[Float[Array, 'B V'], Cache]:
        """Read the token at `position` of the target shifted right, bos at 0.

        Returns:
          The scores of the next token, equal to the ones of `decode`, and the next step's cache.
        """
        row = self._position_table(cache.max_len)[position]
        x, cache = self.decoder.step(
            self._add_positions(self.embed.target(token), row)[:, None], cache, position
        )
        return self.embed.logits(x[:, 0]), cache

    def attention_maps(
        self,
        intermediates: Mapping[str, Any],
        source: Int[Array, 'B S'],
        target_in: Int[Array, 'B T'],
    ) -> list[AttentionMap]:
        """Collect attention maps from the `intermediates` of a call with these tokens.

        The order is: of the encoder, of the decoder to the target, of the decoder to the source.
        """
        sources, targets = source.shape[1:], target_in.shape[1:]
        return [
            *collect(intermediates, 'encoder', sources, sources),
            *collect(intermediates, 'decoder', targets, targets),
            *collect(intermediates, 'decoder', targets, sources, 'cross'),
        ]

    def _position_table(self, tokens: int) -> Array:
        return jnp.asarray(sincos1d(tokens, self.width, self.positions), self.dtype)

    def _add_positions(self, x: Array, rows: Array) -> Array:
        """Multiply embeddings by sqrt(D), section 3.4, and add positions, section 3.5."""
        return x * math.sqrt(self.width) + rows
