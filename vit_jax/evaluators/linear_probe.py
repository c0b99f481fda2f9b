"""Accuracy of logistic regression on frozen features (Alain and Bengio, arXiv:1610.01644).

The penalty is chosen on a held-out fifth of each class of the `fit` split; the final classifier is
fitted to the whole split.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any

import numpy as np

from vit_jax.errors import UserError
from vit_jax.evaluators.base import Dataset, FeatureEvaluator, at_least, members

EPS = 1e-5
FOLDS = 5


class Evaluator(FeatureEvaluator):
    """`linear_probe_accuracy`, and `linear_probe_c`, the chosen penalty.

    Args:
      c: Inverse strengths of the L2 penalty to choose from, as in
        `sklearn.linear_model.LogisticRegression`; ties go to the first, so put the strongest first.
      max_iter: Maximum iterations of L-BFGS.
      seed: Seed for choosing the held-out examples.
    """

    def __init__(
        self,
        c: Sequence[float] = (1e-4, 1e-3, 1e-2, 1e-1, 1.0, 10.0),
        max_iter: int = 1000,
        seed: int = 0,
    ):
        super().__init__()
        if not c or min(c) <= 0:
            raise UserError(f'c={tuple(c)}: must be one or more positive numbers')
        at_least(1, max_iter=max_iter)
        self.c, self.max_iter, self.seed = tuple(c), max_iter, seed

    def open(self, dataset: Dataset, fit: Dataset | None = None) -> None:
        """Raise UserError if the fit split has a single class, or too few examples."""
        assert fit is not None
        size, num_classes = len(fit.source), fit.info.num_classes
        if num_classes < 2 or size < FOLDS * num_classes:
            raise UserError(
                f'linear_probe needs two classes and {FOLDS} examples of each, but the data have '
                f'{num_classes} classes and {size} examples'
            )

    def names(self) -> tuple[str, ...]:
        return 'linear_probe_accuracy', 'linear_probe_c'

    def measure(
        self, features: np.ndarray, labels: np.ndarray, x: np.ndarray, expected: np.ndarray
    ) -> dict[str, float]:
        mean, std = features.mean(axis=0), features.std(axis=0) + EPS
        standardized = (features - mean) / std
        c = self._choose_penalty(standardized, labels) if len(self.c) > 1 else self.c[0]
        accuracy = self._fit_classifier(standardized, labels, c).score((x - mean) / std, expected)
        return {'linear_probe_accuracy': float(accuracy), 'linear_probe_c': c}

    def _choose_penalty(self, x: np.ndarray, labels: np.ndarray) -> float:
        held_out = hold_out(labels, self.seed)
        train_rows = np.setdiff1d(np.arange(len(labels)), held_out)

        def accuracy(c: float) -> float:
            return self._fit_classifier(x[train_rows], labels[train_rows], c).score(
                x[held_out], labels[held_out]
            )

        return max(self.c, key=accuracy)

    def _fit_classifier(self, x: np.ndarray, labels: np.ndarray, c: float) -> Any:
        from sklearn.exceptions import ConvergenceWarning
        from sklearn.linear_model import LogisticRegression

        with warnings.catch_warnings():
            # With a weak penalty on separable data the optimum is far; max_iter stops early.
            warnings.simplefilter('ignore', ConvergenceWarning)
            return LogisticRegression(C=c, max_iter=self.max_iter).fit(x, labels)


def hold_out(labels: np.ndarray, seed: int) -> np.ndarray:
    """Indices of a random fifth of each class, rounded up, but never all of it."""
    rng = np.random.default_rng(seed)
    return np.concatenate([m[: min(-(-len(m) // FOLDS), len(m) - 1)] for m in members(labels, rng)])
