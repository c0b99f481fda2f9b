"""Accuracy on ReaL, the reassessed labels of ImageNet's validation images, any number for each.

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
IMAGENET = 1000  # classes
NUMBER = re.compile(r'_val_0*([1-9]\d*)\b')  # of ILSVRC2012_val_00000001.JPEG


class Evaluator(base.Evaluator):
    """`real_accuracy`: the share of images whose most probable class is one of their labels.

    Images without any label do not count.

    Args:
      labels: path of the authors' `real.json`, a list of classes for each validation image of
        ImageNet; the names of the files give the images' numbers. None if the source has
        the labels, as `tfds:imagenet2012_real` does.
    """

    predictions = ('probs',)

    def __init__(self, labels: str | None = None):
        self._given = _read(labels) if labels else None
        self._right: list[list[int]] = []
        self.start()

    def open(self, dataset: Dataset, fit: Dataset | None = None) -> None:
        """Read the labels; raise UserError if they do not belong to the images."""
        source = dataset.source
        if self._given is None:
            if FIELD not in dataset.spec:
                raise UserError(
                    f'{source.title}: has no {FIELD!r}; take tfds:imagenet2012_real, or images of '
                    "files with labels='real.json'"
                )
            return
        numbers = [_number(source.record_name(i)) for i in range(len(source))]
        if beyond := [n for n in numbers if n > len(self._given)]:
            raise UserError(
                f'labels has {len(self._given)} images, the data have number {beyond[0]}'
            )
        self._right = [self._given[n - 1] for n in numbers]

    def start(self) -> None:
        self._correct = self._count = 0
        self._finite = True

    def update(self, predictions: Arrays, batch: Arrays) -> None:
        """Add a batch; raise UserError if the task predicts no `probs` [B C] over all classes."""
        if 'probs' not in predictions:
            raise UserError("classes are evaluated, but the task predicts no 'probs'")
        probs, right = predictions['probs'], self._labels(batch)
        if probs.shape != right.shape:
            raise UserError(
                f'the labels are of {right.shape[1]} classes, the model has {probs.shape[1]}'
            )
        self._finite &= base.is_finite(predictions, 'probs')
        self._correct += int((base.ranks(probs, right) == 0).sum())
        self._count += int(right.any(-1).sum())

    def _labels(self, batch: Arrays) -> np.ndarray:
        """True for each label of an image, [B C]."""
        if self._given is None:
            return batch[FIELD]
        right = np.zeros((len(batch['index']), IMAGENET), bool)
        for row, index in enumerate(batch['index'].tolist()):
            right[row, self._right[index]] = True
        return right

    def result(self) -> dict[str, float]:
        if not self._finite:
            return dict.fromkeys(self.names(), math.nan)
        return {'real_accuracy': self._correct / self._count} if self._count else {}

    def digest(self) -> str:
        content = json.dumps(self._given).encode() if self._given else b''
        return hashlib.sha256(content).hexdigest()[:16] if content else ''

    def names(self) -> tuple[str, ...]:
        return ('real_accuracy',)


def _read(path: str) -> list[list[int]]:
    try:
        lists = paths.parse_json(paths.read_bytes(paths.path(path)))
    except (OSError, ValueError) as error:
        raise UserError(f'labels={path!r}: cannot be read: {error}') from error
    if not isinstance(lists, list) or not all(
        isinstance(one, list) and all(isinstance(c, int) and 0 <= c < IMAGENET for c in one)
        for one in lists
    ):
        raise UserError(f'labels={path!r}: must be a list of lists of classes 0 to 999')
    return lists


def _number(name: str) -> int:
    match = NUMBER.search(name)
    if match is None:
        raise UserError(
            f'{name}: is not named like a validation image of ImageNet, as '
            'ILSVRC2012_val_00000001.JPEG'
        )
    return int(match[1])
