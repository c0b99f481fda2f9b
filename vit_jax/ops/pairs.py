"""Contrastive losses over all pairs of images and texts of a batch, some texts at a time.

The sigmoid loss is that of SigLIP, Zhai et al., 2023, arXiv:2303.15343, the softmax that of CLIP,
Radford et al., 2021, arXiv:2103.00020. The matrix of all logits [B B] is computed in blocks [B C],
in the backward pass once more, so that a block is all that is held of it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from vit_jax.array_types import Bool, Float, Shaped

LOWEST = -1e30  # logit of padding: its exponential is 0, and differences stay finite
Rows = Float[Array, ' B']
Block = Float[Array, 'B C']
Matches = Bool[Array, 'B C']
Parts = tuple[Array, ...]
Best = tuple[Rows, Rows]
Columns = Shaped[Array, ' C']


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
    """Losses of pairs, and whether the best match is a right one.

    That is 1, or 0 if a wrong one is as near, or NaN if a logit is not finite.

    Attributes:
      of_image: for every image, of its logits with all texts; 0 for padding.
      of_text: for every text; zeros if the loss does not distinguish the two.
      right_text: of every image.
      right_image: of every text.
    """

    of_image: Rows
    of_text: Rows
    right_text: Rows
    right_image: Rows


def sigmoid(pairs: Pairs, chunk: int) -> Losses:
    """Minus the sum over texts of log sigmoid(+-logit), + for matches; algorithm 1 of SigLIP.

    Args:
      pairs: of the whole batch.
      chunk: texts compared with all images at a time.
    """

    def block(logits: Block, same: Matches, real: Matches) -> tuple[Parts, Columns]:
        losses = -jax.nn.log_sigmoid(jnp.where(same, logits, -logits))
        return (jnp.where(real, losses, 0).sum(1),), jnp.zeros(losses.shape[1])

    return _over_blocks(pairs, chunk, block, lambda losses: losses.sum(0))


def softmax(pairs: Pairs, chunk: int) -> Losses:
    """Cross entropy of the right one among all texts, and among all images.

    If several match, they share the probability of the target evenly. Arguments as of `sigmoid`.
    """

    def block(logits: Block, same: Matches, real: Matches) -> tuple[Parts, Columns]:
        logits, right = jnp.where(real, logits, LOWEST), jnp.where(same, logits, 0)
        of_text = jax.nn.logsumexp(logits, 0) - right.sum(0) / jnp.maximum(same.sum(0), 1)
        return (jax.nn.logsumexp(logits, 1), right.sum(1), same.sum(1)), of_text

    def of_image(total: Array, right: Array, count: Array) -> Rows:
        return jax.nn.logsumexp(total, 0) - right.sum(0) / jnp.maximum(count.sum(0), 1)

    return _over_blocks(pairs, chunk, block, of_image)


def _over_blocks(
    pairs: Pairs,
    chunk: int,
    block: Callable[[Block, Matches, Matches], tuple[Parts, Columns]],
    of_image: Callable[..., Rows],
) -> Losses:
    """Losses from `block`, which has all images and some texts.

    Args:
      pairs: of the whole batch.
      chunk: texts of a block.
      block: (logits, which of them match, which are not padding) -> (parts of the images' losses,
        the texts' losses).
      of_image: makes the images' losses of these parts, each stacked over the blocks, [n B].
    """
    rows = len(pairs.image)

    def one(texts: tuple[Array, Array, Array]) -> tuple[Parts, Columns, Best, Columns]:
        text, mask, keys = texts
        logits = jnp.einsum('be,ce->bc', pairs.image, text, precision='highest')
        logits = pairs.scale * logits + pairs.bias
        real = (pairs.mask[:, None] > 0) & (mask > 0)
        same = (pairs.keys[:, None] == keys).all(-1) & real
        parts, of_text = block(logits, same, real)
        logits = jax.lax.stop_gradient(logits)
        right, wrong = (jnp.where(those, logits, LOWEST) for those in (same, real & ~same))
        return parts, of_text, (right.max(1), wrong.max(1)), _leads(right.max(0), wrong.max(0))

    texts = (pairs.text, pairs.mask, pairs.keys)
    if rows <= chunk:
        found = jax.tree.map(lambda x: x[None], one(texts))
    else:
        found = jax.lax.map(jax.checkpoint(one), jax.tree.map(lambda x: _cut(x, chunk), texts))
    parts, of_text, (right, wrong), right_image = found
    right_text = _leads(right.max(0), wrong.max(0))
    found = of_image(*parts), _joined(of_text, rows), right_text, _joined(right_image, rows)
    return Losses(*(values * pairs.mask for values in found))


def _leads(right: Columns, wrong: Columns) -> Columns:
    """1 where the right one is higher, else 0; NaN where one of them is not finite."""
    return jnp.where(jnp.isfinite(right - wrong), right > wrong, jnp.nan)


def _cut(x: Shaped[Array, 'B *rest'], chunk: int) -> Shaped[Array, 'n C *rest']:
    """Blocks of `chunk` rows, the last one padded with zeros."""
    short = -len(x) % chunk
    padded = jnp.pad(x, ((0, short), *((0, 0),) * (x.ndim - 1)))
    return padded.reshape(-1, chunk, *x.shape[1:])


def _joined(x: Shaped[Array, 'n C'], rows: int) -> Shaped[Array, ' B']:
    """The inverse of `_cut`."""
    return x.reshape(-1)[:rows]
