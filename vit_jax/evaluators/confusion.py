"""Per-class accuracy and the confusion matrix."""

from __future__ import annotations

import math

import numpy as np

from vit_jax.errors import UserError
from vit_jax.evaluators import base
from vit_jax.evaluators.base import Arrays, Dataset


class Evaluator(base.Evaluator):
    """`mean_class_accuracy`, the mean over classes of the accuracy within each.

    Attributes:
      matrix: [outputs, outputs], number of examples by true class (row) and predicted class
        (column); a model may have more outputs than the data have classes.
    """

    predictions = ('probs',)

    def open(self, dataset: Dataset, fit: Dataset | None = None) -> None:
        """Raise UserError unless each example has one class."""
        if not dataset.info.num_classes:
            raise UserError('the data have no classes')
        if dataset.info.multilabel:
            raise UserError(
                'the data must have one class per image, but these have several or none'
            )
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
                raise UserError(f'accuracy per class: the {owner} no {name!r}')
        self._finite &= base.is_finite(predictions, 'probs')
        probs, label = predictions['probs'], batch['label']
        if (num_extra := probs.shape[-1] - len(self.matrix)) > 0:  # outputs without a class
            self.matrix = np.pad(self.matrix, (0, num_extra))
        is_label = label[:, None] == np.arange(probs.shape[-1])
        best_wrong = np.where(is_label, -np.inf, probs).argmax(-1)
        predicted = np.where(base.ranks(probs, is_label) == 0, label, best_wrong)
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
    """Return a row per class: `class`, `examples`, `accuracy` and `most_confused_with`."""
    table = []
    for label, name in enumerate(names):
        errors = matrix[label].copy()
        errors[label] = 0
        count, worst = int(matrix[label].sum()), int(errors.argmax())
        accuracy = float(matrix[label, label] / count) if count else None
        confused_with = names[worst] if errors[worst] else None
        table.append(
            {
                'class': name,
                'examples': count,
                'accuracy': accuracy,
                'most_confused_with': confused_with,
            }
        )
    return table
