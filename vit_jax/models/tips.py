"""TIPSv2: SigLIP's layout with an image tower like DINOv2's, and a mean of the text's tokens.

Maninis et al., 2025, arXiv:2410.16512, and the authors' code of its second version.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any, ClassVar

import flax.linen as nn
import jax.numpy as jnp
import numpy as np
from jax import Array

from vit_jax.array_types import Float, Float32, Int
from vit_jax.errors import UserError
from vit_jax.models import siglip, text_encoder
from vit_jax.nn.blocks import BlockOptions, Mlp
from vit_jax.nn.dense import Dense
from vit_jax.nn.norms import unit
from vit_jax.nn.options import PlainBlockFields, PoolKind
from vit_jax.nn.stochastic import Dropout
from vit_jax.ops.search import PAD

EPS = 1e-8  # added to the number of tokens
TEMPERATURE = 0.005065968260169029  # of the published models


@dataclasses.dataclass(frozen=True)
class TipsTextFields(siglip.TextFields):
    """The text tower, with ReLUs and fixed positions.

    Attributes:
      norm_eps: Value added to the variance in norms.
      scaled: Whether embeddings are multiplied by the square root of the width.
    """

    norm_eps: float = 1e-5
    scaled: bool = True


@dataclasses.dataclass(frozen=True)
class TipsBlockFields(PlainBlockFields):
    """Blocks of the image tower.

    Attributes:
      mlp, mlp_norm: See the model `vit`.
      layer_scale: Initial value of a learned factor for each channel of every branch.
    """

    gelu: str = 'erf'
    mlp: str = 'mlp'
    mlp_norm: bool = False
    layer_scale: float | None = 1.0


class Texts(text_encoder.Model):
    """A text tower that leaves out padding, id 0.

    Attributes:
      scaled: See `TipsTextFields`.
    """

    scaled: bool = True

    def _embed(self, ids: Int[Array, 'B N']) -> Float[Array, 'B N D']:
        std, dtype = self.width**-0.5, jnp.dtype(self.dtype)
        embed = nn.Embed(
            self.vocab_size or 0,
            self.width,
            dtype=dtype,
            embedding_init=nn.initializers.normal(std),
            name='token_embed',
        )
        scale = math.sqrt(self.width) if self.scaled else 1.0
        return embed(ids) * scale + jnp.asarray(timing(self.length, self.width), dtype)

    def _segments(self, ids: Int[Array, 'B N']) -> Int[Array, 'B N']:
        return (ids != PAD).astype(jnp.int32)

    def _block_options(self) -> BlockOptions:
        return BlockOptions(mlp=ReluMlp)

    def _pool(self, tokens: Float[Array, 'B N D'], ids: Int[Array, 'B N']) -> Array:
        real = (ids != PAD)[..., None].astype(tokens.dtype)
        return (tokens * real).sum(1) / (real.sum(1) + EPS)


class ReluMlp(Mlp):
    """Two dense layers with a ReLU between them; `gelu` has no effect."""

    @nn.compact
    def __call__(self, x: Float[Array, '*B D'], train: bool = False) -> Float[Array, '*B D']:
        y = nn.relu(Dense(self.hidden_dim, dtype=self.dtype, name='fc1')(x))
        return Dense(x.shape[-1], dtype=self.dtype, name='fc2')(Dropout(self.dropout)(y, train))


def timing(length: int, width: int) -> Float32[np.ndarray, 'N D']:
    """Compute positions as tensor2tensor does: sines, then cosines of a geometric series.

    Unlike in arXiv:1706.03762, the last of the width / 2 frequencies is exactly 1 / 10,000.
    """
    half = width // 2
    frequencies = np.exp(np.arange(half) * -(math.log(10_000) / max(half - 1, 1)))
    angles = np.arange(length)[:, None] * frequencies
    table = np.concatenate([np.sin(angles), np.cos(angles)], axis=1)
    return np.pad(table, ((0, 0), (0, width % 2))).astype(np.float32)


class Model(siglip.Model):
    """Model `siglip` with a class token and registers, whose embedding is the class token's.

    The first register is a second class token, which the authors train on synthetic captions.

    Attributes:
      registers: Tokens between the class token and the patches.
      texts: Options of the text tower, see `TipsTextFields`; it is as wide as the image tower.
      block: Options of the image tower's blocks, see `TipsBlockFields`.
      logits: Initial scale; the bias has no effect.

    Raises:
      UserError: As `siglip`, or if the towers differ in width.
    """

    patch_size: int = 14
    registers: int = 1
    pool: PoolKind = PoolKind('cls')
    texts: TipsTextFields = TipsTextFields()
    logits: siglip.LogitFields = siglip.LogitFields(1 / TEMPERATURE, 0.0)
    block: TipsBlockFields = TipsBlockFields()

    text_class: ClassVar[type[Any]] = Texts
    pools = ('cls',)
    biases = False
    effects: ClassVar = {'texts.scaled': 'binding'}

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.texts.width != self.embed_dim:
            raise UserError(
                f'texts.width={self.texts.width}: embeddings have the width {self.embed_dim} '
                '(embed_dim); make them equal'
            )

    def embed_texts(self, ids: Int[Array, 'T N'], train: bool = False) -> Float[Array, 'T E']:
        """Embed texts of `length` ids, padded with 0, as vectors of length 1 in float32."""
        return unit(self.text(ids, train)['pre_logits'])

    @property
    def _image_fields(self) -> dict[str, Any]:
        return super()._image_fields | {'registers': self.registers}

    @property
    def _text_fields(self) -> dict[str, Any]:
        fields = {**super()._text_fields, 'num_classes': None}
        block = PlainBlockFields(norm_eps=fields.pop('norm_eps'))
        return {**fields, 'block': block}
