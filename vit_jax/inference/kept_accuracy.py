"""Accuracy of a classifier of color images on colorized images.

Zhang et al., 2016, arXiv:1603.08511, section 3.1, beside its accuracy on the gray and the original
images. It is an evaluator of the task `colorize`:

    evaluate --workdir COLORIZER --evaluator "vit_jax.inference.kept_accuracy(classifier='RUN')"
"""

from __future__ import annotations

import collections
import logging
import math

import numpy as np

from vit_jax import step
from vit_jax.array_types import Float, UInt8
from vit_jax.data import splits
from vit_jax.data.records import SourceInfo
from vit_jax.errors import UserError
from vit_jax.evaluators import base
from vit_jax.evaluators.base import Arrays, Dataset
from vit_jax.inference.load import open_run
from vit_jax.ops import colors
from vit_jax.runtime import target

_log = logging.getLogger(__name__)
Images = UInt8[np.ndarray, 'B H W 3']
KINDS = ('colorized', 'grey', 'original')


class Evaluator(base.Evaluator):
    """`accuracy_colorized`, `accuracy_grey` and `accuracy_original`.

    Args:
      classifier: the run folder of a classifier of color images, with the classes of the data.
    """

    def __init__(self, classifier: str):
        self._run = open_run(classifier)
        if not self._run.task.predicts or not self._run.class_names:
            raise UserError(f'classifier {classifier!r} does not predict classes')
        self._predict = target.compiled(step.make_predict_step(self._run.model, self._run.task))
        self._rows = 0  # of the largest batch so far; smaller ones are padded
        self.start()

    def open(self, dataset: Dataset, fit: Dataset | None = None) -> None:
        """Raise UserError if the classes of the data and the classifier differ."""
        names, found = self._run.class_names, dataset.info
        known = SourceInfo(len(names), names)
        numbers = splits.class_numbers(found, known, 'the data')
        if numbers is None or splits.ABSENT in numbers:
            raise UserError(
                f'the classifier {self._run.path} has {known.num_classes} '
                f'classes{splits.in_brackets(known, found)}, which are not the '
                f'{found.num_classes}{splits.in_brackets(found, known)} of the data'
            )
        if note := splits.renumbering_remark(found, known, numbers):
            _log.warning('%s: %s', dataset.source.title, note)
        self._numbers = numbers
        self._source = dataset.source

    def start(self) -> None:
        self._right: collections.Counter[str] = collections.Counter()
        self._seen = 0
        self._finite = True

    def update(self, predictions: Arrays, batch: Arrays) -> None:
        """Raise UserError if labels or images are missing, or image sizes differ."""
        if 'image' not in predictions or 'label' not in batch:
            raise UserError('a classifier needs the images that the task predicts, and labels')
        self._finite &= base.is_finite(predictions, 'ab')
        colorized, label = predictions['image'], self._numbers[batch['label']]
        gray = np.asarray(colors.to_bytes(colors.to_gray(colorized / np.float32(255))))
        original = [self._source[i]['image'] for i in batch['index'].tolist()]
        images = (colorized, gray.repeat(3, axis=-1), np.stack([*map(np.asarray, original)]))
        self._check_sizes(colorized.shape[1:3], images[-1].shape[1:3])
        for kind, image in zip(KINDS, images, strict=True):
            probs = self._classify(image)
            self._finite &= bool(np.isfinite(probs).all())
            right = label[:, None] == np.arange(probs.shape[1])
            self._right[kind] += int((base.ranks(probs, right) == 0).sum())
        self._seen += len(label)

    def result(self) -> dict[str, float]:
        if not self._finite:
            return dict.fromkeys(self.names(), math.nan)
        return {f'accuracy_{kind}': self._right[kind] / max(self._seen, 1) for kind in KINDS}

    def names(self) -> tuple[str, ...]:
        return tuple(f'accuracy_{kind}' for kind in KINDS)

    def _check_sizes(self, made: tuple[int, ...], raw: tuple[int, ...]) -> None:
        size = tuple(self._run.image_size or made)
        if not made == raw == size:
            sizes = (' x '.join(map(str, reversed(sides))) for sides in (made, raw, size))
            raise UserError(
                'colorized images of {} pixels, originals of {} and a classifier for {} do not '
                'match: measure without transforms that resize'.format(*sizes)
            )

    def _classify(self, images: Images) -> Float[np.ndarray, 'B C']:
        """The probabilities of the classes of each image."""
        count = len(images)
        self._rows = max(self._rows, count)
        padded = np.pad(images, ((0, self._rows - count), (0, 0), (0, 0), (0, 0)))
        index = np.arange(self._rows, dtype=np.int32)
        batch = {'image': padded, 'index': index, 'mask': np.ones(self._rows, np.float32)}
        predictions, _ = self._predict(self._run.variables, batch)
        return np.asarray(predictions['probs'])[:count]
