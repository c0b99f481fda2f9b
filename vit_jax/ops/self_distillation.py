"""Losses of self-distillation: balanced targets, cross entropy, and spread of features.

DINOv2, arXiv:2304.07193, section 4. All of them compare the rows of a batch.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import Array

from vit_jax.array_types import Float, Shaped


def sinkhorn(
    logits: Float[Array, 'N K'], real: Shaped[Array, ' N'], iterations: int = 3
) -> Float[Array, 'N K']:
    """Probabilities of prototypes in which all prototypes win nearly equal shares of the rows.

    Sinkhorn-Knopp in logarithms: columns and rows of exp(logits) are divided by their sums in turn,
    rows last (Caron et al., 2020, arXiv:2006.09882, section 3.1).

    Args:
      logits: divided by the temperature.
      real: above 0, or true, for real rows; the others get probabilities, but no share.
      iterations: pairs of divisions.
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
    """-log of the distance of each row to its nearest neighbor, on the unit sphere.

    The Kozachenko-Leonenko estimator of entropy as a loss (Sablayrolles et al., 2019,
    arXiv:1806.03198, equation 2).

    Args:
      features: of any length.
      real: above 0, or true, for rows that can be neighbors; at least two.
      eps: added to differences and distances, and the least length that is divided by.
    """
    x = features.astype(jnp.float32)
    x = x / _length(x, eps)[:, None]
    alike = jnp.matmul(x, x.T, precision='highest')
    others = (real > 0) & ~jnp.eye(len(x), dtype=bool)
    nearest = jnp.where(others, alike, -jnp.inf).argmax(-1)
    return -jnp.log(_length(x - x[nearest] + eps, eps) + eps)


def _length(x: Float[Array, 'N D'], least: float) -> Float[Array, ' N']:
    """The length of each row, or `least`, which has a derivative of 0 where the root has none."""
    return jnp.sqrt(jnp.maximum(jnp.square(x).sum(-1), least**2))
