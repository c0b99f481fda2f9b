"""Accuracy on ReaL, the reassessed labels of ImageNet's validation images.

Beyer et al., 2020, "Are we done with ImageNet?", arXiv:2006.07159, section 4.
"""

from __future__ import annotations

import hashlib
import json
import math
import re

import numpy as np

from vit_jax.errors import UserError
from vit_jax.evaluators import base
from vit_jax.evaluators.base import Arrays, Dataset
from vit_jax.storage import paths

FIELD = 'real_label'
IMAGENET = 1000  # number of classes
NUMBER = re.compile(r'_val_0*([1-9]\d*)\b')  # in ILSVRC2012_val_00000001.JPEG


class Evaluator(base.Evaluator):
    """`real_accuracy`: the share of images whose most probable class is one of their labels.

    Images without labels do not count.

    Args:
      labels: Path of the authors' `real.json`, a list of classes for each validation image of
        ImageNet, in the order of the numbers in file names. None if the source has the labels, like
        `tfds:imagenet2012_real`.
    """

    predictions = ('probs',)

    def __init__(self, labels: str | None = None):
        self._file_labels = _read(labels) if labels else None
        self._labels_of_index: list[list[int]] = []
        self.start()

    def open(self, dataset: Dataset, fit: Dataset | None = None) -> None:
        """Read the labels; raise UserError if they do not belong to the images."""
        source = dataset.source
        if self._file_labels is None:
            if FIELD not in dataset.spec:
                raise UserError(
                    f'{source.title}: has no {FIELD!r}; use tfds:imagenet2012_real, or image files '
                    "with labels='real.json'"
                )
            return
        numbers = [_number(source.record_name(i)) for i in range(len(source))]
        if beyond := [n for n in numbers if n > len(self._file_labels)]:
            raise UserError(
                f'labels has {len(self._file_labels)} images, but the data have number {beyond[0]}'
            )
        self._labels_of_index = [self._file_labels[n - 1] for n in numbers]

    def start(self) -> None:
        self._correct = self._count = 0
        self._finite = True

    def update(self, predictions: Arrays, batch: Arrays) -> None:
        """Add a batch; raise UserError if `probs` [B C] are not predicted for all classes."""
        if 'probs' not in predictions:
            raise UserError("real needs 'probs', but the task does not predict them")
        probs, is_label = predictions['probs'], self._labels(batch)
        if probs.shape != is_label.shape:
            raise UserError(
                f'the labels have {is_label.shape[1]} classes, but the model {probs.shape[1]}'
            )
        self._finite &= base.is_finite(predictions, 'probs')
        self._correct += int((base.ranks(probs, is_label) == 0).sum())
        self._count += int(is_label.any(-1).sum())

    def _labels(self, batch: Arrays) -> np.ndarray:
        """Return a mask of the labels of each image, [B C]."""
        if self._file_labels is None:
            return batch[FIELD]
        is_label = np.zeros((len(batch['index']), IMAGENET), bool)
        for row, index in enumerate(batch['index'].tolist()):
            is_label[row, self._labels_of_index[index]] = True
        return is_label

    def result(self) -> dict[str, float]:
        if not self._finite:
            return dict.fromkeys(self.names(), math.nan)
        return {'real_accuracy': self._correct / self._count} if self._count else {}

    def digest(self) -> str:
        content = json.dumps(self._file_labels).encode() if self._file_labels else b''
        return hashlib.sha256(content).hexdigest()[:16] if content else ''

    def names(self) -> tuple[str, ...]:
        return ('real_accuracy',)


def _read(path: str) -> list[list[int]]:
    try:
        lists = paths.parse_json(paths.read_bytes(paths.path(path)))
    except (OSError, ValueError) as error:
        raise UserError(f'labels={path!r}: cannot be read: {error}') from error
    if not isinstance(lists, list) or not all(
        isinstance(labels, list) and all(isinstance(c, int) and 0 <= c < IMAGENET for c in labels)
        for labels in lists
    ):
        raise UserError(f'labels={path!r}: must be a list of lists of classes 0 to 999')
    return lists


def _number(name: str) -> int:
    match = NUMBER.search(name)
    if match is None:
        raise UserError(
            f'{name}: is not named like a validation image of ImageNet, such as '
            'ILSVRC2012_val_00000001.JPEG'
        )
    return int(match[1])
