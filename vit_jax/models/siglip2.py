"""SigLIP 2: SigLIP's towers with a decoder of captions and heads for self-distillation.

Tschannen et al., 2025, arXiv:2502.14786, sections 2.2 and 2.3. Decoder and heads only help to
train: `vit_jax.load` returns the towers, a SigLIP.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any, ClassVar

import flax.linen as nn
import jax.numpy as jnp
from jax import Array

from vit_jax.array_types import Bool, Float, Int
from vit_jax.models import cappa, dinov2, siglip
from vit_jax.models.base import check_counts
from vit_jax.models.siglip import variant as variant
from vit_jax.nn.options import defaults, regroup
from vit_jax.ops.self_distillation import CropMasks

TOWERS = ('image', 'text', 'log_scale', 'bias')


@dataclasses.dataclass(frozen=True)
class DecoderFields:
    """Decoder of captions, see the model `cappa`; it has the image tower's width, heads and MLPs.

    Attributes:
      depth: Number of blocks; the paper has half as many as in the text tower.
      bias: Whether norms and MLPs of the blocks have biases.
      mask_token: Whether captions can be predicted in parallel.
    """

    depth: int = 6
    bias: bool = False
    mask_token: bool = True


@dataclasses.dataclass(frozen=True)
class PrototypeFields:
    """Heads for images and for their patches, see the model `dinov2`.

    Attributes:
      image: Prototypes of the head of the image's representation.
      patch: Prototypes of the head of patches.
      hidden: Width of the heads' hidden layers.
      bottleneck: Width of the heads' last layer.
    """

    image: int = 65536
    patch: int = 65536
    hidden: int = 2048
    bottleneck: int = 256


class Distilled(nn.Module):
    """Heads of prototypes for a model of two towers, whose image tower may see hidden patches."""

    tower: ClassVar[type[Any]] = dinov2.Backbone

    def add_heads(self: Any) -> None:
        """Make the heads in `setup`."""
        heads = self.prototypes
        head = functools.partial(
            dinov2.Head,
            bottleneck=heads.bottleneck,
            hidden=heads.hidden,
            gelu=self.block.gelu,
            dtype=self.dtype,
        )
        self.dino_head, self.ibot_head = head(heads.image), head(heads.patch)

    def compare(
        self: Any,
        images: Float[Array, 'R H W C'],
        train: bool = False,
        *,
        masked: Bool[Array, 'R N'] | None = None,
        places: Int[Array, 'B M'] | None = None,
    ) -> dict[str, Float[Array, '_ *rest']]:
        """Compare images and their patches with prototypes; see the call of `dinov2`."""
        outputs = self.image(images, train, masked=masked)
        outputs['patches'] = outputs['tokens'][:, self.image.prefix_tokens :]
        return outputs | dinov2.score(outputs, self.dino_head, self.ibot_head, places)

    def block_masks(
        self: Any,
        images: Float[Array, 'B G H W C'],
        *,
        masked: int,
        ratios: tuple[float, float],
    ) -> CropMasks:
        """Draw masks of crops; see the model `dinov2`."""
        return dinov2.draw_masks(self.make_rng('mask'), images, self.patch_size, masked, ratios)

    def _check_heads(self: Any) -> None:
        heads = ('image', 'patch', 'hidden', 'bottleneck')
        check_counts(self, *(f'prototypes.{name}' for name in heads))

    def _make_tower(self: Any) -> Tower:
        self.mask = MaskToken(self.width)
        return Tower(**self._image_fields, mask_token=self.mask)


class Model(Distilled, siglip.Model):
    """Model `siglip` with a decoder of captions, and heads for self-distillation.

    Images may be smaller or larger than those that initialize the model; positions are interpolated
    for them. It has the fields of `siglip` and two more.

    Attributes:
      decoder: Options of the decoder, see `DecoderFields`.
      prototypes: Options of the heads, see `PrototypeFields`.
    """

    decoder: DecoderFields = DecoderFields()
    prototypes: PrototypeFields = PrototypeFields()

    part_task = 'siglip'
    mup_kinds = (('^captions/(token_embed/embedding|mask_token)$', 'embedding'),)

    def __post_init__(self) -> None:
        check_counts(self, 'decoder.depth')
        self._check_heads()
        super().__post_init__()

    def setup(self) -> None:
        super().setup()
        self.captions = cappa.CaptionDecoder(
            vocab_size=self.vocab_size or 0,
            length=self.length,
            width=self.width,
            depth=self.decoder.depth,
            mlp_dim=self.mlp_dim,
            num_heads=self.num_heads,
            use_bias=self.decoder.bias,
            mask_token=self.decoder.mask_token,
            dropout=self.dropout,
            norm_eps=self.block.norm_eps,
            attention=self.attention,
            dtype=self.dtype,
        )
        self.add_heads()

    def __call__(  # type: ignore[override]  # captions come before `train`
        self,
        images: Float[Array, 'B H W C'],
        ids: Int[Array, 'B N'] | None = None,
        target_in: Int[Array, 'B N'] | None = None,
        parallel: Bool[Array, 'B'] | None = None,
        train: bool = False,
    ) -> dict[str, Float[Array, '*rest']]:
        """Embed normalized images and texts, and predict captions.

        Args:
          images: Normalized images.
          ids: Texts to embed, if any.
          target_in: Bos and the captions without their last tokens, to predict them, if any.
          parallel: True for captions to predict in parallel; by default none.
          train: Whether dropout acts.

        Returns:
          The outputs of `siglip`, and with `target_in`:
          logits: [B N V] in float32, of the captions' tokens.
        """
        tower = self.image(images, train)
        outputs = {'image': self._embed_pooled(tower['pre_logits'])}
        if ids is not None:
            outputs['text'] = self.embed_texts(ids, train)
        if target_in is not None:
            memory = cappa.whole_memory(tower['tokens'])
            outputs['logits'] = self.captions(memory, target_in, parallel, train)
        return {**outputs, 'scale': jnp.exp(self.log_scale), 'bias': self.bias}

    def transferable(self) -> tuple[dict[str, Any], tuple[str, ...]]:
        """Describe the towers: keywords of `config.model`, and parameter names."""
        fields = {name: getattr(self, name) for name in defaults(siglip.Model)}
        return {'name': 'siglip', **regroup(siglip.Model, fields)}, TOWERS


class MaskToken(nn.Module):
    """Token of hidden patches, the parameter `token` [1 1 D]."""

    width: int

    @nn.compact
    def __call__(self) -> Float[Array, '1 1 D']:
        return self.param('token', nn.initializers.zeros, (1, 1, self.width))


class Tower(dinov2.Backbone):
    """Image tower that shares the token of hidden patches with its model.

    So it has the parameters of a ViT.

    Attributes:
      mask_token: Module that returns the token.
    """

    mask_token: nn.Module | None = None

    def _mask_token(self) -> Array:
        assert self.mask_token is not None
        token: Array = self.mask_token()
        return token
