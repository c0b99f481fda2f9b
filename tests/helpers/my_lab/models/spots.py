"""A Transformer that detects spots from patches, some of them randomly hidden."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

import flax.linen as nn
import jax
from jaxtyping import Array, Bool, Float

from vit_jax.models import base as models
from vit_jax.nn.blocks import Block, Encoder
from vit_jax.nn.maps import AttentionMap, collect
from vit_jax.nn.patches import PatchEmbed, patch_grid
from vit_jax.nn.positions import learned
from vit_jax.nn.stochastic import example_keys

PATCH = 4


class Model(models.Model):
    """Boxes and classes of `slots` spots.

    Attributes:
      num_classes: classes of spots; one more output stands for no spot.
      slots: maximum number of spots.
      width: token width.
      hidden: share of randomly hidden patches, in training and evaluation.
    """

    num_classes: int | None = None
    slots: int = 3
    width: int = 16
    hidden: float = 0.25

    @nn.compact
    def __call__(
        self,
        images: Float[Array, 'B H W C'],
        pixel_mask: Bool[Array, 'B H W'],
        train: bool = False,
    ) -> dict[str, Array]:
        x = PatchEmbed(PATCH, self.width, name='patch_embed')(images * pixel_mask[..., None])
        keys = example_keys(self.make_rng('mask'), len(x))
        seen = jax.vmap(lambda key: jax.random.bernoulli(key, 1 - self.hidden, x.shape[1:2]))(keys)
        x = x * seen[..., None] + learned(self, x.shape[1], self.width)
        block = functools.partial(Block, num_heads=2, mlp_dim=2 * self.width)
        pooled = Encoder(block, 2, name='encoder')(x, train).mean(axis=1)
        shape = len(x), self.slots, -1
        classes = nn.Dense(self.slots * ((self.num_classes or 0) + 1), name='head')(pooled)
        boxes = nn.sigmoid(nn.Dense(self.slots * 4, name='box_head')(pooled))
        return {'classes': classes.reshape(shape), 'boxes': boxes.reshape(shape)}

    def attention_maps(
        self, intermediates: Mapping[str, Any], images: Array, pixel_mask: Array
    ) -> list[AttentionMap]:
        del pixel_mask
        grid = patch_grid(*images.shape[1:3], PATCH)
        return collect(intermediates, 'encoder', grid, grid)

    def layer_order(self) -> tuple[str, ...]:
        return ('^(patch_embed|pos_embed)(/|$)', '^encoder/block_0/', '^encoder/block_1/')
