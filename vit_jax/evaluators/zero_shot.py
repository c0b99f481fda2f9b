"""Classification by the names of classes, without training on them.

As in CLIP (Radford et al., 2021, arXiv:2103.00020, section 3.1.4): a class is the mean of the
embeddings of its name in several templates, and an image gets the nearest class.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from vit_jax.errors import UserError
from vit_jax.evaluators import base
from vit_jax.evaluators.base import Arrays, Dataset
from vit_jax.storage import paths

TEMPLATES = ('a photo of a {}',)


class Evaluator(base.Evaluator):
    """`zero_shot_accuracy`, and `zero_shot_top5` of more than five classes.

    Args:
      text: transforms of a prompt, "tokenize('caption', 64)"; default to those of the captions in
        training.
      templates: prompts with {} in place of the name.
      names: a file with the name of each class, line by line in the order of the data's classes;
        defaults to the names in the data. The same names in another order are matched by name.
    """

    headline = ('zero_shot_accuracy',)
    predictions = ('features',)

    def __init__(
        self,
        *,
        text: str | None = None,
        templates: tuple[str, ...] = TEMPLATES,
        names: str | None = None,
    ):
        self.text, self.templates, self._file = text, tuple(templates), names
        self.start()

    def fit_data(self, data: Dataset) -> dict[str, Any]:
        """The prompts of all classes.

        Raises:
          UserError: if the data have no classes, or their names are unknown.
        """
        prompts = {'names': self._names(data.info), 'templates': self.templates}
        source = f'prompts:{json.dumps(prompts)}'
        transforms = {} if self.text is None else {'transforms': self.text}
        return {'source': source, 'split': 'all', 'classes': None, **transforms}

    def names(self) -> tuple[str, ...]:
        return ('zero_shot_accuracy',)

    def start(self) -> None:
        self._texts: list[tuple[np.ndarray, np.ndarray]] = []
        self._right = self._right5 = self._count = 0
        self._classes: np.ndarray | None = None
        self._finite = True

    def fit(self, predictions: Arrays, batch: Arrays) -> None:
        """Add prompts; raise UserError if the task embeds no texts."""
        if 'text' not in predictions:
            raise UserError("images are classified by their texts, but the task predicts no 'text'")
        self._finite &= base.is_finite(predictions, 'text')
        self._texts.append((predictions['text'], batch['label']))

    def update(self, predictions: Arrays, batch: Arrays) -> None:
        """Add a batch; raise UserError without predicted `features` or a `label` in the data."""
        for name, arrays in (('features', predictions), ('label', batch)):
            if name not in arrays:
                raise UserError(f'images are classified by their texts, but there is no {name!r}')
        self._finite &= base.is_finite(predictions, 'features')
        if not self._finite:
            return
        if self._classes is None:
            self._classes = class_embeddings(*map(np.concatenate, zip(*self._texts, strict=True)))
        right = batch['label'][:, None] == np.arange(len(self._classes))
        found = base.ranks(predictions['features'] @ self._classes.T, right)
        self._right += int((found == 0).sum())
        self._right5 += int((found < 5).sum())
        self._count += len(found)

    def result(self) -> dict[str, float]:
        if not self._finite:
            return dict.fromkeys(self.names(), math.nan)
        classes = 0 if self._classes is None else len(self._classes)
        found = {'zero_shot_accuracy': self._right / self._count}
        return found | ({'zero_shot_top5': self._right5 / self._count} if classes > 5 else {})

    def _names(self, info: Any) -> tuple[str, ...]:
        if self._file is None:
            if not info.num_classes or len(info.class_names) != info.num_classes:
                raise UserError('the classes of the data have no names: give a file of names')
            return tuple(info.class_names)
        found = read_names(self._file)
        if len(found) != info.num_classes:
            raise UserError(
                f'names={self._file!r} has {len(found)} lines, the data {info.num_classes} classes'
            )
        if sorted(found) == sorted(info.class_names):
            return tuple(info.class_names)
        _require_order(found, info.class_names, f'names={self._file!r}')
        return found


def _require_order(names: Sequence[str], classes: Sequence[str], where: str) -> None:
    """Raise UserError if a name stands on the line of another class."""
    place = {name: label for label, name in enumerate(classes)}
    for line, name in enumerate(names):
        if (label := place.get(name, line)) != line:
            raise UserError(
                f'{where}, line {line + 1}: {name!r} is class {label} of the data, and class '
                f'{line} is {classes[line]!r}; write the names in the order of the classes'
            )


def class_embeddings(texts: np.ndarray, labels: np.ndarray) -> np.ndarray:
    """The mean embedding of each class's texts, of length 1, [C E]."""
    means = np.stack([texts[labels == label].mean(0) for label in range(int(labels.max()) + 1)])
    return means / np.maximum(np.linalg.norm(means, axis=1, keepdims=True), 1e-12)


def read_names(path: str) -> tuple[str, ...]:
    """The lines of a file that are not empty; raise UserError if it cannot be read."""
    try:
        lines = paths.read_lines(paths.path(path))
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f'names of classes {path!r}: {error}') from error
    return tuple(line.strip() for line in lines if line.strip())
