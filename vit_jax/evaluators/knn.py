"""Accuracy of a nearest-neighbor classifier in feature space, without training.

Each of the k nearest examples by cosine similarity s votes for its class with exp(s / T), as in
DINO (arXiv:2104.14294, appendix F.1, after Wu et al., arXiv:1805.01978, section 3.4).
"""

from __future__ import annotations

import numpy as np

from vit_jax.errors import UserError
from vit_jax.evaluators import base
from vit_jax.evaluators.base import Dataset, FeatureEvaluator, at_least

ROWS = 1024  # examples classified at a time, to limit the memory for similarities


class Evaluator(FeatureEvaluator):
    """`knn_accuracy`.

    Args:
      k: Number of neighbors.
      temperature: T; a lower temperature gives distant neighbors less weight.
    """

    def __init__(self, k: int = 20, temperature: float = 0.07):
        super().__init__()
        at_least(1, k=k)
        if temperature <= 0:
            raise UserError(f'temperature={temperature}: must be positive')
        self.k, self.temperature = k, temperature

    def open(self, dataset: Dataset, fit: Dataset | None = None) -> None:
        """Raise UserError if the fit split has fewer than k examples."""
        assert fit is not None
        if (size := len(fit.source)) < self.k:
            raise UserError(f'k={self.k} neighbors, but there are {size} examples')

    def names(self) -> tuple[str, ...]:
        return ('knn_accuracy',)

    def measure(
        self, features: np.ndarray, labels: np.ndarray, x: np.ndarray, expected: np.ndarray
    ) -> dict[str, float]:
        classes = np.arange(1 + max(labels.max(), expected.max()))
        scores = votes(features, labels, x, self.k, self.temperature, len(classes))
        hits = base.ranks(scores, expected[:, None] == classes) == 0
        return {'knn_accuracy': float(np.mean(hits))}


def votes(
    features: np.ndarray,
    labels: np.ndarray,
    x: np.ndarray,
    k: int,
    temperature: float,
    classes: int,
) -> np.ndarray:
    """Compute votes [M, classes] for `x` [M, D] from its k nearest rows of `features` [N, D]."""
    database = normalize(features).T
    rows = np.split(normalize(x), range(ROWS, len(x), ROWS))
    return np.concatenate(
        [_vote(part @ database, labels, k, temperature, classes) for part in rows]
    )


def normalize(x: np.ndarray) -> np.ndarray:
    """Scale rows to length 1; zero rows stay zero."""
    return x / np.maximum(np.linalg.norm(x, axis=-1, keepdims=True), 1e-12)


def _vote(
    similarity: np.ndarray, labels: np.ndarray, k: int, temperature: float, classes: int
) -> np.ndarray:
    """Compute votes [M, classes] from similarities [M, N] to examples with `labels` [N]."""
    nearest = np.argpartition(-similarity, k - 1, axis=-1)[:, :k]
    similarities = np.take_along_axis(similarity, nearest, axis=-1)
    # Subtract the maximum so that no exponential overflows.
    weights = np.exp((similarities - similarities.max(axis=-1, keepdims=True)) / temperature)
    class_votes = np.zeros((len(similarity), classes))
    np.add.at(class_votes, (np.arange(len(class_votes))[:, None], labels[nearest]), weights)
    return class_votes
