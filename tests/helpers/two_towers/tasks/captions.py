"""Match images with captions, those of the batch or given prompts."""

import dataclasses

import jax
import jax.numpy as jnp
import optax

from vit_jax.ops import sequences
from vit_jax.ops.terms import Term
from vit_jax.tasks import base


@dataclasses.dataclass(frozen=True)
class Task(base.Task):
    """Softmax over captions and over images; identical captions share the target.

    `prompts` are ids of texts for predictions to choose from, instead of the batch's captions.
    """

    prompts: tuple[tuple[int, ...], ...] = ()
    rngs = ('dropout',)
    couples_rows = True

    def inputs(self, batch):
        image = sequences.to_range(batch['image'], (-1.0, 1.0))
        return image, batch.get('caption'), batch.get('caption_mask')

    def loss(self, outputs, batch):
        mask, ids = self.mask(batch), batch['caption']
        same = (ids[:, None] == ids).all(-1) * mask
        shares = same / jnp.maximum(same.sum(1, keepdims=True), 1)
        pair = outputs['image'], outputs['text']
        of_image, of_text = (logits(outputs['scale'], *p, mask) for p in (pair, pair[::-1]))
        right = jnp.take_along_axis(same, of_image.argmax(1)[:, None], 1)[:, 0]
        terms = {
            'of_image': (optax.softmax_cross_entropy(of_image, shares), 0.5),
            'of_text': (optax.softmax_cross_entropy(of_text, shares), 0.5),
            'accuracy': (right, 0.0),
        }
        return {k: Term((x * mask).sum(), mask.sum(), weight) for k, (x, weight) in terms.items()}

    def predict(self, apply, batch):
        """`features` [B D]; with texts, also their `probs` [B C] and `choices` [B C N]."""
        found = apply(*self.inputs(batch))
        ids, real, texts = batch.get('caption'), self.mask(batch), found.get('text')
        if self.prompts:
            ids = jnp.array(self.prompts)
            real, texts = jnp.ones(len(ids)), apply(ids, ids > 0, method='embed_text')
        if texts is None:
            return {'features': found['image']}
        probs = jax.nn.softmax(logits(found['scale'], found['image'], texts, real))
        choices = jnp.broadcast_to(ids, (len(probs), *ids.shape))
        return {'features': found['image'], 'probs': probs, 'choices': choices}


def logits(scale, these, those, real):
    """Scores of `those` for each of `these`; padding gets the lowest possible score."""
    return jnp.where(real > 0, scale * these @ those.T, -1e9)
