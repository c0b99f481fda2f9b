"""What an evaluator is, and what it sees of a data set."""

from __future__ import annotations

import abc
from typing import Any, Protocol

import numpy as np

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
    evaluator learns, `update` for every batch of the split itself, and `result`. Batches hold real
    examples of all processes, each exactly once and without padding.

    Attributes:
      learns: whether it learns from a second split, `fit` in the config.
      signature: the rules by which the numbers are made, for those who want to compare them.
    """

    learns: bool = False
    signature: str = ''

    def open(self, dataset: Dataset, fit: Dataset | None = None) -> None:  # noqa: B027, a default
        """Checks the data and indexes the ground truth.

        Args:
          dataset: what predictions are compared with.
          fit: what the evaluator learns from; None unless it `learns`.

        Raises:
          UserError: if the data do not suit the evaluator.
        """

    def start(self) -> None:  # noqa: B027, a default
        """Forgets the pass before."""

    def fit(self, predictions: Arrays, batch: Arrays) -> None:  # noqa: B027, a default
        """Takes one batch of the split to learn from, if it `learns`; arguments as of `update`."""

    @abc.abstractmethod
    def update(self, predictions: Arrays, batch: Arrays) -> None:
        """Takes one batch.

        Args:
          predictions: what the task's `predict` returns, {name: [B ...]}.
          batch: the arrays of the batch with at most two dimensions; `index` [B] is the number of
            each example in the source.

        Raises:
          UserError: if the task does not predict what is measured.
        """

    @abc.abstractmethod
    def result(self) -> dict[str, float]:
        """The numbers of a pass; called once, after its last batch."""

    def names(self) -> tuple[str, ...]:
        """Of the numbers in `result`, as far as they are known before; empty if they are not."""
        return ()
