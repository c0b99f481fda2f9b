"""Translation, or any other sequence-to-sequence task."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from vit_jax.array_types import Float, Int
from vit_jax.errors import UserError
from vit_jax.ops.search import BOS, PAD, Search, decode
from vit_jax.ops.terms import Term, hits
from vit_jax.tasks import base
from vit_jax.tasks.base import Apply, Batch, Sums


@dataclasses.dataclass(frozen=True)
class Task(base.Task):
    """Next-token prediction of the target, given the source and the true tokens before.

    A batch has `source` and `target`, int32 [B S] and [B T]: tokens with eos at the end, then
    padding. Rows with nothing but padding do not count.

    Attributes:
      label_smoothing: Eps of `smoothed_loss`.
      search: How `predict` decodes, 'beam' or 'greedy'.
      beams, alpha, extra_len: See `vit_jax.ops.search.Search`.
    """

    label_smoothing: float = 0.1
    search: str = 'beam'
    beams: int = 4
    alpha: float = 0.6
    extra_len: int = 50

    rngs = ('dropout',)

    def __post_init__(self) -> None:
        self.require('label_smoothing', 0 <= self.label_smoothing < 1, 'in [0, 1)')
        if self.search == 'sample':
            raise UserError("config.task.search: 'beam' or 'greedy'; `translate` can sample")
        self.require('beams', self.beams >= 1, 'at least 1')
        self.require('alpha', self.alpha >= 0, 'at least 0')
        self.decoding  # noqa: B018  building the search checks the other fields

    @property
    def decoding(self) -> Search:
        """Search that `predict` decodes with."""
        return Search(self.search, self.beams, self.alpha, extra_len=self.extra_len)

    def inputs(self, batch: Batch) -> tuple[Int[Array, 'B S'], Int[Array, 'B T']]:
        return batch['source'], shift_right(batch['target'])

    def loss(self, outputs: dict, batch: Batch) -> dict[str, Term]:
        """Means over the target's tokens: the smoothed `loss`, and metrics without smoothing."""
        logits, target = outputs['logits'], batch['target']
        real = target != PAD
        losses, count = smoothed_loss(logits, target, self.label_smoothing), real.sum()
        metrics = token_sums(logits, target)
        return {
            'loss': Term(jnp.sum(losses * real), count),
            **{name: Term(total, count, weight=0.0) for name, total in metrics.items()},
        }

    def evaluate(self, apply: Apply, batch: Batch) -> Sums:
        """Sums and counts: `loss` without smoothing, in nats per token, and accuracies.

        A sequence is correct if each token is, given the true tokens before it; exactly then greedy
        decoding reproduces the target.
        """
        logits, target = self.outputs(apply, batch)['logits'], batch['target']
        sums, count = token_sums(logits, target), (target != PAD).sum()
        mask = self.mask(batch)
        right = jnp.where(target == PAD, 1.0, hits(logits, target)).min(-1)
        return {
            'loss': (sums['nll'], count),
            'token_accuracy': (sums['token_accuracy'], count),
            'sequence_accuracy': (jnp.sum(right * mask), jnp.sum(mask)),
        }

    def derive(self, means: dict[str, float]) -> dict[str, float]:
        """Compute the perplexity per token from the means of `evaluate` over all data."""
        with np.errstate(over='ignore'):
            return {'perplexity': float(np.exp(means['loss']))}

    def predict(self, apply: Apply, batch: Batch) -> dict[str, jax.Array]:
        """Return the best `tokens` [B L] without bos, padded with 0, and their `score` [B]."""
        decoded = decode(apply, batch['source'], self.decoding)
        return {'tokens': decoded.tokens[:, 0], 'score': decoded.scores[:, 0]}


def shift_right(target: Int[Array, 'B T']) -> Int[Array, 'B T']:
    """Return the decoder's input: bos, then the target without its last token."""
    return jnp.pad(target, ((0, 0), (1, 0)), constant_values=BOS)[:, :-1]


def smoothed_loss(
    logits: Float[Array, 'B T V'], target: Int[Array, 'B T'], smoothing: float
) -> Float[Array, 'B T']:
    """Cross entropy, in nats, with 1 - eps on the target and eps / (V - 1) on each other token.

    Vaswani et al. 2017, section 5.4, do not specify how eps is distributed. Szegedy et al. 2016,
    equation 7, give eps / V to every token, including the target; so eps here is their eps times
    (V - 1) / V.
    """
    loss, num_others = token_loss(logits, target), logits.shape[-1] - 1
    if not smoothing:
        return loss
    mean_loss = jax.nn.logsumexp(logits, axis=-1) - logits.mean(-1)
    others_loss = ((num_others + 1) * mean_loss - loss) / num_others
    return (1 - smoothing) * loss + smoothing * others_loss


def token_loss(logits: Float[Array, 'B T V'], target: Int[Array, 'B T']) -> Float[Array, 'B T']:
    """-log softmax(logits) at the target, in nats."""
    at_target = jnp.take_along_axis(logits, target[..., None], axis=-1)[..., 0]
    return jax.nn.logsumexp(logits, axis=-1) - at_target


def token_sums(
    logits: Float[Array, 'B T V'], target: Int[Array, 'B T']
) -> dict[str, Float[Array, '']]:
    """Sum -log p and correct predictions over the target's tokens, without padding."""
    real = target != PAD
    return {
        'nll': jnp.sum(token_loss(logits, target) * real),
        'token_accuracy': jnp.sum(jnp.where(real, hits(logits, target), 0.0)),
    }
