"""Classify each image of a row."""

import dataclasses

import jax
import jax.numpy as jnp
import optax
from packed_vit.data import cut

from vit_jax.ops import sequences
from vit_jax.ops.terms import Term
from vit_jax.tasks import base


@dataclasses.dataclass(frozen=True)
class Task(base.Task):
    """Cross entropy, averaged over images; in prediction each file is a row of its own."""

    side: int

    rngs = ('dropout',)

    def inputs(self, batch):
        if 'image' in batch:
            row = [jnp.asarray(part)[None] for part in cut(batch['image'][0], self.side)]
            return sequences.to_range(row[0], (-1, 1)), row[1], jnp.ones_like(row[1][..., 0])
        return sequences.to_range(batch['patches'], (-1, 1)), batch['places'], batch['segments']

    def loss(self, outputs, batch):
        logits, label, mask = outputs['logits'], batch['label'], self.mask(batch)
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, label)
        terms = {'loss': (losses, 1.0), 'accuracy': (logits.argmax(-1) == label, 0.0)}
        return {k: Term((x * mask).sum(), mask.sum(), weight) for k, (x, weight) in terms.items()}

    def predict(self, apply, batch):
        """Class probabilities [B S C] of each image of a row."""
        return {'probs': jax.nn.softmax(self.outputs(apply, batch)['logits'])}
