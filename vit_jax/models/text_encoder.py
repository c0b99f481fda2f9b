"""Towers for texts of CLIP and SigLIP: a Transformer encoder whose head makes one embedding.

Radford et al., 2021, arXiv:2103.00020, section 2.4; Zhai et al., 2023, arXiv:2303.15343.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any, ClassVar

import flax.linen as nn
import jax.numpy as jnp
from jax import Array

from vit_jax.array_types import Float, Int
from vit_jax.errors import UserError, check_choice, check_multiple
from vit_jax.models import base
from vit_jax.models.base import bind_norm, check_counts, check_fields
from vit_jax.nn.blocks import Block, BlockOptions, Encoder
from vit_jax.nn.maps import HiddenState, collect_blocks
from vit_jax.nn.options import PlainBlockFields
from vit_jax.nn.positions import learned
from vit_jax.ops.search import EOS

LARGEST = 'largest'  # in place of the end of a text: the token with the largest id


class Model(base.Model):
    """An encoder of the ids of texts, all of one length.

    Every id has an effect, also padding, as in the authors' code. So texts are padded to
    the same length wherever they are compared, unless `causal` hides what follows the end.

    Attributes:
      num_classes: E, outputs of the head, which are the embedding; None or 0 leaves the head out.
      vocab_size: Ids of texts are in 0..vocab_size-1.
      length: N, number of ids of a text, the padding included.
      width, depth, mlp_dim, num_heads: See the model `vit`.
      causal: Whether tokens attend to no later ones (CLIP).
      eos: The id whose first token is the head's input (CLIP), or the first token of all if there
        is none; 'largest' for the first token with the largest id of the text (CLIP's authors);
        None for the last token (SigLIP).
      head_bias: Whether the head has biases (SigLIP).
      dropout: Dropout rate after each dense layer of a block.
      block: Options of the blocks, see `PlainBlockFields`.
      scan, remat, attention, dtype: See the model `vit`.

    Raises:
      UserError: if a field has no such value, or a text has a different length.
    """

    num_classes: int | None = None
    vocab_size: int | None = None
    length: int = 64
    width: int = 768
    depth: int = 12
    mlp_dim: int = 3072
    num_heads: int = 12
    causal: bool = False
    eos: int | str | None = None
    head_bias: bool = True
    dropout: float = 0.0
    block: PlainBlockFields = PlainBlockFields()
    scan: bool = False
    remat: bool | str = False
    attention: str = 'auto'
    dtype: str = 'float32'

    effects: ClassVar = {'causal': 'binding', 'eos': 'binding'}

    def __post_init__(self) -> None:
        check_fields(self, 'block.gelu', 'attention', 'dtype', 'remat', 'dropout')
        check_counts(self, 'vocab_size', 'length')
        check_multiple('width', self.width, 'num_heads', self.num_heads)
        check_eos(self.eos, self.vocab_size)
        super().__post_init__()

    @nn.compact
    def __call__(self, ids: Int[Array, 'B N'], train: bool = False) -> dict[str, Array]:
        """Embed texts.

        Returns:
          tokens: [B N D] after the final norm.
          pre_logits: [B D], the token of the head.
          logits: [B E], the embeddings, not of length 1; absent without a head.
        """
        if ids.shape[1] != self.length:
            raise UserError(
                f'texts have {ids.shape[1]} ids, the model was made for {self.length}: set the '
                "length of the transform tokenize('caption', LENGTH) and config.model.length alike"
            )
        tokens = self._encoder()(self._embed(ids), train, self._segments(ids))
        x = self._pool(tokens, ids)
        outputs = {'tokens': tokens, 'pre_logits': x}
        if self.num_classes:
            outputs['logits'] = nn.Dense(
                self.num_classes, self.head_bias, jnp.dtype(self.dtype), name='head'
            )(x)
        return outputs

    @property
    def end_of_text(self) -> int | None:
        """Id with which texts have to end; None if any will do."""
        return self.eos if isinstance(self.eos, int) else None

    def layer_order(self) -> tuple[str, ...]:
        """Patterns of the layers' parameters from the text on: the embeddings, then each block."""
        blocks = (f'^encoder/block_{i}/' for i in range(self.depth))
        return '^(token_embed|pos_embed)(/|$)', *blocks

    def collect_hidden_states(
        self, collection: Mapping[str, Any], *inputs: Any
    ) -> list[HiddenState]:
        """Return the states of the encoder's layers in a call."""
        del inputs
        return [
            HiddenState(name, tokens, (self.length,))
            for name, tokens in collect_blocks(collection, 'encoder')
        ]

    def final_norm_of(self, params: Mapping[str, Any]) -> Callable[[Array], Array] | None:
        """The encoder's last norm."""
        return bind_norm('layer', self.block.norm_eps, self.dtype, params['encoder']['norm'])

    def _embed(self, ids: Int[Array, 'B N']) -> Float[Array, 'B N D']:
        """Ids and their positions as tokens."""
        std, dtype = self.width**-0.5, jnp.dtype(self.dtype)
        embed = nn.Embed(
            self.vocab_size or 0,
            self.width,
            dtype=dtype,
            embedding_init=nn.initializers.normal(std),
            name='token_embed',
        )
        return embed(ids) + learned(self, self.length, self.width, std).astype(dtype)

    def _encoder(self) -> Encoder:
        common: dict[str, Any] = {'norm_eps': self.block.norm_eps, 'dtype': jnp.dtype(self.dtype)}
        block = functools.partial(
            Block,
            num_heads=self.num_heads,
            mlp_dim=self.mlp_dim,
            dropout=self.dropout,
            gelu=self.block.gelu,
            attention_by=self.attention,
            options=self._block_options(),
            **common,
        )
        common |= {'scan': self.scan, 'remat': self.remat}
        return Encoder(block, self.depth, name='encoder', **common)

    def _block_options(self) -> BlockOptions:
        return BlockOptions(causal=self.causal)

    def _segments(self, ids: Int[Array, 'B N']) -> Int[Array, 'B N'] | None:
        """Numbers of tokens, which attend to those with the same number; None for all to all."""
        del ids
        return None

    def _pool(self, tokens: Float[Array, 'B N D'], ids: Int[Array, 'B N']) -> Array:
        if self.eos is None:
            return tokens[:, -1]
        end = jnp.argmax(ids if self.eos == LARGEST else ids == self.eos, axis=1)
        return jnp.take_along_axis(tokens, end[:, None, None], axis=1)[:, 0]


def check_eos(eos: int | str | None, vocab_size: int | None) -> None:
    """Raise UserError if `eos` is not an id of the vocabulary, where its size is known."""
    if isinstance(eos, str):
        check_choice('eos', eos, (LARGEST,))
    elif eos is not None and vocab_size and not 0 <= eos < vocab_size:
        raise UserError(
            f'eos={eos}: the vocabulary has {vocab_size} ids; the end of a text is {EOS} in those '
            "that `vit_jax vocab` makes, and in 'bytes'"
        )
