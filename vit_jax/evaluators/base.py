"""Base classes of evaluators, and the interface of the data that they measure on."""

from __future__ import annotations

import abc
import math
from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

import numpy as np

from vit_jax.array_types import Bool, Float, Int, UInt8
from vit_jax.errors import UserError

Arrays = dict[str, np.ndarray]


class Dataset(Protocol):
    """The part of a data set that an evaluator may use.

    Attributes:
      source: the examples of the split, with `len`, `source[i]` and a `title` for messages.
      info: `num_classes` and `class_names`.
      spec: the arrays of an example by name.
      vocab: decodes token ids; None where the data are not text.
    """

    @property
    def source(self) -> Any: ...

    @property
    def info(self) -> Any: ...

    @property
    def spec(self) -> Any: ...

    @property
    def vocab(self) -> Any: ...

    def text(self, index: int, /) -> dict[str, str]:
        """The strings of an example before they became ids, and its `image_id`, as a string, if it
        has one; empty where there are none.
        """
        ...


class OtherModel(NamedTuple):
    """A trained model beside the evaluated one, such as a classifier of the images that it makes.

    Attributes:
      predict: images, bytes of any size -> the arrays of its task's `predict`.
      names: of these arrays.
      task: the name of its task.
      digest: of its weights.
      class_names: of a classifier; empty if unknown.
    """

    predict: Callable[[UInt8[np.ndarray, 'B H W C']], Arrays]
    names: tuple[str, ...]
    task: str
    digest: str
    class_names: tuple[str, ...] = ()


class Evaluator(abc.ABC):
    """Base class of all evaluators. One object serves every pass over its data.

    `read_models` and `open` are called once, then for each pass `start`, `fit` for every batch of
    the fit split if the evaluator learns, `update` for every batch of the evaluated split, and
    `result`. Batches hold the real examples of all processes, each exactly once and without
    padding.

    If a prediction is not finite, all metrics are NaN; an answer that ties with another one is
    wrong. `is_finite` and `ranks` help with both.

    Attributes:
      learns: whether it learns from a second split, `fit` in the config. For other data,
        override `fit_data` instead.
      signature: of the protocol; only numbers with the same signature can be compared.
      headline: the metrics of `result` that a line of text shows; empty for all of them.
      predictions: the arrays of the task's `predict` that `update` needs, which are checked before
        training.
    """

    learns: bool = False
    signature: str = ''
    headline: tuple[str, ...] = ()
    predictions: tuple[str, ...] = ()

    def read_models(self, read: Callable[[str], OtherModel]) -> None:  # noqa: B027, a default
        """Read the models that the metrics need besides the evaluated one.

        Args:
          read: a run or a checkpoint by its path, as by `vit_jax.load`.

        Raises:
          UserError: if a model cannot be read, takes no images or does not suit.
        """

    def open(self, dataset: Dataset, fit: Dataset | None = None) -> None:  # noqa: B027, a default
        """Check the data and index the ground truth.

        Args:
          dataset: the ground truth.
          fit: the data to learn from; None unless the evaluator `learns` or has `fit_data`.

        Raises:
          UserError: if the data do not suit the evaluator.
        """

    def fit_data(self, data: Dataset) -> dict[str, Any] | None:
        """Data to learn from that are not a split of the evaluated source; None for no such data.

        Args:
          data: to be evaluated.

        Returns:
          Keys to replace in the entry of `config.evals`, such as `source`; `transforms` default to
          those of texts in training.

        Raises:
          UserError: if the data do not suit the evaluator.
        """
        del data
        return None

    def start(self) -> None:  # noqa: B027, a default
        """Reset for a new pass."""

    def fit(self, predictions: Arrays, batch: Arrays) -> None:  # noqa: B027, a default
        """Add a batch of the split to learn from, if it `learns`; arguments as for `update`."""

    @abc.abstractmethod
    def update(self, predictions: Arrays, batch: Arrays) -> None:
        """Add a batch.

        Args:
          predictions: the result of the task's `predict`, {name: [B ...]}.
          batch: the arrays of the batch with at most two dimensions; `index` [B] is the number of
            each example in the source.

        Raises:
          UserError: if the task does not make the predictions that are measured.
        """

    @abc.abstractmethod
    def result(self) -> dict[str, float]:
        """The metrics of a pass, without undefined ones; called once, after its last batch.

        NaN if a prediction of the pass was not finite.
        """

    def digest(self) -> str:
        """A digest of files, besides the data, that determine the result; empty without any."""
        return ''

    def names(self) -> tuple[str, ...]:
        """Names of the metrics that are known in advance; empty if none are.

        After `open`, only metrics that are defined on the data.
        """
        return ()


def require_segments(dataset: Dataset) -> None:
    """Raise UserError if the first record has no segments, or no classes of them."""
    record = dataset.source.annotations(0)
    needed = {'labels'} if 'segments' in record else {'masks', 'labels'}
    if record and (missing := needed - record.keys()):
        raise UserError(
            f'{dataset.source.title}: the records have no {min(missing)!r} to compare with; '
            f'they have {", ".join(record)}'
        )


def is_finite(arrays: Arrays, *names: str) -> bool:
    """Whether all numbers of the named arrays are finite; missing arrays count as finite."""
    return all(bool(np.isfinite(arrays[name]).all()) for name in names if name in arrays)


def ranks(
    scores: Float[np.ndarray, 'N M'], right: Bool[np.ndarray, 'N M']
) -> Int[np.ndarray, ' N']:
    """The number of wrong answers that score at least as high as the best right one.

    An answer is a hit if its rank is 0, so that scores that are all equal are not a hit.

    Args:
      scores: of M answers, finite.
      right: which of them are right; in a row without any, all answers count.
    """
    best = np.where(right, scores, -np.inf).max(axis=1, keepdims=True)
    return ((scores >= best) & ~right).sum(axis=1)


class FeatureEvaluator(Evaluator):
    """Base class of evaluators that gather the features of both splits and `measure` them."""

    learns = True
    predictions = ('features',)

    def __init__(self) -> None:
        self.start()

    def start(self) -> None:
        self._train, self._test = _Features(), _Features()

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

        All numbers are finite; `features` and `labels` are of the fit split.
        """


class _Features:
    """The features and labels of one split, gathered batch by batch."""

    def __init__(self) -> None:
        self._batches: list[tuple[np.ndarray, np.ndarray]] = []

    def add(self, predictions: Arrays, batch: Arrays) -> None:
        """Add a batch; raise UserError without predicted `features` or a `label` in the data."""
        for name, arrays in (('features', predictions), ('label', batch)):
            if name not in arrays:
                raise UserError(f'features are evaluated by their labels, but there is no {name!r}')
        if batch['label'].ndim > 1:
            raise UserError('features are evaluated by one class an image, and these have several')
        self._batches.append((predictions['features'], batch['label']))

    def arrays(self) -> tuple[np.ndarray, np.ndarray]:
        """Features, float64 [N, D], and labels, int32 [N]."""
        features, labels = zip(*self._batches, strict=True)
        return np.concatenate(features).astype(np.float64), np.concatenate(labels)


def members(labels: np.ndarray, rng: np.random.Generator) -> list[np.ndarray]:
    """The examples of every class that occurs among `labels` [N], in random order."""
    return [rng.permutation(np.flatnonzero(labels == c)) for c in np.unique(labels)]


def at_least(least: float, **values: float) -> None:
    """Raise UserError if one of `values` is below `least`."""
    for name, value in values.items():
        if value < least:
            raise UserError(f'{name}={value}: must be at least {least:g}')
