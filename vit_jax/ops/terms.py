"""Terms of a loss: sums over examples, tokens, boxes or patches, and their counts.

A loss may have several normalizers, and a count may be small or zero in a part of the batch. So a
term is a sum and a count, and sums are divided by counts of the whole global batch.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from vit_jax.array_types import Float, Num, Shaped


class Term(NamedTuple):
    """One term of a loss over the rows of a batch; its mean is `sum / count`.

    Attributes:
      sum: Sum over examples, tokens, boxes or patches.
      count: Their number, or the sum of their weights; no gradient flows into it.
      weight: Weight of the mean in the loss; 0 for a metric outside of the loss.
      least: Minimum of the count of a whole batch that the sum is divided by.
    """

    sum: Num[Array, '']
    count: Num[Array, ''] | int  # type: ignore[assignment]  # tuples have a method of this name
    weight: float = 1.0
    least: float = 0.0


Scalars = dict[str, Float[Array, '']]


def counts(terms: dict[str, Term]) -> Scalars:
    """Return only the counts, float32."""
    return {
        name: jax.lax.stop_gradient(jnp.asarray(term.count, jnp.float32))
        for name, term in terms.items()
    }


def means(terms: dict[str, Term], over: Scalars | None = None) -> Scalars:
    """Compute `sum / count` of each term, 0 where the count is 0 and may be; float32.

    Args:
      terms: Terms of a batch or a part of a batch.
      over: Counts of the whole batch if `terms` belong to a part; the results add up to the mean.
    """
    over = counts(terms) if over is None else over
    over = {name: jnp.maximum(over[name], term.least) for name, term in terms.items()}
    return {
        name: jnp.where(over[name] == 0, 0, term.sum / jnp.where(over[name] == 0, 1, over[name]))
        for name, term in terms.items()
    }


def hits(scores: Float[Array, '*B C'], label: Shaped[Array, '*B']) -> Float[Array, '*B']:
    """1 where the label has the highest score, else 0; NaN where a score is not finite.

    Without the check, `argmax` takes NaN for the highest score, and the first of equal scores.
    """
    return jnp.where(jnp.isfinite(scores.max(-1)), scores.argmax(-1) == label, jnp.nan)


def total(terms: dict[str, Term], of: Scalars) -> Float[Array, '']:
    """Compute the loss, the weighted sum of means. A term with weight 0 cannot make it NaN."""
    weighted = (term.weight * of[name] for name, term in terms.items() if term.weight)
    return sum(weighted, start=jnp.zeros((), jnp.float32))
