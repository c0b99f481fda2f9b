"""CLIP (Radford et al., 2021, arXiv:2103.00020): two towers embed images and texts in one space."""

import functools

import flax.linen as nn
import jax.numpy as jnp

from vit_jax.models import base, vit
from vit_jax.nn.blocks import Block, Encoder, segment_mean
from vit_jax.nn.maps import collect
from vit_jax.nn.patches import patch_grid
from vit_jax.nn.positions import sincos1d


class Model(base.Model):
    """Embed images [B H W C] and texts, as ids [B N] with a mask; also returns a scale."""

    vocab_size: int | None = None
    patch_size: int = 4
    width: int = 32
    depth: int = 1
    dropout: float = 0.1

    def setup(self):
        size = {'mlp_dim': 4 * self.width, 'num_heads': 2, 'dropout': self.dropout}
        self.image = vit.Model(None, self.patch_size, self.width, self.depth, pool='gap', **size)
        self.embed = nn.Embed(self.vocab_size or 0, self.width)
        self.text = Encoder(functools.partial(Block, **size), self.depth)
        self.image_head, self.text_head = nn.Dense(self.width), nn.Dense(self.width)
        self.unit = nn.RMSNorm(use_scale=False)
        self.log_scale = self.param('log_scale', nn.initializers.constant(-1.0), ())

    def __call__(self, images, ids=None, mask=None, train=False):
        outputs = {'image': self.unit(self.image_head(self.image(images, train)['pre_logits']))}
        if ids is not None:
            outputs['text'] = self.embed_text(ids, mask, train)
        return {**outputs, 'scale': jnp.exp(self.log_scale)}

    def embed_text(self, ids, mask, train=False):
        segments = mask.astype(jnp.int32)
        x = self.embed(ids) + sincos1d(ids.shape[1], self.width)
        pooled = segment_mean(self.text(x, train, segments), segments)[:, 0]
        return self.unit(self.text_head(pooled))

    def attention_maps(self, intermediates, images, *texts):
        grid = patch_grid(*images.shape[1:3], self.patch_size)
        return collect(intermediates, 'image/encoder', grid, grid)
