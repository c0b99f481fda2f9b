"""A tiny system whose loss has several normalizers, and which draws in evaluation too."""

import dataclasses

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np

from vit_jax.models import base as models
from vit_jax.nn import stochastic
from vit_jax.ops.terms import Term
from vit_jax.tasks import base

ROWS, BOXES, WIDTH = 32, 3, 4


class Model(models.Model):
    """Boxes of vectors [B N D] of which about half, drawn for each example, are set to zero."""

    hidden: int = 8

    def setup(self):
        self.first, self.second = nn.Dense(self.hidden), nn.Dense(2)

    def __call__(self, x, train=False):
        masked = self.masked(x)
        return {'masked': masked, 'out': self.second(jnp.tanh(self.first(masked)))}

    def masked(self, x):
        keys = stochastic.example_keys(self.make_rng('masking'), len(x))
        return x * jax.vmap(lambda key: jax.random.bernoulli(key, 0.5, x.shape[1:]))(keys)


@dataclasses.dataclass(frozen=True)
class Task(base.Task):
    """A loss over examples, one over the boxes that are there, and one over what never is.

    Attributes:
      counts_outputs: whether a count is made of the model's outputs, not of the batch alone.
    """

    counts_outputs: bool = False

    rngs = ('dropout', 'masking')

    def inputs(self, batch):
        return (batch['x'],)

    def loss(self, outputs, batch):
        first, second = jnp.moveaxis(outputs['out'], -1, 0)
        there = batch['there']
        count = jnp.sum(there, dtype=jnp.int32)
        if self.counts_outputs:
            count += jnp.sum(first > 0)
        return {
            'example': Term(jnp.sum((first - 1) ** 2), len(first)),
            'box': Term(jnp.sum(jnp.abs(second - 2) * there), count, weight=5.0),
            'never': Term(jnp.sum(second * 0), jnp.zeros(()), weight=2.0),
            'size': Term(jnp.sum(second * there), count, weight=0.0),
        }

    def evaluate(self, apply, batch):
        row = apply(*self.inputs(batch))['masked'].sum((1, 2))
        return {'masked': (jnp.sum(row * batch['mask']), jnp.sum(batch['mask']))}

    def predict(self, apply, batch):
        (x,) = self.inputs(batch)
        return {'masked': apply(x)['masked'], 'method': apply(x, method='masked')}


def make_batch(step=0):
    """Few rows have boxes: no microbatch but the first, and no device but two."""
    rng = np.random.default_rng(step)
    there = np.zeros((ROWS, BOXES), bool)
    there[0, :2] = there[8] = True
    x = rng.normal(size=(ROWS, BOXES, WIDTH)).astype(np.float32)
    return {'x': x, 'there': there, 'index': np.arange(ROWS, dtype=np.int32)}


def plain_loss(outputs, batch):
    """The loss of `Task` on a whole batch, written down as a formula."""
    first, second = outputs['out'][..., 0], outputs['out'][..., 1]
    box = jnp.abs(second - 2)[batch['there']].mean()
    example = ((first - 1) ** 2).sum() / ROWS
    size = second[batch['there']].mean()
    return example + 5 * box, {'example': example, 'box': box, 'size': size}
