"""Base classes of evaluators, and the interface of their data."""

from __future__ import annotations

import abc
import math
from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

import numpy as np

from vit_jax.array_types import Bool, Float, Int, UInt8
from vit_jax.errors import UserError

Arrays = dict[str, np.ndarray]


class Patches(NamedTuple):
    """Features of patches that an evaluator measures instead of predictions.

    Attributes:
      layers: Layers whose features are concatenated: 1 for the first block's output, -1 for the
        last one's; all go through the model's final norm where it has their width.
      class_token: Whether the class token is appended to every patch.
      mirrored: Whether to predict the mirrored image too.
    """

    layers: tuple[int, ...] = (-1,)
    class_token: bool = False
    mirrored: bool = False


class Dataset(Protocol):
    """Part of a dataset that evaluators use.

    Attributes:
      source: Examples of the split, with `len`, `source[i]` and a `title` for messages.
      info: Class counts and names, `num_classes` and `class_names`.
      spec: Array specs of an example by name.
      vocab: Decoder of token ids; None if the data are not text.
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
        """Return the strings of an example before tokenization, and its `image_id` as a string if
        it has one; empty if there are none.
        """
        ...

    def corners(
        self, index: int, size: tuple[int, int], frame: tuple[int, int], /
    ) -> Float[np.ndarray, '2 2']:
        """Locate the source's image of height and width `size` in the model's image, `frame`.

        Returns:
          (x, y) in pixels of the model's image of the upper left and the lower right corner; both
          may be outside.
        """
        ...


class OtherModel(NamedTuple):
    """A trained model used by a metric, such as a classifier of generated images.

    Attributes:
      predict: Function from images (bytes of any size) to the arrays of its task's `predict`.
      names: Names of these arrays.
      task: Name of the model's task.
      digest: Digest of the weights.
      class_names: Class names of a classifier; empty if unknown.
    """

    predict: Callable[[UInt8[np.ndarray, 'B H W C']], Arrays]
    names: tuple[str, ...]
    task: str
    digest: str
    class_names: tuple[str, ...] = ()


class Evaluator(abc.ABC):
    """Base class of evaluators. One object serves all passes over its data.

    `read_models` and `open` are called once, then for each pass `start`, `fit` for every batch of
    the fit split if the evaluator learns, `update` for every batch of the evaluated split, and
    `result`. Batches hold the real examples of all processes, each exactly once and without
    padding.

    If a prediction is not finite, all metrics are NaN; ties count as errors. Use `is_finite` and
    `ranks` for both.

    Attributes:
      learns: Whether the evaluator learns from a second split, `fit` in the config. To learn from
        other data, override `fit_data` instead.
      signature: Signature of the protocol; only numbers with the same signature are comparable.
      headline: Metrics of `result` shown in one line of text; empty for all.
      predictions: Arrays of the task's `predict` that `update` needs; checked before training.
      patches: Features of patches that `fit` and `update` get instead of predictions: `patches`
        [B n D] row by row, on request `mirrored` like them, and int32 [B 2] `grid`, rows and
        columns of patches, and `frame`, height and width of the model's image in pixels.
    """

    learns: bool = False
    signature: str = ''
    headline: tuple[str, ...] = ()
    predictions: tuple[str, ...] = ()
    patches: Patches | None = None

    def read_models(self, read: Callable[[str], OtherModel]) -> None:  # noqa: B027, a default
        """Read models that the metrics need besides the evaluated one.

        Args:
          read: Function that reads a run or a checkpoint from its path, see `vit_jax.load`.

        Raises:
          UserError: if a model cannot be read, is not an image model, or is not suitable.
        """

    def open(self, dataset: Dataset, fit: Dataset | None = None) -> None:  # noqa: B027, a default
        """Check the data and index the ground truth.

        Args:
          dataset: Ground truth.
          fit: Data to learn from; None unless the evaluator `learns` or has `fit_data`.

        Raises:
          UserError: if the data do not suit the evaluator.
        """

    def fit_data(self, data: Dataset) -> dict[str, Any] | None:
        """Return data to learn from that are not a split of the evaluated source; None for no such
        data.

        Args:
          data: Dataset to evaluate.

        Returns:
          Keys to replace in the entry of `config.evals`, such as `source`; `transforms` default to
          the transforms of texts in training.

        Raises:
          UserError: if the data do not suit the evaluator.
        """
        del data
        return None

    def start(self) -> None:  # noqa: B027, a default
        """Reset for a new pass."""

    def fit(self, predictions: Arrays, batch: Arrays) -> None:  # noqa: B027, a default
        """Add a batch of the split to learn from, if it `learns`; for arguments see `update`."""

    @abc.abstractmethod
    def update(self, predictions: Arrays, batch: Arrays) -> None:
        """Add a batch.

        Args:
          predictions: Result of the task's `predict`, {name: [B ...]}.
          batch: Arrays of the batch with at most two dimensions; `index` [B] is each example's
            index in the source.

        Raises:
          UserError: if the task lacks a required prediction.
        """

    @abc.abstractmethod
    def result(self) -> dict[str, float]:
        """Return the metrics of a pass, without undefined ones; called once, after its last batch.

        NaN if a prediction of the pass was not finite.
        """

    def digest(self) -> str:
        """Return a digest of further files that determine the result; empty if there are none."""
        return ''

    def names(self) -> tuple[str, ...]:
        """Return the names of metrics known in advance; empty if there are none.

        After `open`, only metrics that are defined on the data.
        """
        return ()


def require_segments(dataset: Dataset) -> None:
    """Raise UserError if the first record has no segments or no classes."""
    record = dataset.source.annotations(0)
    required_fields = {'labels'} if 'segments' in record else {'masks', 'labels'}
    if record and (missing := required_fields - record.keys()):
        raise UserError(
            f'{dataset.source.title}: segmentation needs {min(missing)!r}, but the records only '
            f'have {", ".join(record)}'
        )


def is_finite(arrays: Arrays, *names: str) -> bool:
    """Return whether all values of the named arrays are finite; missing arrays count as finite."""
    return all(bool(np.isfinite(arrays[name]).all()) for name in names if name in arrays)


def ranks(
    scores: Float[np.ndarray, 'N M'], right: Bool[np.ndarray, 'N M']
) -> Int[np.ndarray, ' N']:
    """Count the wrong answers that score at least as high as the best correct answer.

    A rank of 0 is a hit; if all scores are equal, there is no hit.

    Args:
      scores: Finite scores of M answers.
      right: Mask of correct answers; in a row without any, all answers count.
    """
    best = np.where(right, scores, -np.inf).max(axis=1, keepdims=True)
    return ((scores >= best) & ~right).sum(axis=1)


class FeatureEvaluator(Evaluator):
    """Base class of evaluators that collect the features of both splits and `measure` them."""

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
        self.start()  # free the large features
        if not (np.isfinite(train[0]).all() and np.isfinite(test[0]).all()):
            return dict.fromkeys(self.names(), math.nan)
        return self.measure(*train, *test)

    @abc.abstractmethod
    def measure(
        self, features: np.ndarray, labels: np.ndarray, x: np.ndarray, expected: np.ndarray
    ) -> dict[str, float]:
        """Compute metrics on `x` [M D] and `expected` [M], after fitting `features` [N D], `labels`
        [N].

        All numbers are finite; `features` and `labels` belong to the fit split.
        """


class _Features:
    """Collect the features and labels of one split, batch by batch."""

    def __init__(self) -> None:
        self._batches: list[tuple[np.ndarray, np.ndarray]] = []

    def add(self, predictions: Arrays, batch: Arrays) -> None:
        """Add a batch; raise UserError if there are no predicted `features`, or no `label` in the
        data.
        """
        for name, arrays in (('features', predictions), ('label', batch)):
            if name not in arrays:
                raise UserError(f'features are compared by class, but there is no {name!r}')
        if batch['label'].ndim > 1:
            raise UserError('features need one class per image, but these images have several')
        self._batches.append((predictions['features'], batch['label']))

    def arrays(self) -> tuple[np.ndarray, np.ndarray]:
        """Return features, float64 [N, D], and labels, int32 [N]."""
        features, labels = zip(*self._batches, strict=True)
        return np.concatenate(features).astype(np.float64), np.concatenate(labels)


def members(labels: np.ndarray, rng: np.random.Generator) -> list[np.ndarray]:
    """Group the examples by class, for each class that occurs in `labels` [N], in random order."""
    return [rng.permutation(np.flatnonzero(labels == c)) for c in np.unique(labels)]


def at_least(least: float, **values: float) -> None:
    """Raise UserError if one of `values` is below `least`."""
    for name, value in values.items():
        if value < least:
            raise UserError(f'{name}={value}: must be at least {least:g}')
