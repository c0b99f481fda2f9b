"""A ViT that compares its class token with prototypes (Caron et al. 2021, arXiv:2104.14294)."""

from collections.abc import Mapping
from typing import Any

import flax.linen as nn
import jax.numpy as jnp
from jaxtyping import Array, Float

from vit_jax.models import base, vit
from vit_jax.nn.maps import AttentionMap


class Model(base.Model):
    """A ViT with a projection head (appendix C); image sides must be multiples of `patch_size`.

    Attributes:
      prototypes: K, outputs of the head.
      patch_size, width, depth, num_heads, drop_path: as in `vit.Model`.
      hidden, bottleneck: widths of the head's layers and of the prototypes.
    """

    prototypes: int = 65536
    patch_size: int = 16
    width: int = 384
    depth: int = 12
    num_heads: int = 6
    drop_path: float = 0.1
    hidden: int = 2048
    bottleneck: int = 256

    def setup(self) -> None:
        self.vit = vit.Model(**self._fields())
        nn.share_scope(self, self.vit)  # its parameters are at the top level, like a ViT's
        layers = [nn.Dense(self.hidden), nn.gelu, nn.Dense(self.hidden), nn.gelu]
        self.head = nn.Sequential([*layers, nn.Dense(self.bottleneck)])
        self.last = nn.WeightNorm(nn.Dense(self.prototypes, use_bias=False), use_scale=False)

    def __call__(self, images: Float[Array, 'B H W C'], train: bool = False) -> dict[str, Array]:
        """`tokens` [B 1+N D], `pre_logits` [B D] of the class token, and cosines `logits` [B K]."""
        outputs = self.vit(images, train)
        z = self.head(outputs['pre_logits'])
        return {**outputs, 'logits': self.last(z / jnp.linalg.norm(z, axis=-1, keepdims=True))}

    def attention_maps(self, intermediates: Mapping[str, Any], images: Array) -> list[AttentionMap]:
        return vit.Model(parent=None, **self._fields()).attention_maps(intermediates, images)

    def transferable(self) -> tuple[dict[str, Any], tuple[str, ...]]:
        return {'name': 'vit', **self._fields()}, ('patch_embed', 'cls_token', 'encoder')

    def _fields(self) -> dict[str, Any]:
        same = ('patch_size', 'width', 'depth', 'num_heads', 'drop_path')
        own = {name: getattr(self, name) for name in same}
        return {'posemb': 'sincos2d', 'mlp_dim': 4 * self.width, **own}
