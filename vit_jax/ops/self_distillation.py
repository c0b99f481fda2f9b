"""Self-distillation: balanced targets, cross entropy, KoLeo and Gram losses, and block masks.

The losses follow DINOv2, arXiv:2304.07193, section 4, and the Gram anchoring of DINOv3,
arXiv:2508.10104, section 4. Masks consist of random rectangular blocks: BEiT, arXiv:2106.08254,
algorithm 1.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from vit_jax.array_types import Bool, Float, Int, Key, Shaped


def sinkhorn(
    logits: Float[Array, 'N K'], real: Shaped[Array, ' N'], iterations: int = 3
) -> Float[Array, 'N K']:
    """Compute prototype probabilities balanced so that all prototypes get nearly equal shares.

    Sinkhorn-Knopp in log space: columns and rows of exp(logits) are divided by their sums in turn,
    rows last (Caron et al., 2020, arXiv:2006.09882, section 3.1).

    Args:
      logits: Logits divided by the temperature.
      real: Above 0, or true, for real rows; other rows get probabilities but no share.
      iterations: Number of pairs of divisions.
    """
    absent = jnp.where(real > 0, 0.0, -jnp.inf)[:, None]
    for _ in range(iterations):
        shares = jax.nn.logsumexp(logits + absent, axis=0)
        logits = jax.nn.log_softmax(logits - jnp.where(jnp.isfinite(shares), shares, 0.0))
    return jnp.exp(logits)


def cross_entropy(
    targets: Float[Array, '*N K'], logits: Float[Array, '*N K'], temperature: float
) -> Float[Array, '*N']:
    """-sum_k targets_k log softmax(logits / temperature)_k, in nats."""
    return -(targets * jax.nn.log_softmax(logits / temperature)).sum(-1)


def koleo(
    features: Float[Array, 'N D'], real: Shaped[Array, ' N'], eps: float = 1e-8
) -> Float[Array, ' N']:
    """-log of the distance from each row to its nearest neighbor on the unit sphere.

    Kozachenko-Leonenko entropy estimator as a loss (Sablayrolles et al., 2019, arXiv:1806.03198,
    equation 2).

    Args:
      features: Features, not necessarily normalized.
      real: Above 0, or true, for rows that can be neighbors; at least two.
      eps: Constant added to differences and distances, and lower bound of lengths to divide by.
    """
    x = features.astype(jnp.float32)
    x = x / _length(x, eps)[:, None]
    similarity = jnp.matmul(x, x.T, precision='highest')
    is_neighbor = (real > 0) & ~jnp.eye(len(x), dtype=bool)
    nearest = jnp.where(is_neighbor, similarity, -jnp.inf).argmax(-1)
    return -jnp.log(_length(x - x[nearest] + eps, eps) + eps)


def _length(x: Float[Array, '*N D'], least: float) -> Float[Array, '*N']:
    """Return the length of vectors, at least `least`; the bound keeps the gradient finite at 0."""
    return jnp.sqrt(jnp.maximum(jnp.square(x).sum(-1), least**2))


NEGATIVES = ('kept', 'cut', 'cut_of_teacher')


def gram(
    student: Float[Array, '*B N D'],
    teacher: Float[Array, '*B N E'],
    negatives: str = 'kept',
    normalized: bool = True,
) -> Float[Array, '*B']:
    """Mean squared difference between two Gram matrices of an image's patches.

    Simeoni et al., 2025, arXiv:2508.10104, section 4.2, equation 2: the student may move its
    features as long as their mutual similarities stay the same. The equation sums over the N^2
    pairs of patches; like the authors' code, this function takes the mean, so that a weight suits
    any number of patches.

    Args:
      student, teacher: Features of the same patches; their widths may differ.
      negatives: Treatment of negative similarities: 'kept', 'cut' to 0, or 'cut_of_teacher' to cut
        only the teacher's.
      normalized: Whether similarities are cosines, as in the paper, or dot products.
    """
    student_similarity, teacher_similarity = (
        _similarities(x.astype(jnp.float32), normalized) for x in (student, teacher)
    )
    if negatives == 'cut':
        student_similarity = jnp.maximum(student_similarity, 0)
    if negatives != 'kept':
        teacher_similarity = jnp.maximum(teacher_similarity, 0)
    return jnp.square(student_similarity - teacher_similarity).mean((-2, -1))


def _similarities(x: Float[Array, '*B N D'], normalized: bool) -> Float[Array, '*B N N']:
    x = x / _length(x, 1e-12)[..., None] if normalized else x
    return jnp.einsum('...nd,...md->...nm', x, x, precision='highest')


MIN_BLOCK = 4  # patches per block, unless fewer remain to be hidden
MIN_ASPECT = 0.3  # minimum aspect ratio of a block; the maximum is its inverse
ATTEMPTS = 10  # maximum number of consecutive failures


class CropMasks(NamedTuple):
    """Masks of the G crops of an image with N patches each.

    Attributes:
      hidden: True for hidden patches.
      places: Indices of hidden patches among all G N; padded at the end of each masked crop.
      weights: 1 / number of hidden patches of the crop; 0 for padding.
    """

    hidden: Bool[Array, '*B G N']
    places: Int[Array, '*B M']
    weights: Float[Array, '*B M']


def crop_masks(
    key: Key[Array, ''], grid: tuple[int, int], crops: int, masked: int, ratios: tuple[float, float]
) -> CropMasks:
    """Draw masks for `masked` of the crops of one image.

    Args:
      key: Key of the image.
      grid: Rows and columns of patches in a crop.
      crops: Number G of crops, at least `masked`.
      masked: Number of crops with hidden patches.
      ratios: Range of the share of hidden patches, drawn uniformly for each crop.
    """
    patches, max_hidden = math.prod(grid), int(math.prod(grid) * ratios[1])
    crop_key, shares, blocks = jax.random.split(key, 3)
    masked_crops = jax.random.permutation(crop_key, crops)[:masked]
    share = jax.random.uniform(shares, (masked,), minval=ratios[0], maxval=ratios[1])
    counts = jnp.floor(share * patches).astype(int)
    keys = jax.random.split(blocks, masked)
    masks = jax.vmap(block_mask, (0, None, 0))(keys, grid, counts).reshape(masked, patches)
    indices = jnp.argsort(~masks, axis=1)[
        :, :max_hidden
    ]  # hidden ones come first: sorting is stable
    num_hidden = masks.sum(1, keepdims=True)
    weights = jnp.where(jnp.arange(max_hidden) < num_hidden, 1.0 / num_hidden.clip(1), 0.0)
    return CropMasks(
        hidden=jnp.zeros((crops, patches), bool).at[masked_crops].set(masks),
        places=(masked_crops[:, None] * patches + indices).reshape(-1),
        weights=weights.reshape(-1),
    )


def block_mask(
    key: Key[Array, ''], grid: tuple[int, int], count: Int[Array, '']
) -> Bool[Array, 'h w']:
    """Hide up to `count` patches of a grid with blocks that may overlap.

    The area of a block is between 4 patches and the number still to hide, at most half of the grid,
    and its aspect ratio log-uniform between 0.3 and 1 / 0.3. A block that does not fit, or hides
    nothing new or too much, is drawn again; after ten failures in a row the mask is final.
    """
    height, width = grid
    rows, columns = jnp.arange(height), jnp.arange(width)

    def is_unfinished(state: Any) -> Array:
        mask, _, failed = state
        return (mask.sum() < count) & (failed < ATTEMPTS)

    def add_block(state: Any) -> Any:
        mask, tries, failed = state
        area, aspect, *corner = jax.random.uniform(jax.random.fold_in(key, tries), (4,))
        remaining = jnp.minimum(count - mask.sum(), height * width // 2)
        area = MIN_BLOCK + (remaining - MIN_BLOCK) * area
        aspect = jnp.exp((1 - 2 * aspect) * math.log(MIN_ASPECT))
        h, w = jnp.round(jnp.sqrt(area * aspect)), jnp.round(jnp.sqrt(area / aspect))
        top, left = jnp.floor(corner[0] * (height - h + 1)), jnp.floor(corner[1] * (width - w + 1))
        is_inside = ((rows >= top) & (rows < top + h))[:, None]
        is_inside &= (columns >= left) & (columns < left + w)
        new = (is_inside & ~mask).sum()
        fits = (h < height) & (w < width) & (new > 0) & (new <= remaining)
        return mask | (is_inside & fits), tries + 1, jnp.where(fits, 0, failed + 1)

    start = jnp.zeros(grid, bool), jnp.int32(0), jnp.int32(0)
    return jax.lax.while_loop(is_unfinished, add_block, start)[0]
