"""Contrastive learning of images and captions: the sigmoid loss of SigLIP, or CLIP's softmax."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import ClassVar, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from vit_jax.array_types import Bool, Float, Int, Shaped
from vit_jax.errors import UserError, check_choice
from vit_jax.ops import sequences
from vit_jax.ops.sequences import Normalization, Sequences
from vit_jax.ops.terms import Term
from vit_jax.tasks import base
from vit_jax.tasks.base import Apply, Batch

LOWEST = -1e30  # logit of padding: exp is 0, and differences stay finite
Rows = Float[Array, ' B']
Block = Float[Array, 'B C']
Matches = Bool[Array, 'B C']
BlockSums = tuple[Array, ...]
Best = tuple[Rows, Rows]
Columns = Shaped[Array, ' C']


@dataclasses.dataclass(frozen=True)
class Task(base.Task):
    """Contrast each image and its text with all other texts of the global batch, and vice versa.

    Attributes:
      loss_name: 'sigmoid', Zhai et al., 2023, arXiv:2303.15343, or 'softmax', Radford et al., 2021,
        arXiv:2103.00020.
      text: Batch field with the token ids of captions.
      repeats: Whether equal texts in a batch count as 'negatives' of each other's images, as in the
        papers, or as 'matches', for short captions.
      chunk: Number of texts compared with all images at a time, to limit the memory for logits.
      locked_image: Stop the gradient into the image tower, as in locked-image tuning (LiT,
        arXiv:2111.07991). Also add its parameters to `config.optim.freeze`, or weight decay will
        shrink them.
      value_range: Range to which bytes 0..255 are scaled for the model.
      mean, std: Normalization of each channel of images in [0, 1]; empty for `value_range`.
      prompts: Token ids of texts to compare with images in `predict`.
    """

    loss_name: str = 'sigmoid'
    text: str = 'caption'
    repeats: str = 'negatives'
    chunk: int = 4096
    locked_image: bool = False
    value_range: tuple[float, float] = (-1.0, 1.0)
    mean: tuple[float, ...] = ()
    std: tuple[float, ...] = ()
    prompts: tuple[tuple[int, ...], ...] = ()

    rngs: ClassVar[tuple[str, ...]] = ('dropout',)
    couples_rows = True

    def __post_init__(self) -> None:
        check_choice('config.task.loss_name', self.loss_name, LOSSES)
        check_choice('config.task.repeats', self.repeats, ('negatives', 'matches'))
        self.require('chunk', self.chunk >= 1, 'at least 1')
        is_whole = len(self.std) == len(self.mean) and min(self.std, default=1) > 0
        self.require('std', is_whole, 'positive, and given with mean for as many channels')

    @property
    def normalization(self) -> Normalization | None:
        return (self.mean, self.std) if self.std else None

    def inputs(
        self, batch: Batch
    ) -> tuple[Float[Array, 'B H W C'] | Sequences, Int[Array, 'B N'] | None]:
        """Return scaled images, or sequences of their patches, and token ids of captions."""
        images = sequences.from_batch(batch, self.value_range, self.normalization)
        return images, batch.get(self.text)

    def outputs(self, apply: Apply, batch: Batch) -> dict[str, jax.Array]:
        """Return the embeddings `image` and, with captions, `text` [B E]; `scale` and `bias`."""
        outputs = apply(*self.inputs(batch))
        if self.locked_image:
            outputs = outputs | {'image': jax.lax.stop_gradient(outputs['image'])}
        return outputs

    def loss(self, outputs: dict[str, jax.Array], batch: Batch) -> dict[str, Term]:
        """Mean over pairs of the loss, and how often the best match in the batch is correct.

        Raises:
          UserError: if the batch has no token ids of captions.
        """
        if self.text not in batch:
            raise UserError(
                f'task siglip needs captions, but the examples have {", ".join(sorted(batch))}: '
                f"add tokenize('{self.text}', 64) to the transforms"
            )
        mask, ids = self.mask(batch), batch[self.text]
        keys = ids if self.repeats == 'matches' else jnp.arange(len(ids))[:, None]
        pairs = Pairs(
            outputs['image'], outputs['text'], outputs['scale'], outputs['bias'], mask, keys
        )
        losses = LOSSES[self.loss_name](pairs, self.chunk)
        # The softmax averages two losses; the sigmoid counts its pairs only for images.
        share = 0.5 if self.loss_name == 'softmax' else 1.0
        total = share * (losses.image_losses + losses.text_losses)
        count = mask.sum()
        return {
            'loss': Term(total.sum(), count),
            'right_text': Term(losses.right_text.sum(), count, weight=0.0),
            'right_image': Term(losses.right_image.sum(), count, weight=0.0),
        }

    def predict(self, apply: Apply, batch: Batch) -> dict[str, jax.Array]:
        """Return embeddings, and compare each image with each prompt.

        Returns:
          features: image embeddings [B E], if there are images.
          text: caption embeddings [B E], if there are captions.
          probs: probabilities of `prompts` [B T]: the sigmoid or softmax of the logits.
          similarity: cosine similarities of images and `prompts` [B T].
        """
        outputs = {}
        if 'image' in batch or 'patches' in batch:
            outputs = apply(self.inputs(batch)[0])
        predictions = {'features': outputs['image']} if outputs else {}
        if (ids := batch.get(self.text)) is not None:
            predictions['text'] = apply(ids, method='embed_texts')
        if self.prompts and outputs:
            texts = apply(jnp.array(self.prompts), method='embed_texts')
            similarity = jnp.einsum('be,te->bt', outputs['image'], texts, precision='highest')
            logits = outputs['scale'] * similarity + outputs['bias']
            to_probs = jax.nn.sigmoid if self.loss_name == 'sigmoid' else jax.nn.softmax
            predictions |= {'probs': to_probs(logits), 'similarity': similarity}
        return predictions


class Pairs(NamedTuple):
    """Embeddings of images and their texts, row by row.

    Attributes:
      image, text: Embeddings [B E].
      scale, bias: Coefficients of logits, scale * <image, text> + bias.
      mask: 1 for pairs and 0 for padding.
      keys: [B K]; a text matches an image if their keys are equal.
    """

    image: Float[Array, 'B E']
    text: Float[Array, 'B E']
    scale: Float[Array, '']
    bias: Float[Array, '']
    mask: Float[Array, ' B']
    keys: Shaped[Array, 'B K']


class Losses(NamedTuple):
    """Losses of pairs, and whether the best match is correct.

    Ties count as errors. Where a logit is not finite, the result is NaN.

    Attributes:
      image_losses: Loss of each image, from its logits with all texts; 0 for padding.
      text_losses: Loss of each text; zeros if the loss is the same from both sides.
      right_text: 1 for each image whose best text is correct.
      right_image: 1 for each text whose best image is correct.
    """

    image_losses: Rows
    text_losses: Rows
    right_text: Rows
    right_image: Rows


def sigmoid(pairs: Pairs, chunk: int) -> Losses:
    """-sum over texts of log sigmoid(+-logit), + for matches; algorithm 1 of SigLIP.

    Args:
      pairs: Pairs of the whole batch.
      chunk: Number of texts compared with all images at a time.
    """

    def block(logits: Block, is_match: Matches, real: Matches) -> tuple[BlockSums, Columns]:
        losses = -jax.nn.log_sigmoid(jnp.where(is_match, logits, -logits))
        return (jnp.where(real, losses, 0).sum(1),), jnp.zeros(losses.shape[1])

    return _losses_by_blocks(pairs, chunk, block, lambda losses: losses.sum(0))


def softmax(pairs: Pairs, chunk: int) -> Losses:
    """Cross entropy of the matching text among all texts, and of the image among all images.

    Several matches share the target probability evenly. For arguments see `sigmoid`.
    """

    def block(logits: Block, is_match: Matches, real: Matches) -> tuple[BlockSums, Columns]:
        logits, matching_logits = jnp.where(real, logits, LOWEST), jnp.where(is_match, logits, 0)
        text_losses = jax.nn.logsumexp(logits, 0) - matching_logits.sum(0) / jnp.maximum(
            is_match.sum(0), 1
        )
        return (jax.nn.logsumexp(logits, 1), matching_logits.sum(1), is_match.sum(1)), text_losses

    def image_losses(total: Array, matching_logits: Array, count: Array) -> Rows:
        return jax.nn.logsumexp(total, 0) - matching_logits.sum(0) / jnp.maximum(count.sum(0), 1)

    return _losses_by_blocks(pairs, chunk, block, image_losses)


def _losses_by_blocks(
    pairs: Pairs,
    chunk: int,
    block: Callable[[Block, Matches, Matches], tuple[BlockSums, Columns]],
    image_losses: Callable[..., Rows],
) -> Losses:
    """Compute losses block by block; a block has all images and `chunk` texts.

    Args:
      pairs: Pairs of the whole batch.
      chunk: Number of texts per block.
      block: (logits, matches, real pairs) -> (partial image losses, text losses).
      image_losses: Combines the partial image losses, stacked over the blocks [n B].
    """
    rows = len(pairs.image)

    def compute_block(
        texts: tuple[Array, Array, Array],
    ) -> tuple[BlockSums, Columns, Best, Columns]:
        text, mask, keys = texts
        logits = jnp.einsum('be,ce->bc', pairs.image, text, precision='highest')
        logits = pairs.scale * logits + pairs.bias
        real = (pairs.mask[:, None] > 0) & (mask > 0)
        is_match = (pairs.keys[:, None] == keys).all(-1) & real
        parts, text_losses = block(logits, is_match, real)
        logits = jax.lax.stop_gradient(logits)
        right, wrong = (jnp.where(which, logits, LOWEST) for which in (is_match, real & ~is_match))
        return (
            parts,
            text_losses,
            (right.max(1), wrong.max(1)),
            _is_right(right.max(0), wrong.max(0)),
        )

    texts = (pairs.text, pairs.mask, pairs.keys)
    if rows <= chunk:
        results = jax.tree.map(lambda x: x[None], compute_block(texts))
    else:
        results = jax.lax.map(
            jax.checkpoint(compute_block), jax.tree.map(lambda x: _split_blocks(x, chunk), texts)
        )
    parts, text_losses, (right, wrong), right_image = results
    right_text = _is_right(right.max(0), wrong.max(0))
    results = (
        image_losses(*parts),
        _join_blocks(text_losses, rows),
        right_text,
        _join_blocks(right_image, rows),
    )
    return Losses(*(values * pairs.mask for values in results))


def _is_right(match_logit: Columns, other_logit: Columns) -> Columns:
    """1 where the match has the higher logit, else 0; NaN where one of the two is not finite."""
    return jnp.where(jnp.isfinite(match_logit - other_logit), match_logit > other_logit, jnp.nan)


def _split_blocks(x: Shaped[Array, 'B *rest'], chunk: int) -> Shaped[Array, 'n C *rest']:
    """Split rows into blocks of `chunk`, the last one padded with zeros."""
    short = -len(x) % chunk
    padded = jnp.pad(x, ((0, short), *((0, 0),) * (x.ndim - 1)))
    return padded.reshape(-1, chunk, *x.shape[1:])


def _join_blocks(x: Shaped[Array, 'n C'], rows: int) -> Shaped[Array, ' B']:
    """Invert `_split_blocks`."""
    return x.reshape(-1)[:rows]


LOSSES = {'sigmoid': sigmoid, 'softmax': softmax}
