"""Autoregressive sampling of coarse colors for gray images.

Kumar et al., 2021, arXiv:2102.04432, section 4.1.
"""

from __future__ import annotations

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
import optax
from jax import Array

from vit_jax.array_types import Float, Int, Num, UInt8
from vit_jax.errors import UserError
from vit_jax.ops import colors, search
from vit_jax.ops.terms import Term
from vit_jax.tasks import base
from vit_jax.tasks.base import Apply, Batch, Sums

NO_END = -1  # no color ends an image


@dataclasses.dataclass(frozen=True)
class Task(base.Task):
    """Predict coarse colors; cross entropy in bits per pixel, 9 for uniform predictions.

    There are 512 coarse colors. Images are bytes with three channels, or one without ground truth.

    Attributes:
      parallel_weight: Weight of the head that sees only the gray image; the decoder has weight
        1 - parallel_weight.
      samples: Number of samples that `predict` draws per image.
      temperature, top_k: Sampling parameters, see `ops.search.sample`.
    """

    parallel_weight: float = 0.01
    samples: int = 3
    temperature: float = 1.0
    top_k: int | None = None

    rngs = ('sample',)

    def __post_init__(self) -> None:
        self.require('parallel_weight', 0 <= self.parallel_weight < 1, 'in [0, 1)')
        search.require(self.samples >= 1, 'samples', 'at least 1', self.samples)

    def inputs(self, batch: Batch) -> tuple[UInt8[Array, 'B H W'], Int[Array, 'B H W']]:
        """Return gray images and the bins of their colors."""
        image = to_rgb(batch['image'])
        return colors.to_luma(image), colors.to_coarse_bins(image)

    def loss(self, outputs: dict, batch: Batch) -> dict[str, Term]:
        """Means over the pixels, in bits, for the decoder and for the parallel head."""
        decoder, parallel, pixels = self._bits(outputs, batch)
        return {
            'bits_per_dim': Term(decoder, pixels, 1 - self.parallel_weight),
            'parallel_bits_per_dim': Term(parallel, pixels, self.parallel_weight),
        }

    def evaluate(self, apply: Apply, batch: Batch) -> Sums:
        """Sums and counts over the pixels of real examples; `loss` is the decoder's."""
        decoder, parallel, pixels = self._bits(self.outputs(apply, batch), batch)
        return {'loss': (decoder, pixels), 'parallel_bits_per_dim': (parallel, pixels)}

    def predict(self, apply: Apply, batch: Batch) -> dict[str, jax.Array]:
        """Draw samples.

        Returns:
          samples: bytes [B S H W 3], the center color of each bin.
          bits_per_dim: [B S], -log2 of a sample's probability, divided by its number of pixels.
        """
        gray, _ = self.inputs(batch)
        keys = apply(len(gray), method='sample_keys')
        keys = jax.vmap(functools.partial(jax.random.split, num=self.samples))(keys).reshape(-1)
        sampled = search.sample(
            functools.partial(apply, method='decode_step'),
            apply(gray.repeat(self.samples, axis=0), method='start'),
            keys,
            max_len=math.prod(gray.shape[1:]),
            temperature=self.temperature,
            top_k=self.top_k,
            bos=0,
            eos=NO_END,
        )
        bins = sampled.tokens.reshape(len(gray), self.samples, *gray.shape[1:])
        bits = -sampled.scores.reshape(len(gray), self.samples) / (bins[0, 0].size * math.log(2))
        return {'samples': colors.from_coarse_bins(bins), 'bits_per_dim': bits}

    def _bits(self, outputs: dict, batch: Batch) -> tuple[Array, Array, Array]:
        """Return total bits of the decoder and of the parallel head, and the number of pixels."""
        bins, mask = self.inputs(batch)[1], self.mask(batch)
        decoder, parallel = (
            (bits(outputs[name], bins) * mask[:, None, None]).sum()
            for name in ('logits', 'parallel_logits')
        )
        return decoder, parallel, mask.sum() * bins[0].size


def bits(logits: Float[Array, '*B V'], label: Int[Array, '*B']) -> Float[Array, '*B']:
    """Cross entropy in bits."""
    losses = optax.softmax_cross_entropy_with_integer_labels(logits.astype(jnp.float32), label)
    return losses / math.log(2)


def to_rgb(image: Num[Array, 'B H W C']) -> UInt8[Array, 'B H W 3']:
    """Return images with three channels.

    Raises:
      UserError: if the images are not bytes with one or three channels.
    """
    if image.dtype != jnp.uint8 or image.shape[-1] not in (1, 3):
        raise UserError(
            f'images must be bytes with 1 or 3 channels, not {image.dtype} with {image.shape[-1]}: '
            'leave out transforms that change values or channels'
        )
    return jnp.broadcast_to(image, (*image.shape[:3], 3))
