"""Training on some of the patches of every image."""

import math

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax import Array

from vit_jax.array_types import Bool, Float
from vit_jax.nn.stochastic import check_rate, example_keys


class PatchDropout(nn.Module):
    """Leave out patches at random, so that sequences become shorter and steps cheaper.

    NaViT, arXiv:2307.06304, section 3.2. The random stream is named `dropout`; an example drops
    the same patches on any device.

    Attributes:
      rate: share of each image's patches that is left out.

    Raises:
      UserError: if `rate` is outside [0, 1).
    """

    rate: float

    @nn.compact
    def __call__(
        self, x: Float[Array, 'B N D'], real: Bool[Array, 'B N']
    ) -> tuple[Float[Array, 'B K D'], Bool[Array, 'B K']]:
        """The kept tokens, in random order, and which of them are real.

        Args:
          x: tokens with their positions.
          real: false for padding, which is left out first.

        Returns:
          K = ceil((1 - rate) N) tokens, of which those of an image of n patches are
          ceil((1 - rate) n).
        """
        check_rate('patch_dropout', self.rate)
        tokens = x.shape[1]
        keys = example_keys(self.make_rng('dropout'), x.shape[0])
        noise = jax.vmap(lambda key: jax.random.uniform(key, (tokens,)))(keys)
        order = jnp.argsort(jnp.where(real, noise, 2.0), axis=1)
        kept = math.ceil((1 - self.rate) * tokens)
        own = jnp.ceil((1 - self.rate) * real.sum(axis=1, keepdims=True))
        x = jnp.take_along_axis(x, order[:, :kept, None], axis=1)
        return x, jnp.arange(kept) < own
