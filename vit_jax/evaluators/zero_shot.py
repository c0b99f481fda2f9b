"""Zero-shot classification by class names.

As in CLIP (Radford et al., 2021, arXiv:2103.00020, section 3.1.4): a class is represented by the
mean embedding of its name in several templates, and an image gets the nearest class.
"""

from __future__ import annotations

import functools
import json
import logging
import math
import re
from collections.abc import Sequence
from typing import Any

import numpy as np

from vit_jax.errors import UserError
from vit_jax.evaluators import base
from vit_jax.evaluators.base import Arrays, Dataset
from vit_jax.storage import paths

_log = logging.getLogger(__name__)
TEMPLATES = ('a photo of a {}',)
WORDNET = re.compile(r'n\d{8}')
JOINED = re.compile(r'[a-z][A-Z]')


class Evaluator(base.Evaluator):
    """`zero_shot_accuracy`, and `zero_shot_top5` for more than five classes.

    Args:
      text: Transforms of a prompt, such as "tokenize('caption', 64)"; by default the transforms of
        the captions in training.
      templates: Prompts with {} instead of the name.
      names: File with one class name per line, in the order of the data's classes; by default the
        names in the data. Names of the data in a different order are matched by name. Underscores
        become spaces in prompts; WordNet ids are rejected.
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
        """Return the prompts of all classes as data.

        Raises:
          UserError: if the data have no classes or no class names, or as `as_words`.
        """
        where = 'the classes of the data' if self._file is None else f'names={self._file!r}'
        names = as_words(self._names(data.info), where, 'names')
        prompts = {'names': names, 'templates': self.templates}
        source = f'prompts:{json.dumps(prompts)}'
        transforms = {} if self.text is None else {'transforms': self.text}
        return {'source': source, 'split': 'all', 'classes': None, **transforms}

    def names(self) -> tuple[str, ...]:
        return ('zero_shot_accuracy',)

    def start(self) -> None:
        self._texts: list[tuple[np.ndarray, np.ndarray]] = []
        self._hits = self._top5_hits = self._count = 0
        self._classes: np.ndarray | None = None
        self._finite = True

    def fit(self, predictions: Arrays, batch: Arrays) -> None:
        """Add prompts; raise UserError if the task does not embed texts."""
        if 'text' not in predictions:
            raise UserError("zero_shot needs 'text', but the task does not predict it")
        self._finite &= base.is_finite(predictions, 'text')
        self._texts.append((predictions['text'], batch['label']))

    def update(self, predictions: Arrays, batch: Arrays) -> None:
        """Add a batch; raise UserError if there are no predicted `features`, or no `label` in the
        data.
        """
        for name, arrays in (('features', predictions), ('label', batch)):
            if name not in arrays:
                raise UserError(f'zero_shot compares images with texts, but there is no {name!r}')
        self._finite &= base.is_finite(predictions, 'features')
        if not self._finite:
            return
        if self._classes is None:
            self._classes = class_embeddings(*map(np.concatenate, zip(*self._texts, strict=True)))
        is_label = batch['label'][:, None] == np.arange(len(self._classes))
        ranks = base.ranks(predictions['features'] @ self._classes.T, is_label)
        self._hits += int((ranks == 0).sum())
        self._top5_hits += int((ranks < 5).sum())
        self._count += len(ranks)

    def result(self) -> dict[str, float]:
        if not self._finite:
            return dict.fromkeys(self.names(), math.nan)
        classes = 0 if self._classes is None else len(self._classes)
        metrics = {'zero_shot_accuracy': self._hits / self._count}
        return metrics | ({'zero_shot_top5': self._top5_hits / self._count} if classes > 5 else {})

    def _names(self, info: Any) -> tuple[str, ...]:
        if self._file is None:
            if not info.num_classes or len(info.class_names) != info.num_classes:
                raise UserError(
                    'the classes of the data have no names: set names to a file of class names'
                )
            return tuple(info.class_names)
        names = read_names(self._file)
        if len(names) != info.num_classes:
            raise UserError(
                f'names={self._file!r} has {len(names)} lines, but the data have '
                f'{info.num_classes} classes'
            )
        if sorted(names) == sorted(info.class_names):
            return tuple(info.class_names)
        _require_order(names, info.class_names, f'names={self._file!r}')
        return names


def as_words(names: Sequence[str], source: str, remedy: str) -> tuple[str, ...]:
    """Write class names as in texts: `dark_red` becomes `dark red`.

    Names in CamelCase stay, with a warning, as they may be spelled so (iPhone).

    Args:
      names: Class names.
      source: Their place, for messages.
      remedy: Key or flag of a file of class names.

    Raises:
      UserError: for WordNet ids, which texts do not have, and for names that become equal.
    """
    if ids := [name for name in names if WORDNET.fullmatch(name)]:
        raise UserError(
            f'{source}: {ids[0]!r} is a WordNet id, not a name: give a file of class names, one '
            'per '
            f'line in the order of the classes, by {remedy}'
        )
    words = tuple(' '.join(name.replace('_', ' ').split()) for name in names)
    first_names: dict[str, str] = {}
    for name, spoken in zip(names, words, strict=True):
        if (other := first_names.setdefault(spoken, name)) != name:
            raise UserError(f'{source}: {other!r} and {name!r} are the same text; rename one')
    if joined := [name for name in words if JOINED.search(name)]:
        _warn_once(
            f'{source}: words are joined in {joined[0]!r}, which texts rarely do: separate them in '
            f'a file of class names, {remedy}'
        )
    return words


@functools.cache
def _warn_once(text: str) -> None:
    _log.warning('%s', text)


def _require_order(names: Sequence[str], classes: Sequence[str], source: str) -> None:
    """Raise UserError if a name is on the line of a different class."""
    labels = {name: label for label, name in enumerate(classes)}
    for line, name in enumerate(names):
        if (label := labels.get(name, line)) != line:
            raise UserError(
                f'{source}, line {line + 1}: {name!r} is class {label} of the data, but class '
                f'{line} is {classes[line]!r}; write the names in the order of the classes'
            )


def class_embeddings(texts: np.ndarray, labels: np.ndarray) -> np.ndarray:
    """Average the embeddings of each class's texts and scale them to length 1, [C E]."""
    means = np.stack([texts[labels == label].mean(0) for label in range(int(labels.max()) + 1)])
    return means / np.maximum(np.linalg.norm(means, axis=1, keepdims=True), 1e-12)


def read_names(path: str) -> tuple[str, ...]:
    """Read the non-empty lines of a file; raise UserError if it cannot be read."""
    try:
        lines = paths.read_lines(paths.path(path))
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f'class names {path!r}: {error}') from error
    return tuple(line.strip() for line in lines if line.strip())
