"""Match images with their captions: the sigmoid loss of SigLIP, or the softmax of CLIP."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
from jax import Array

from vit_jax.array_types import Float, Int
from vit_jax.errors import UserError, check_choice
from vit_jax.ops import pairs, sequences
from vit_jax.ops.sequences import Sequences
from vit_jax.ops.terms import Term
from vit_jax.tasks import base
from vit_jax.tasks.base import Apply, Batch

LOSSES = {'sigmoid': pairs.sigmoid, 'softmax': pairs.softmax}


@dataclasses.dataclass(frozen=True)
class Task(base.Task):
    """Every image with its text against all other texts of the global batch, and vice versa.

    Attributes:
      loss_name: 'sigmoid', Zhai et al., 2023, arXiv:2303.15343, or 'softmax', Radford et al., 2021,
        arXiv:2103.00020.
      text: the field of the data that holds the ids of the captions.
      repeats: texts that occur more than once in a batch are 'negatives' of one another's images,
        as in the papers, or 'matches', for captions made of few words.
      chunk: texts compared with all images at a time, so that the logits of a large batch are never
        held at once.
      locked_image: no gradient flows into the image tower, as in locked-image tuning (LiT,
        arXiv:2111.07991). Add its parameters to `config.optim.freeze` too, or weight decay will
        shrink them.
      value_range: range to which bytes 0..255 are scaled for the model.
      prompts: ids of the texts that predictions choose from.
    """

    loss_name: str = 'sigmoid'
    text: str = 'caption'
    repeats: str = 'negatives'
    chunk: int = 4096
    locked_image: bool = False
    value_range: tuple[float, float] = (-1.0, 1.0)
    prompts: tuple[tuple[int, ...], ...] = ()

    rngs = ('dropout',)
    couples_rows = True

    def __post_init__(self) -> None:
        check_choice('config.task.loss_name', self.loss_name, LOSSES)
        check_choice('config.task.repeats', self.repeats, ('negatives', 'matches'))
        self.require('chunk', self.chunk >= 1, 'at least 1')

    def inputs(
        self, batch: Batch
    ) -> tuple[Float[Array, 'B H W C'] | Sequences, Int[Array, 'B N'] | None]:
        """Images in `value_range`, or sequences of their patches, and the ids of their captions, if
        the batch has any.
        """
        return sequences.of_batch(batch, self.value_range), batch.get(self.text)

    def outputs(self, apply: Apply, batch: Batch) -> dict[str, jax.Array]:
        """Embeddings `image` and `text` [B E], `scale` and `bias`; no `text` without captions."""
        found = apply(*self.inputs(batch))
        if self.locked_image:
            found = found | {'image': jax.lax.stop_gradient(found['image'])}
        return found

    def loss(self, outputs: dict[str, jax.Array], batch: Batch) -> dict[str, Term]:
        """The loss, a mean over pairs, and how often the best of the batch is a right one.

        Raises:
          UserError: if the batch has no ids of captions.
        """
        if self.text not in batch:
            raise UserError(
                f'task siglip needs captions, but the examples have {", ".join(sorted(batch))}: '
                f"add tokenize('{self.text}', 64) to the transforms"
            )
        mask, ids = self.mask(batch), batch[self.text]
        keys = ids if self.repeats == 'matches' else jnp.arange(len(ids))[:, None]
        made = pairs.Pairs(
            outputs['image'], outputs['text'], outputs['scale'], outputs['bias'], mask, keys
        )
        found = LOSSES[self.loss_name](made, self.chunk)
        # A softmax is the mean of two; the sigmoid's pairs are counted for the images alone.
        share = 0.5 if self.loss_name == 'softmax' else 1.0
        losses = share * (found.of_image + found.of_text)
        count = mask.sum()
        return {
            'loss': Term(losses.sum(), count),
            'right_text': Term(found.right_text.sum(), count, weight=0.0),
            'right_image': Term(found.right_image.sum(), count, weight=0.0),
        }

    def predict(self, apply: Apply, batch: Batch) -> dict[str, jax.Array]:
        """Embeddings, and the match of every image with each of `prompts`.

        Returns:
          features: of images [B E], if there are any.
          text: of captions [B E], if there are any.
          probs: of `prompts` [B T]: the sigmoid of the logits, each for itself, or their softmax.
          similarity: cosines of images and `prompts` [B T].
        """
        found = {}
        if 'image' in batch or 'patches' in batch:
            found = apply(self.inputs(batch)[0])
        made = {'features': found['image']} if found else {}
        if (ids := batch.get(self.text)) is not None:
            made['text'] = apply(ids, method='embed_texts')
        if self.prompts and found:
            texts = apply(jnp.array(self.prompts), method='embed_texts')
            similarity = jnp.einsum('be,te->bt', found['image'], texts, precision='highest')
            logits = found['scale'] * similarity + found['bias']
            choose = jax.nn.sigmoid if self.loss_name == 'sigmoid' else jax.nn.softmax
            made |= {'probs': choose(logits), 'similarity': similarity}
        return made
