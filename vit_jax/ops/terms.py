"""The terms of a loss: sums over examples, tokens, boxes or patches, and their counts.

A loss may have several normalizers, and in a part of the batch the count of one may be small or
zero. So a term is a sum and a count, and sums are divided by counts of the whole global batch.
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
      sum: the sum over examples, tokens, boxes or patches.
      count: their number, or the sum of their weights. No gradient flows into it.
      weight: of the mean in the loss; 0 for a metric outside of the loss.
    """

    sum: Num[Array, '']
    count: Num[Array, ''] | int  # type: ignore[assignment]  # tuples have a method of this name
    weight: float = 1.0


Scalars = dict[str, Float[Array, '']]


def counts(terms: dict[str, Term]) -> Scalars:
    """The counts alone, float32."""
    return {
        name: jax.lax.stop_gradient(jnp.asarray(term.count, jnp.float32))
        for name, term in terms.items()
    }


def means(terms: dict[str, Term], over: Scalars | None = None) -> Scalars:
    """`sum / count` of every term, 0 where the count is 0; float32.

    Args:
      terms: of a batch or a part of a batch.
      over: the counts of the whole batch, if `terms` are of a part; the results add up to the mean.
    """
    over = counts(terms) if over is None else over
    return {
        name: jnp.where(over[name] == 0, 0, term.sum / jnp.where(over[name] == 0, 1, over[name]))
        for name, term in terms.items()
    }


def hits(scores: Float[Array, '*B C'], label: Shaped[Array, '*B']) -> Float[Array, '*B']:
    """1 where the highest score is that of the label, else 0; NaN where a score is, or infinite.

    `argmax` alone takes NaN for the highest, and the first for the label.
    """
    return jnp.where(jnp.isfinite(scores.max(-1)), scores.argmax(-1) == label, jnp.nan)


def total(terms: dict[str, Term], of: Scalars) -> Float[Array, '']:
    """The loss: the means `of` the terms, weighted. A term of weight 0 cannot make it NaN."""
    weighted = (term.weight * of[name] for name, term in terms.items() if term.weight)
    return sum(weighted, start=jnp.zeros((), jnp.float32))
