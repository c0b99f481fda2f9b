"""A ViT with factorized positions that pools each image of a row separately."""

import functools

import flax.linen as nn

from vit_jax.models import base
from vit_jax.nn.blocks import Block, Encoder, MapHead
from vit_jax.nn.maps import collect
from vit_jax.nn.positions import learned


class Model(base.Model):
    """Logits [B S C] for S = `most` images per row, with sides of up to `longest` patches."""

    num_classes: int
    most: int
    longest: int
    width: int = 32
    depth: int = 2
    num_heads: int = 2
    dropout: float = 0.0

    @nn.compact
    def __call__(self, patches, places, segments, train=False):
        x = nn.Dense(self.width, name='patch_embed')(patches)
        for axis, name in enumerate(('row_embed', 'column_embed')):
            x += learned(self, self.longest, self.width, name=name)[0, places[..., axis]]
        block = functools.partial(Block, self.num_heads, 4 * self.width, self.dropout)
        x = Encoder(block, self.depth, name='encoder')(x, train, segments)
        x = MapHead(self.num_heads, 4 * self.width, name='pool')(x, train, segments, self.most)
        return {'logits': nn.Dense(self.num_classes, name='head')(x)}

    def attention_maps(self, intermediates, patches, places, segments):
        """Attention maps of the first image of the first row."""
        n = int((segments[0] == 1).sum())
        grid = tuple(int(last) + 1 for last in places[0, :n].max(axis=0))
        maps = collect(intermediates, 'encoder', grid, grid)
        return [each._replace(weights=each.weights[..., :n, :n]) for each in maps]
