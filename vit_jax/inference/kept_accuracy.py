"""Accuracy of a classifier of color images on colorized images.

Zhang et al., 2016, arXiv:1603.08511, section 3.1; also its accuracy on gray and original images.
It is an evaluator of the tasks `colorize` and `image_to_image`, whose first samples it uses:

    evaluate --workdir COLORIZER --evaluator "vit_jax.inference.kept_accuracy(classifier='RUN')"
"""

from __future__ import annotations

import collections
import logging
import math
from collections.abc import Callable, Sequence

import numpy as np

from vit_jax.array_types import Int, UInt8
from vit_jax.data import numbering
from vit_jax.data.records import SourceInfo
from vit_jax.errors import UserError
from vit_jax.evaluators import base
from vit_jax.evaluators.base import Arrays, Dataset, OtherModel
from vit_jax.ops import colors

_log = logging.getLogger(__name__)
KINDS = ('colorized', 'grey', 'original')


class Evaluator(base.Evaluator):
    """`accuracy_colorized`, `accuracy_grey` and `accuracy_original`.

    Args:
      classifier: A run or a checkpoint of a classifier of color images, with the classes of the
        data; it reads images of any size as files.
    """

    def __init__(self, classifier: str):
        self._path = classifier
        self.start()

    def read_models(self, read: Callable[[str], OtherModel]) -> None:
        """Read the classifier; raise UserError if it does not predict classes with names."""
        self._model = read(self._path)
        if 'probs' not in self._model.names or not self._model.class_names:
            raise UserError(f'classifier {self._path!r} does not predict classes')

    def open(self, dataset: Dataset, fit: Dataset | None = None) -> None:
        """Raise UserError if the classes of the data and the classifier differ."""
        names, data_info = self._model.class_names, dataset.info
        model_info = SourceInfo(len(names), names)
        numbers = numbering.class_numbers(data_info, model_info, 'the data')
        if numbers is None or numbering.ABSENT in numbers:
            raise UserError(
                f'the classifier {self._path} has {model_info.num_classes} '
                f'classes{numbering.in_brackets(model_info, data_info)}, which are not the '
                f'{data_info.num_classes}{numbering.in_brackets(data_info, model_info)} of the data'
            )
        if note := numbering.renumbering_remark(data_info, model_info, numbers):
            _log.warning('%s: %s', dataset.source.title, note)
        self._numbers = numbers
        self._source = dataset.source

    def start(self) -> None:
        self._right: collections.Counter[str] = collections.Counter()
        self._seen = 0
        self._finite = True

    def update(self, predictions: Arrays, batch: Arrays) -> None:
        """Raise UserError if labels or images are missing, or the originals differ in size."""
        if 'image' not in predictions or 'label' not in batch:
            raise UserError('a classifier needs the images that the task predicts, and labels')
        self._finite &= base.is_finite(predictions, 'ab')
        self._finite &= bool(np.all(predictions.get('finite', True)))
        colored, label = predictions['image'], self._numbers[batch['label']]
        if 'samples' in predictions:
            colored = predictions['samples'][:, 0]
        originals = stack_images(self._source, batch['index'])
        gray = np.asarray(colors.to_bytes(colors.to_gray(originals / np.float32(255))))
        images = (colored, gray.repeat(3, axis=-1), originals)
        for kind, image in zip(KINDS, images, strict=True):
            probs = self._model.predict(image)['probs']
            self._finite &= bool(np.isfinite(probs).all())
            correct = label[:, None] == np.arange(probs.shape[1])
            self._right[kind] += int((base.ranks(probs, correct) == 0).sum())
        self._seen += len(label)

    def result(self) -> dict[str, float]:
        if not self._finite:
            return dict.fromkeys(self.names(), math.nan)
        return {f'accuracy_{kind}': self._right[kind] / max(self._seen, 1) for kind in KINDS}

    def digest(self) -> str:
        return self._model.digest

    def names(self) -> tuple[str, ...]:
        return tuple(f'accuracy_{kind}' for kind in KINDS)


def stack_images(
    source: Sequence[Arrays], index: Int[np.ndarray, ' B']
) -> UInt8[np.ndarray, 'B H W 3']:
    """Return the images of a source with these numbers; UserError if their sizes differ."""
    images = [np.asarray(source[i]['image']) for i in index.tolist()]
    if len({image.shape for image in images}) > 1:
        raise UserError('colors can be measured only on images of the same size')
    return np.stack(images)
