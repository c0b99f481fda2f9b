"""Base of the evaluators of features."""

from __future__ import annotations

import abc
import math

import numpy as np

from vit_jax.errors import UserError
from vit_jax.evaluators.base import Arrays, Evaluator


class Features:
    """The features and labels of one split, gathered batch by batch."""

    def __init__(self) -> None:
        self._batches: list[tuple[np.ndarray, np.ndarray]] = []

    def add(self, predictions: Arrays, batch: Arrays) -> None:
        """Add a batch; raise UserError without predicted `features` or a `label` in the data."""
        for name, arrays in (('features', predictions), ('label', batch)):
            if name not in arrays:
                raise UserError(f'features are evaluated by their labels, but there is no {name!r}')
        self._batches.append((predictions['features'], batch['label']))

    def arrays(self) -> tuple[np.ndarray, np.ndarray]:
        """Features, float64 [N, D], and labels, int32 [N]."""
        features, labels = zip(*self._batches, strict=True)
        return np.concatenate(features).astype(np.float64), np.concatenate(labels)


class FeatureEvaluator(Evaluator):
    """Gather the features of both splits, which subclasses `measure`."""

    learns = True

    def __init__(self) -> None:
        self.start()

    def start(self) -> None:
        self._train, self._test = Features(), Features()

    def fit(self, predictions: Arrays, batch: Arrays) -> None:
        self._train.add(predictions, batch)

    def update(self, predictions: Arrays, batch: Arrays) -> None:
        self._test.add(predictions, batch)

    def result(self) -> dict[str, float]:
        train, test = self._train.arrays(), self._test.arrays()
        self.start()  # features are large: they are not kept until the next pass
        if not (np.isfinite(train[0]).all() and np.isfinite(test[0]).all()):
            return dict.fromkeys(self.names(), math.nan)
        return self.measure(*train, *test)

    @abc.abstractmethod
    def measure(
        self, features: np.ndarray, labels: np.ndarray, x: np.ndarray, expected: np.ndarray
    ) -> dict[str, float]:
        """Metrics of `expected` [M] from `x` [M D], fitted on `features` [N D], `labels` [N].

        All numbers are finite. The features and labels are those of the fit split.
        """


def members(labels: np.ndarray, rng: np.random.Generator) -> list[np.ndarray]:
    """The examples of every class that occurs among `labels` [N], in random order."""
    return [rng.permutation(np.flatnonzero(labels == c)) for c in np.unique(labels)]


def at_least(least: float, **values: float) -> None:
    """Raise UserError if one of `values` is below `least`."""
    for name, value in values.items():
        if value < least:
            raise UserError(f'{name}={value}: must be at least {least:g}')
