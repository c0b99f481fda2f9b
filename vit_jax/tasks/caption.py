"""Image captioning.

Tschannen et al., 2023, arXiv:2306.07915: in training, a share of the captions is predicted in
parallel, all tokens only from the image, and the others autoregressively.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from vit_jax.array_types import Float, Int
from vit_jax.errors import UserError
from vit_jax.nn.stochastic import example_keys
from vit_jax.ops import sequences
from vit_jax.ops.search import PAD, Decoded, Search, generate
from vit_jax.ops.sequences import Normalization
from vit_jax.ops.terms import Term, hits
from vit_jax.tasks import base
from vit_jax.tasks.base import Apply, Batch, Sums
from vit_jax.tasks.translate import shift_right, token_loss, token_sums


@dataclasses.dataclass(frozen=True)
class Task(base.Task):
    """Predict captions; cross entropy of the tokens, without padding.

    Attributes:
      parallel: Share of the captions that training predicts in parallel, drawn for each example and
        step: 0.75 for CapPa, 0 for Cap.
      caption: Batch field with the token ids of captions: eos at the end, then padding.
      search: Decoding method, 'beam' or 'greedy'.
      beams, alpha: See `vit_jax.ops.search.Search`.
      value_range: Range to which bytes 0..255 are scaled for the model.
      mean, std: Normalization of each channel of images in [0, 1]; empty for `value_range`.
      prompts: Token ids of texts to score in `predict`, instead of generating captions.
    """

    parallel: float = 0.75
    caption: str = 'caption'
    search: str = 'beam'
    beams: int = 4
    alpha: float = 0.6
    value_range: tuple[float, float] = (-1.0, 1.0)
    mean: tuple[float, ...] = ()
    std: tuple[float, ...] = ()
    prompts: tuple[tuple[int, ...], ...] = ()

    rngs = ('dropout',)
    inert = (*base.Task.inert, 'parallel')

    def __post_init__(self) -> None:
        self.require('parallel', 0 <= self.parallel <= 1, 'in [0, 1]')
        self.require('search', self.search in ('beam', 'greedy'), "'beam' or 'greedy'")
        self.require('beams', self.beams >= 1, 'at least 1')
        self.require('alpha', self.alpha >= 0, 'at least 0')
        is_whole = len(self.std) == len(self.mean) and min(self.std, default=1) > 0
        self.require('std', is_whole, 'positive, and given with mean for as many channels')

    @property
    def normalization(self) -> Normalization | None:
        return (self.mean, self.std) if self.std else None

    @property
    def decoding(self) -> Search:
        """Search that `predict` generates captions with."""
        return Search(self.search, self.beams, self.alpha)

    def augment(self, key: jax.Array, batch: Batch) -> Batch:
        """Add `parallel` [B]: which captions are predicted in parallel."""
        if not self.parallel:
            return batch
        keys = example_keys(key, len(jax.tree.leaves(batch)[0]))
        is_parallel = jax.vmap(lambda key: jax.random.bernoulli(key, self.parallel))(keys)
        return batch | {'parallel': is_parallel}

    def inputs(self, batch: Batch) -> tuple[Array, ...]:
        """Return scaled images, and captions shifted right and `parallel` if the batch has them."""
        images = sequences.to_range(batch['image'], self.value_range, self.normalization)
        if self.caption not in batch:
            return (images,)
        is_parallel = (batch['parallel'],) if 'parallel' in batch else ()
        return images, shift_right(batch[self.caption]), *is_parallel

    def attention_inputs(self, apply: Apply, batch: Batch) -> tuple[Array, ...]:
        """Return images and their captions; without captions, generate them greedily."""
        if self.caption in batch:
            return self.inputs(batch)
        (images,) = self.inputs(batch)
        captions = _generate_captions(
            apply, apply(images, method='encode'), Search('greedy'), self.mask(batch)
        )
        return images, shift_right(captions.tokens[:, 0])

    def loss(self, outputs: dict[str, Array], batch: Batch) -> dict[str, Term]:
        """Mean over captions of the mean loss per token, in nats.

        Metrics: the same for captions predicted in parallel and for causal ones.

        Raises:
          UserError: if the batch has no token ids of captions.
        """
        ids, mask = self._ids(batch), self.mask(batch)
        losses = caption_losses(outputs['logits'], ids) * mask
        terms = {'loss': Term(losses.sum(), mask.sum())}
        if 'parallel' in batch:
            for name, selected in (('parallel', batch['parallel']), ('causal', ~batch['parallel'])):
                total, count = jnp.sum(losses * selected), jnp.sum(mask * selected)
                terms[f'{name}_loss'] = Term(total, count, weight=0.0)
        return terms

    def evaluate(self, apply: Apply, batch: Batch) -> Sums:
        """Compute the `loss` of causal prediction, and accuracies with teacher forcing.

        `token_accuracy` is the share of correct tokens. `caption_accuracy` is the share of captions
        whose tokens are all correct; exactly these are reproduced by greedy search.
        """
        logits, ids = self.outputs(apply, batch)['logits'], self._ids(batch)
        mask, count = self.mask(batch), (ids != PAD).sum()
        is_correct = jnp.where(ids == PAD, 1.0, hits(logits, ids)).min(-1)
        return {
            'loss': (jnp.sum(caption_losses(logits, ids) * mask), mask.sum()),
            'token_accuracy': (token_sums(logits, ids)['token_accuracy'], count),
            'caption_accuracy': (jnp.sum(is_correct * mask), mask.sum()),
        }

    def predict(self, apply: Apply, batch: Batch) -> dict[str, Array]:
        """Generate captions, or score `prompts`.

        Returns:
          features: mean of the image's tokens [B D].
          tokens: best caption [B T], padded with 0, if there are no `prompts`.
          score: log-likelihood of the caption, divided by the length penalty [B].
          likelihood: log-likelihood of each prompt [B P].
        """
        memory = apply(self.inputs(batch)[0], method='encode')
        predictions = {'features': memory.tokens.mean(1).astype(jnp.float32)}
        if self.prompts:
            return predictions | {'likelihood': self._likelihood(apply, memory)}
        captions = _generate_captions(apply, memory, self.decoding, self.mask(batch))
        return predictions | {'tokens': captions.tokens[:, 0], 'score': captions.scores[:, 0]}

    def _ids(self, batch: Batch) -> Int[Array, 'B T']:
        if self.caption not in batch:
            raise UserError(
                f'task caption needs captions, but the examples have {", ".join(sorted(batch))}: '
                f"add tokenize('{self.caption}', 64) to the transforms"
            )
        return batch[self.caption]

    def _likelihood(self, apply: Apply, memory: Any) -> Float[Array, 'B P']:
        """Compute the log-likelihood of each prompt for each image, one by one to save memory."""
        rows = len(memory.tokens)

        def score(prompt: Int[Array, ' T']) -> Float[Array, ' B']:
            ids = jnp.broadcast_to(prompt, (rows, len(prompt)))
            logits = apply(memory, shift_right(ids), method='decode')
            return -jnp.sum(token_loss(logits, ids) * (ids != PAD), axis=-1)

        return jax.lax.map(score, jnp.array(self.prompts, jnp.int32)).T


def caption_losses(logits: Float[Array, 'B T V'], ids: Int[Array, 'B T']) -> Float[Array, ' B']:
    """Mean over each caption's tokens of -log p, in nats; 0 for captions with only padding."""
    real = ids != PAD
    return jnp.sum(token_loss(logits, ids) * real, axis=1) / jnp.maximum(real.sum(axis=1), 1)


def _generate_captions(
    apply: Apply, memory: Any, search: Search, mask: Float[Array, ' B']
) -> Decoded:
    """Generate captions of encoded images; empty ones for padding."""
    max_tokens = apply(method='max_tokens')
    limits = jnp.where(mask > 0, max_tokens, 0)
    return generate(apply, memory, search, max_tokens, limits)
