"""Few-shot accuracy: a closed-form linear classifier on a few examples of each class.

Protocol of big_vision, used to compare models in "Scaling Vision Transformers" (arXiv:2106.04560)
and "How to train your ViT" (arXiv:2106.10270): features are standardized by the chosen examples,
get a constant feature of 100 instead of a bias, and ridge regression with a penalty of 2^10 maps
them to -1 or 1, with one output per class.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from vit_jax.errors import UserError
from vit_jax.evaluators import base
from vit_jax.evaluators.base import Dataset, FeatureEvaluator, at_least, members

EPS = 1e-5
BIAS = 100.0  # large, so that the penalty hardly affects its weight


class Evaluator(FeatureEvaluator):
    """`K_shot` for each K: accuracy on the whole split, averaged over seeds.

    Args:
      shots: Numbers of training examples per class.
      seeds: Number of random choices of these examples; for the same seed, the examples of more
        shots include the examples of fewer shots.
      l2: Penalty of the ridge regression.
    """

    def __init__(self, shots: Sequence[int] = (1, 5, 10, 25), seeds: int = 3, l2: float = 2.0**10):
        super().__init__()
        if not shots:
            raise UserError('shots=(): must be one or more numbers of examples per class')
        at_least(1, shots=min(shots), seeds=seeds)
        at_least(0, l2=l2)
        self.shots, self.seeds, self.l2 = tuple(shots), seeds, l2

    def open(self, dataset: Dataset, fit: Dataset | None = None) -> None:
        """Raise UserError if the fit split has too few examples for `shots` of every class."""
        assert fit is not None
        size, num_classes = len(fit.source), fit.info.num_classes
        if size < max(self.shots) * num_classes:
            raise UserError(
                f'shots={max(self.shots)} of {num_classes} classes, but only {size} examples'
            )

    def names(self) -> tuple[str, ...]:
        return tuple(f'{k}_shot' for k in self.shots)

    def measure(
        self, features: np.ndarray, labels: np.ndarray, x: np.ndarray, expected: np.ndarray
    ) -> dict[str, float]:
        self._check_classes(labels)
        accuracies: dict[str, list[float]] = {f'{k}_shot': [] for k in self.shots}
        for seed in range(self.seeds):
            shuffled = members(labels, np.random.default_rng(seed))
            for k in self.shots:
                subset = np.concatenate([examples[:k] for examples in shuffled])
                accuracy = transfer(features[subset], labels[subset], x, expected, l2=self.l2)
                accuracies[f'{k}_shot'].append(accuracy)
        return {name: float(np.mean(values)) for name, values in accuracies.items()}

    def _check_classes(self, labels: np.ndarray) -> None:
        classes, counts = np.unique(labels, return_counts=True)
        if counts.min() < max(self.shots):
            raise UserError(
                f'shots={max(self.shots)}, but class {classes[counts.argmin()]} has only '
                f'{counts.min()} examples in the fit split'
            )


def transfer(
    x: np.ndarray, label: np.ndarray, x_test: np.ndarray, label_test: np.ndarray, *, l2: float
) -> float:
    """Fit a classifier to `x` [N, D] and return its accuracy on `x_test` [M, D]."""
    mean, std = x.mean(axis=0), x.std(axis=0) + EPS

    def prepare(features: np.ndarray) -> np.ndarray:
        return np.pad((features - mean) / std, ((0, 0), (0, 1)), constant_values=BIAS)

    classes = np.unique(label)
    weights = ridge(prepare(x), np.where(label[:, None] == classes, 1.0, -1.0), l2)
    ranks = base.ranks(prepare(x_test) @ weights, label_test[:, None] == classes)
    return float(np.mean(ranks == 0))


def ridge(x: np.ndarray, y: np.ndarray, l2: float) -> np.ndarray:
    """Return the weights [D, C] that minimize |x w - y|^2 + l2 |w|^2, for x [N, D] and y [N, C].

    Uses eigenvectors of the smaller of x'x and xx': (x'x + l2)^-1 x' = x' (xx' + l2)^-1.
    """
    n, d = x.shape
    eigenvalues, q = np.linalg.eigh(x.T @ x if n >= d else x @ x.T)
    left, right = (q, q.T @ (x.T @ y)) if n >= d else (x.T @ q, q.T @ y)
    return left @ (right / (eigenvalues + l2)[:, None])
