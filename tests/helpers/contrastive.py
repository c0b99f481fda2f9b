"""A tiny contrastive system: each row is to be nearer to its neighbor than to all other rows."""

import dataclasses

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np

from vit_jax.models import base as models
from vit_jax.nn.stochastic import Dropout
from vit_jax.ops.terms import Term
from vit_jax.tasks import base

ROWS, WIDTH = 32, 4


class Model(models.Model):
    """Embeddings [B D] of vectors [B W], some of whose numbers are dropped, and a temperature."""

    size: int = 6
    dropout: float = 0.25

    def setup(self):
        self.drop, self.layer = Dropout(self.dropout), nn.Dense(self.size)
        self.scale = self.param('scale', nn.initializers.constant(2.0), ())

    def __call__(self, x, train=False):
        return {'z': self.embed(x, train), 'scale': self.scale}

    def embed(self, x, train=False):
        return jnp.tanh(self.layer(self.drop(x, train)))


@dataclasses.dataclass(frozen=True)
class Task(base.Task):
    """InfoNCE between two views of each row, which the model sees one after the other."""

    rngs = ('dropout',)
    couples_rows = True

    def inputs(self, batch):
        return (batch['x'][:, 0],)

    def outputs(self, apply, batch):
        near = apply(batch['x'][:, 1], method='embed', train=apply.train)
        found = apply(*self.inputs(batch))
        return {**found, 'near': near, 'sign': jnp.sign(near[:, 0]).astype(jnp.int32)}

    def loss(self, outputs, batch):
        logits = outputs['scale'] * outputs['z'] @ outputs['near'].T
        losses = -jnp.diagonal(jax.nn.log_softmax(logits))
        right = logits.argmax(-1) == jnp.arange(len(logits))
        return {
            'pairs': Term(losses.sum(), len(losses)),
            'right': Term(right.sum(), len(losses), weight=0.0),
        }

    def predict(self, apply, batch):
        return {'z': apply(*self.inputs(batch))['z']}


def make_batch(step=0):
    x = np.random.default_rng(step).normal(size=(ROWS, 1, WIDTH))
    noise = np.random.default_rng(step + 1).normal(size=(ROWS, 2, WIDTH))
    return {'x': (x + 0.3 * noise).astype(np.float32), 'index': np.arange(ROWS, dtype=np.int32)}
