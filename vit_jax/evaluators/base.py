"""The base of evaluators, and the data set as they see it."""

from __future__ import annotations

import abc
from typing import Any, Protocol

import numpy as np

from vit_jax.array_types import Bool, Float, Int

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
        """The strings of an example before they became ids; empty where there are none."""
        ...


class Evaluator(abc.ABC):
    """Base class of all evaluators. One object serves every pass over its data.

    `open` is called once, then for each pass `start`, `fit` for every batch of the fit split if the
    evaluator learns, `update` for every batch of the evaluated split, and `result`. Batches hold
    the real examples of all processes, each exactly once and without padding.

    Where a prediction that it measures is not finite, all of its numbers are NaN; an answer that
    another one equals is not right. `is_finite` and `ranks` help with both.

    Attributes:
      learns: whether it learns from a second split, `fit` in the config. One that learns from
        data of its own names them by `fit_data` instead.
      signature: the protocol of the measurement, so that numbers can be compared.
      headline: the metrics of `result` that a line of text shows; empty for all of them.
    """

    learns: bool = False
    signature: str = ''
    headline: tuple[str, ...] = ()

    def open(self, dataset: Dataset, fit: Dataset | None = None) -> None:  # noqa: B027, a default
        """Check the data and index the ground truth.

        Args:
          dataset: the ground truth.
          fit: the data to learn from; None unless the evaluator `learns` or has `fit_data`.

        Raises:
          UserError: if the data do not suit the evaluator.
        """

    def fit_data(self, data: Dataset) -> dict[str, Any] | None:
        """Other data to learn from than a split of the evaluated source; None for no other.

        Args:
          data: to be evaluated.

        Returns:
          Keys to replace in the entry of `config.evals`, such as `source`; `transforms` are by
          default those of texts in training.

        Raises:
          UserError: if the data do not suit the evaluator.
        """
        del data
        return None

    def start(self) -> None:  # noqa: B027, a default
        """Reset for a new pass."""

    def fit(self, predictions: Arrays, batch: Arrays) -> None:  # noqa: B027, a default
        """Add a batch of the split to learn from, if it `learns`; arguments as of `update`."""

    @abc.abstractmethod
    def update(self, predictions: Arrays, batch: Arrays) -> None:
        """Add a batch.

        Args:
          predictions: the result of the task's `predict`, {name: [B ...]}.
          batch: the arrays of the batch with at most two dimensions; `index` [B] is the number of
            each example in the source.

        Raises:
          UserError: if the task lacks the predictions that are measured.
        """

    @abc.abstractmethod
    def result(self) -> dict[str, float]:
        """The metrics of a pass that have a value in it; called once, after its last batch.

        They are NaN if a prediction of the pass was not finite.
        """

    def digest(self) -> str:
        """A digest of the files besides the data that it measures by; empty without any."""
        return ''

    def names(self) -> tuple[str, ...]:
        """Names of the numbers in `result` that are known in advance; empty if none are.

        Once `open`, they are those that the data can give.
        """
        return ()


def is_finite(arrays: Arrays, *names: str) -> bool:
    """Whether no number is NaN or infinite in the named arrays, as far as they are there."""
    return all(bool(np.isfinite(arrays[name]).all()) for name in names if name in arrays)


def ranks(
    scores: Float[np.ndarray, 'N M'], right: Bool[np.ndarray, 'N M']
) -> Int[np.ndarray, ' N']:
    """The number of wrong answers that score at least as high as the best right one.

    So an answer is a hit if its rank is 0, and scores that are all equal are no hit.

    Args:
      scores: of M answers, finite.
      right: which of them are right; without any, all others come first.
    """
    best = np.where(right, scores, -np.inf).max(axis=1, keepdims=True)
    return ((scores >= best) & ~right).sum(axis=1)
