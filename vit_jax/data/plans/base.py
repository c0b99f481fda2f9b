"""The base class of plans."""

from __future__ import annotations

import abc
import dataclasses
import functools
from collections.abc import Sequence

import numpy as np

from vit_jax.array_types import Int
from vit_jax.data import batches
from vit_jax.data.batches import ArraySpec, Batch, Shape, Spec
from vit_jax.data.examples import Examples
from vit_jax.data.records import Record, SourceInfo
from vit_jax.errors import UserError

NONE = -1  # padding instead of an example
Rows = Int[np.ndarray, 'rows *n']


@dataclasses.dataclass(frozen=True, eq=False)
class Plan(abc.ABC):
    """Assignment of examples to batches, and the shapes that they are padded to.

    Options of a plan are keyword-only fields. Requirements of training are checked on first use.

    Attributes:
      examples: the examples to make batches of.
      batch_size: of a global batch, in examples, or in tokens if the plan counts these.
      seed: of the order, 0 or more.
      multiple: the rows of evaluation batches are a multiple of it.
      replaces_broken: whether the next example replaces a broken one in training; else its row is
        masked.
    """

    examples: Examples
    batch_size: int
    seed: int = 0
    multiple: int = 1

    replaces_broken = True

    def __post_init__(self) -> None:
        if self.seed < 0:
            raise UserError(f'seed={self.seed}: must be 0 or more')
        if self.batch_size < 1:
            raise UserError(f'batch_size={self.batch_size}: must be positive')

    @abc.abstractmethod
    def batch(self, k: int) -> tuple[Spec, Rows]:
        """Batch k of training, a pure function of (seed, k).

        Returns:
          The arrays of a row, one of the specs of `shapes`; and the indices of the examples in the
          rows of the global batch, `NONE` for padding: [rows *slots]. `join` combines those of a
          row.
        """

    @functools.cached_property
    def spec(self) -> Spec:
        """The arrays of one of the largest rows, to which evaluation pads all of them."""
        return self.spec_of(self.example)

    @property
    def shapes(self) -> tuple[Shape, ...]:
        """The kinds of training batches; the last one has the largest rows.

        Raises:
          UserError: if no batch can be made of the examples.
        """
        return (Shape(self.batch_size, 1, self.spec, self.slots),)

    @property
    def members(self) -> Int[np.ndarray, ' N']:
        """The examples of an epoch of training."""
        return np.arange(len(self.examples))

    @functools.cached_property
    def slots(self) -> tuple[int, ...]:
        """The shape of `index` and `mask` in a row: (n,) if it holds up to n examples, else ()."""
        return self.rows.shape[1:]

    @property
    def examples_per_row(self) -> float:
        """Examples of a row in training, on average."""
        return np.count_nonzero(self.rows != NONE) / len(self.rows) if self.slots else 1

    @property
    def examples_per_step(self) -> float:
        """Examples of a training batch, on average."""
        return self.batch_size * self.examples_per_row

    @property
    def tokens_per_step(self) -> float:
        """Tokens of the target in a training batch, on average and without padding; else 0."""
        return 0

    @functools.cached_property
    def unit(self) -> str:
        """The unit of rates: 'images', 'examples' or 'tokens'."""
        return 'images' if 'image' in self.spec else 'examples'

    @property
    def info(self) -> SourceInfo:
        """Facts about the data for the model."""
        return self.examples.info

    @property
    def notes(self) -> tuple[str, ...]:
        """Remarks on the training data, one a line."""
        return ()

    @functools.cached_property
    def rows(self) -> Rows:
        """The examples of each row of an epoch, in their order; [rows n] if a row holds several."""
        return np.arange(len(self.examples))

    @property
    def eval_steps(self) -> int:
        """Batches of an evaluation."""
        return -(-len(self.rows) // self._eval_rows)

    def eval_batch(self, k: int) -> tuple[Spec, Rows]:
        """Batch k of an evaluation, which has every example once; see `batch`."""
        real = self.rows[k * self._eval_rows :][: self._eval_rows]
        rows = np.full((self._eval_rows, *self.slots), NONE)
        rows[: len(real)] = real
        return self.spec, rows

    @property
    def _eval_rows(self) -> int:
        # Padding is masked, so that the result does not depend on `multiple`.
        return -(-min(self.batch_size, len(self.rows)) // self.multiple) * self.multiple

    def pad(self, record: Record, spec: Spec) -> Record:
        """Pad the arrays of an example to `spec`; see `batches.pad`."""
        return batches.pad(record, spec)

    def join(self, records: Sequence[Record], spec: Spec) -> Record:
        """Combine the examples of a row, by default a single one."""
        (record,) = records
        return self.pad(record, spec)

    def tally(self, batch: Batch) -> dict[str, int]:
        """Counts over this process's rows of a training batch, without padding."""
        return {self.unit: int(np.count_nonzero(batch['mask']))}

    @functools.cached_property
    def example(self) -> Record:
        """The first example that can be read."""
        index, record = self.examples.first_readable(0)
        if texts := [key for key, value in record.items() if isinstance(value, str)]:
            raise UserError(
                f'{self.examples.source.title}: {texts[0]!r} is text; convert it to ids with '
                f'config.data.vocab and transforms="tokenize({texts[0]!r}, 64)", or with '
                "transforms='tokenize' and config.data.buckets=(16, 32, 64)"
            )
        if taken := {'index', 'mask'} & record.keys():
            name = self.examples.source.record_name(index)
            raise UserError(f'{name}: {min(taken)!r} is a reserved name in batches')
        return record

    def spec_of(self, record: Record) -> Spec:
        """The arrays of a record."""
        return {key: ArraySpec.from_value(value) for key, value in record.items()}
