"""Accuracy class by class, and the confusion matrix."""

from __future__ import annotations

import math

import numpy as np

from vit_jax.errors import UserError
from vit_jax.evaluators import base
from vit_jax.evaluators.base import Arrays, Dataset


class Evaluator(base.Evaluator):
    """`mean_class_accuracy`, the mean over classes of the accuracy within each.

    Attributes:
      matrix: [outputs, outputs], numbers of examples of a pass by true class (row) and predicted
        class (column); a model may have more outputs than the data have classes.
    """

    predictions = ('probs',)

    def open(self, dataset: Dataset, fit: Dataset | None = None) -> None:
        """Raise UserError unless each example has one class."""
        if not dataset.info.num_classes:
            raise UserError('the data have no classes')
        if dataset.info.multilabel:
            raise UserError('one class an image is compared, and these have several or none')
        size = dataset.info.num_classes
        self.matrix = np.zeros((size, size), np.int64)
        self.start()

    def start(self) -> None:
        self.matrix = np.zeros_like(self.matrix)
        self._finite = True

    def update(self, predictions: Arrays, batch: Arrays) -> None:
        for name, arrays, owner in (
            ('probs', predictions, 'task predicts'),
            ('label', batch, 'data have'),
        ):
            if name not in arrays:
                raise UserError(f'classes of examples are compared, but the {owner} no {name!r}')
        self._finite &= base.is_finite(predictions, 'probs')
        probs, label = predictions['probs'], batch['label']
        if (more := probs.shape[-1] - len(self.matrix)) > 0:  # outputs without a class
            self.matrix = np.pad(self.matrix, (0, more))
        right = label[:, None] == np.arange(probs.shape[-1])
        others = np.where(right, -np.inf, probs).argmax(-1)
        predicted = np.where(base.ranks(probs, right) == 0, label, others)
        np.add.at(self.matrix, (label, predicted), 1)

    def result(self) -> dict[str, float]:
        if not self._finite:
            return dict.fromkeys(self.names(), math.nan)
        counts = self.matrix.sum(axis=1)
        shares = self.matrix.diagonal()[counts > 0] / counts[counts > 0]
        return {'mean_class_accuracy': float(shares.mean())}

    def names(self) -> tuple[str, ...]:
        return ('mean_class_accuracy',)


def rows(matrix: np.ndarray, names: tuple[str, ...]) -> list[dict[str, object]]:
    """A row a class: its `class`, `examples`, `accuracy`, and `most_confused_with`."""
    table = []
    for label, name in enumerate(names):
        wrong = matrix[label].copy()
        wrong[label] = 0
        count, most = int(matrix[label].sum()), int(wrong.argmax())
        accuracy = float(matrix[label, label] / count) if count else None
        other = names[most] if wrong[most] else None
        table.append(
            {'class': name, 'examples': count, 'accuracy': accuracy, 'most_confused_with': other}
        )
    return table
