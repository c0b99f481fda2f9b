"""Upsample a coarse color image, in color or in space, given the full gray image.

Kumar et al., 2021, arXiv:2102.04432, section 4.2.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
from jax import Array

from vit_jax.array_types import Int, UInt8
from vit_jax.nn.stochastic import example_keys
from vit_jax.ops import colors
from vit_jax.ops.terms import Term
from vit_jax.tasks import base
from vit_jax.tasks.base import Apply, Batch, Sums
from vit_jax.tasks.coltran import bits, to_rgb


@dataclasses.dataclass(frozen=True)
class Task(base.Task):
    """Predict the bytes of three channels; cross entropy in bits, 8 for uniform predictions.

    Images are RGB bytes. In training, each shows one channel, drawn at random.

    Attributes:
      factor: Side in pixels of the blocks that are averaged into the coarse image: 1 for the color
        upsampler, 4 for the spatial one from 64 x 64 to 256 x 256.
    """

    factor: int = 1

    def __post_init__(self) -> None:
        self.require('factor', self.factor >= 1, 'at least 1')

    def augment(self, key: jax.Array, batch: Batch) -> Batch:
        """Add `channel` [B], the channel to predict, drawn independently for each example."""
        keys = example_keys(key, len(batch['image']))
        channel = jax.vmap(lambda key: jax.random.randint(key, (), 0, 3))(keys)
        return {**batch, 'channel': channel}

    def inputs(
        self, batch: Batch
    ) -> tuple[UInt8[Array, 'B H W'], UInt8[Array, 'B H W C'], Int[Array, 'B C']]:
        """Return gray images, the chosen channels of the coarse images, and their indices.

        The coarse images are `coarse` [B h w 3] if the batch has it.
        """
        image, channels = to_rgb(batch['image']), _channels(batch)
        coarse = batch.get('coarse')
        coarse = colors.downsample(image, self.factor) if coarse is None else coarse
        coarse = colors.upsample(jnp.round(coarse).astype(jnp.uint8), self.factor)
        return colors.to_luma(image), _take(coarse, channels), channels

    def loss(self, outputs: dict, batch: Batch) -> dict[str, Term]:
        """Mean cross entropy per byte, in bits."""
        truth = _take(to_rgb(batch['image']), _channels(batch)).astype(jnp.int32)
        mask = self.mask(batch)
        total = (bits(outputs['logits'], truth) * mask[:, None, None, None]).sum()
        return {'bits_per_dim': Term(total, mask.sum() * truth[0].size)}

    def evaluate(self, apply: Apply, batch: Batch) -> Sums:
        """Sums and counts over all bytes of the real examples."""
        (term,) = self.loss(self.outputs(apply, batch), batch).values()
        return {'loss': (term.sum, term.count)}

    def predict(self, apply: Apply, batch: Batch) -> dict[str, jax.Array]:
        """Return the most likely bytes, `image` [B H W 3], and `coarse`, enlarged to that size."""
        gray, coarse, channels = self.inputs(batch)
        logits = apply(gray, coarse, channels)['logits']
        return {'image': logits.argmax(-1).astype(jnp.uint8), 'coarse': coarse}


def _channels(batch: Batch) -> Int[Array, 'B C']:
    """Return the channel drawn for each example, or all three."""
    if 'channel' in batch:
        return batch['channel'][:, None]
    return jnp.broadcast_to(jnp.arange(3), (len(batch['image']), 3))


def _take(image: UInt8[Array, 'B H W 3'], channels: Int[Array, 'B C']) -> UInt8[Array, 'B H W C']:
    return jnp.take_along_axis(image, channels[:, None, None], axis=-1)
