"""Match images with their captions: the sigmoid loss of SigLIP, or the softmax of CLIP."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import NamedTuple

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

LOWEST = -1e30  # logit of padding: its exponential is 0, and differences stay finite
Rows = Float[Array, ' B']
Block = Float[Array, 'B C']
Matches = Bool[Array, 'B C']
BlockSums = tuple[Array, ...]
Best = tuple[Rows, Rows]
Columns = Shaped[Array, ' C']


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
      locked_image: let no gradient flow into the image tower, as in locked-image tuning (LiT,
        arXiv:2111.07991). Add its parameters to `config.optim.freeze` too, or weight decay will
        shrink them.
      value_range: range to which bytes 0..255 are scaled for the model.
      mean, std: normalization of each channel of images in [0, 1]; empty for `value_range`.
      prompts: ids of the texts that predictions choose from.
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

    rngs = ('dropout',)
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
        """Scaled images, or sequences of their patches, and the ids of their captions, if the batch
        has any.
        """
        images = sequences.from_batch(batch, self.value_range, self.normalization)
        return images, batch.get(self.text)

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
        made = Pairs(
            outputs['image'], outputs['text'], outputs['scale'], outputs['bias'], mask, keys
        )
        found = LOSSES[self.loss_name](made, self.chunk)
        # A softmax is the mean of two; the sigmoid's pairs are counted for the images alone.
        share = 0.5 if self.loss_name == 'softmax' else 1.0
        losses = share * (found.image_losses + found.text_losses)
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


class Pairs(NamedTuple):
    """Embeddings of matching images and texts, row by row.

    Attributes:
      image, text: [B E].
      scale, bias: logits are scale * <image, text> + bias.
      mask: 1 for pairs and 0 for padding.
      keys: a text matches an image if their rows here are equal, [B K].
    """

    image: Float[Array, 'B E']
    text: Float[Array, 'B E']
    scale: Float[Array, '']
    bias: Float[Array, '']
    mask: Float[Array, ' B']
    keys: Shaped[Array, 'B K']


class Losses(NamedTuple):
    """Losses of pairs, and whether the best match is right: 1, or 0 if a wrong one is as near.

    It is NaN if a logit is not finite.

    Attributes:
      image_losses: for every image, of its logits with all texts; 0 for padding.
      text_losses: for every text; zeros if the loss does not distinguish the two.
      right_text: of every image.
      right_image: of every text.
    """

    image_losses: Rows
    text_losses: Rows
    right_text: Rows
    right_image: Rows


def sigmoid(pairs: Pairs, chunk: int) -> Losses:
    """Minus the sum over texts of log sigmoid(+-logit), + for matches; algorithm 1 of SigLIP.

    Args:
      pairs: of the whole batch.
      chunk: texts compared with all images at a time.
    """

    def block(logits: Block, same: Matches, real: Matches) -> tuple[BlockSums, Columns]:
        losses = -jax.nn.log_sigmoid(jnp.where(same, logits, -logits))
        return (jnp.where(real, losses, 0).sum(1),), jnp.zeros(losses.shape[1])

    return _losses_by_blocks(pairs, chunk, block, lambda losses: losses.sum(0))


def softmax(pairs: Pairs, chunk: int) -> Losses:
    """Cross entropy of the right one among all texts, and among all images.

    If several match, they share the probability of the target evenly. Arguments as of `sigmoid`.
    """

    def block(logits: Block, same: Matches, real: Matches) -> tuple[BlockSums, Columns]:
        logits, right = jnp.where(real, logits, LOWEST), jnp.where(same, logits, 0)
        text_losses = jax.nn.logsumexp(logits, 0) - right.sum(0) / jnp.maximum(same.sum(0), 1)
        return (jax.nn.logsumexp(logits, 1), right.sum(1), same.sum(1)), text_losses

    def image_losses(total: Array, right: Array, count: Array) -> Rows:
        return jax.nn.logsumexp(total, 0) - right.sum(0) / jnp.maximum(count.sum(0), 1)

    return _losses_by_blocks(pairs, chunk, block, image_losses)


def _losses_by_blocks(
    pairs: Pairs,
    chunk: int,
    block: Callable[[Block, Matches, Matches], tuple[BlockSums, Columns]],
    image_losses: Callable[..., Rows],
) -> Losses:
    """Losses from `block`, which has all images and some texts.

    Args:
      pairs: of the whole batch.
      chunk: texts of a block.
      block: (logits, which of them match, which are not padding) -> (parts of the images' losses,
        the texts' losses).
      image_losses: makes the images' losses of these parts, each stacked over the blocks, [n B].
    """
    rows = len(pairs.image)

    def one(texts: tuple[Array, Array, Array]) -> tuple[BlockSums, Columns, Best, Columns]:
        text, mask, keys = texts
        logits = jnp.einsum('be,ce->bc', pairs.image, text, precision='highest')
        logits = pairs.scale * logits + pairs.bias
        real = (pairs.mask[:, None] > 0) & (mask > 0)
        same = (pairs.keys[:, None] == keys).all(-1) & real
        parts, text_losses = block(logits, same, real)
        logits = jax.lax.stop_gradient(logits)
        right, wrong = (jnp.where(those, logits, LOWEST) for those in (same, real & ~same))
        return (
            parts,
            text_losses,
            (right.max(1), wrong.max(1)),
            _right_leads(right.max(0), wrong.max(0)),
        )

    texts = (pairs.text, pairs.mask, pairs.keys)
    if rows <= chunk:
        found = jax.tree.map(lambda x: x[None], one(texts))
    else:
        found = jax.lax.map(jax.checkpoint(one), jax.tree.map(lambda x: _cut(x, chunk), texts))
    parts, text_losses, (right, wrong), right_image = found
    right_text = _right_leads(right.max(0), wrong.max(0))
    found = image_losses(*parts), _join(text_losses, rows), right_text, _join(right_image, rows)
    return Losses(*(values * pairs.mask for values in found))


def _right_leads(right: Columns, wrong: Columns) -> Columns:
    """1 where the right logit is higher, else 0; NaN where one of the two is not finite."""
    return jnp.where(jnp.isfinite(right - wrong), right > wrong, jnp.nan)


def _cut(x: Shaped[Array, 'B *rest'], chunk: int) -> Shaped[Array, 'n C *rest']:
    """Blocks of `chunk` rows, the last one padded with zeros."""
    short = -len(x) % chunk
    padded = jnp.pad(x, ((0, short), *((0, 0),) * (x.ndim - 1)))
    return padded.reshape(-1, chunk, *x.shape[1:])


def _join(x: Shaped[Array, 'n C'], rows: int) -> Shaped[Array, ' B']:
    """The inverse of `_cut`."""
    return x.reshape(-1)[:rows]


LOSSES = {'sigmoid': sigmoid, 'softmax': softmax}
