"""Accuracy among the classes that occur in the data, as published for ImageNet-A and ImageNet-R.

Hendrycks et al., 2021, arXiv:1907.07174 and arXiv:2006.16241: the 200 classes of these data are 200
of a model's 1,000, and the outputs of the other classes are ignored.
"""

from __future__ import annotations

import math

import numpy as np

from vit_jax.errors import UserError
from vit_jax.evaluators import base
from vit_jax.evaluators.base import Arrays, Dataset


class Evaluator(base.Evaluator):
    """`subset_accuracy`: the share of images whose class is the most probable one that occurs.

    Attributes:
      classes: [K], numbers of the classes that occur in the data.
    """

    predictions = ('probs',)

    def open(self, dataset: Dataset, fit: Dataset | None = None) -> None:
        """Raise UserError unless each example has one class."""
        if not dataset.info.num_classes or dataset.info.multilabel:
            raise UserError('the data must have one class per image')
        self.classes = np.unique(dataset.source.labels())
        self.start()

    def start(self) -> None:
        self._correct = self._count = 0
        self._finite = True

    def update(self, predictions: Arrays, batch: Arrays) -> None:
        """Add a batch; raise UserError if the task does not predict probabilities of classes."""
        if 'probs' not in predictions:
            raise UserError("subset_accuracy needs 'probs', but the task does not predict them")
        self._finite &= base.is_finite(predictions, 'probs')
        is_label = batch['label'][:, None] == self.classes
        ranks = base.ranks(predictions['probs'][:, self.classes], is_label)
        self._correct += int((ranks == 0).sum())
        self._count += len(ranks)

    def result(self) -> dict[str, float]:
        if not self._finite:
            return dict.fromkeys(self.names(), math.nan)
        return {'subset_accuracy': self._correct / self._count}

    def names(self) -> tuple[str, ...]:
        return ('subset_accuracy',)
