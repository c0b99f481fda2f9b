"""Loading of one process's rows of a batch, by a plan."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
from typing import Any

import numpy as np

from vit_jax.data.batches import ArraySpec, Batch, Process, Spec, marks, marks_of, zeros
from vit_jax.data.plans import Plan, base
from vit_jax.data.records import BrokenRecord, Record, check_ids
from vit_jax.errors import UserError

AHEAD = 64  # rows whose examples are on their way


@dataclasses.dataclass(frozen=True)
class Loader:
    """Make batches by their numbers.

    Row r of batch k of training draws from the generator of (seed, k * R + r), where the largest
    batch has R rows; an example of an evaluation draws from that of (0, its index).

    Attributes:
      plan: assigns examples to batches.
      process: the process whose rows to make.
    """

    plan: Plan
    process: Process

    def train_batch(self, k: int) -> Batch:
        """This process's rows of batch k of training."""
        spec, examples = self.plan.batch(k)
        slots = examples[0].size
        draws = k * self._rows * slots + np.arange(examples.size).reshape(-1, slots)
        return self._batch(spec, examples, draws, self.plan.seed, self.plan.replaces_broken)

    def eval_batch(self, k: int) -> Batch:
        """This process's rows of batch k of an evaluation."""
        spec, examples = self.plan.eval_batch(k)
        draws = examples.reshape(len(examples), -1)
        return self._batch(spec, examples, draws, seed=0, replace=False)

    @functools.cached_property
    def _rows(self) -> int:
        return max(shape.rows for shape in self.plan.shapes)

    @functools.cached_property
    def _dtypes(self) -> dict[str, np.dtype]:
        """The dtypes of the first example; empty for a plan of your own that takes texts."""
        with contextlib.suppress(UserError):
            return {name: spec.dtype for name, spec in self.plan.spec_of(self.plan.example).items()}
        return {}

    def _batch(
        self, spec: Spec, examples: np.ndarray, draws: np.ndarray, seed: int, replace: bool
    ) -> Batch:
        self._check(examples)
        mine = self.process.rows(len(examples))
        batch = zeros(spec | marks(self.plan.slots), len(mine))
        index, mask = marks_of(batch)
        coming = (i for i in examples[mine].ravel().tolist() if i != base.NONE)
        slots = examples[0].size
        self.plan.examples.expect(itertools.islice(coming, AHEAD * slots))
        for row, at in enumerate(mine):
            self.plan.examples.expect(itertools.islice(coming, slots))
            wanted = zip(np.atleast_1d(examples[at]).tolist(), draws[at].tolist(), strict=True)
            read = [self._read(i, seed, draw, replace) for i, draw in wanted if i != base.NONE]
            if found := [one for one in read if one is not None]:
                numbers, records = zip(*found, strict=True)
                index[row, : len(found)], mask[row, : len(found)] = numbers, 1
                self._put({name: batch[name][row, ...] for name in spec}, spec, numbers, records)
        return batch

    def _check(self, examples: np.ndarray) -> None:
        """Raise UserError if the plan gives rows of other examples than its `slots` say."""
        if examples.shape[1:] != (slots := self.plan.slots):
            raise UserError(
                f'{type(self.plan).__module__}: examples of shape {examples.shape} do not match '
                f'`Plan.slots`, {slots}; override `rows` or `slots`, or give one example a row'
            )

    def _read(self, index: int, seed: int, draw: int, replace: bool) -> tuple[int, Record] | None:
        """An example and its index; None for a broken one that is not replaced."""
        if replace:
            index, record = self.plan.examples.first_readable(index, seed, draw)
        else:
            try:
                record = self.plan.examples.read(index, seed, draw)
            except BrokenRecord:
                return None
        try:
            check_alike(record, self._dtypes)
        except UserError as error:
            raise UserError(f'{self.plan.examples.source.record_name(index)}: {error}') from error
        return index, record

    def _put(
        self, row: Batch, spec: Spec, numbers: tuple[int, ...], records: tuple[Record, ...]
    ) -> None:
        """Fit examples into the arrays of a row."""
        source = self.plan.examples.source
        try:
            made = self.plan.join(records, spec)
            for key, array in row.items():
                array[...] = checked(key, made[key], array, source.info.vocab_size)
        except UserError as error:
            names = ', '.join(map(source.record_name, numbers))
            raise UserError(f'{names}: {error}') from error


def check_alike(record: Record, dtypes: dict[str, np.dtype]) -> None:
    """Raise UserError unless a record has the arrays of the first one, in their dtypes.

    Assignment to a batch would cast in silence, 21200 to 208 and NaN to 0.
    """
    for name, dtype in dtypes.items():
        if name not in record:
            raise UserError(
                f'there is no {name!r}, which the first example has; it has {", ".join(record)}'
            )
        value = record[name]
        if getattr(value, 'dtype', None) == dtype:
            continue
        try:
            value = np.asarray(value)
        except ValueError as error:  # lists of different lengths
            raise UserError(f'{name!r} is no array: {error}') from error
        if ArraySpec.of(value).dtype != dtype:
            raise UserError(
                f'{name!r} is of {value.dtype}, that of the first example of {dtype}; give all '
                'examples one dtype'
            )


def checked(key: str, value: Any, array: np.ndarray, vocab_size: int) -> Any:
    """Return the value of a row if it has the shape and dtype of `array`; else raise UserError."""
    # Assignment would broadcast one channel to three.
    if np.shape(value) != array.shape:
        if array.ndim == 1:
            how = 'set config.data.buckets=(16, 32, 64)'
        else:
            how = "with 'resize(224)'" if key == 'image' else "with 'pad_objects(100)'"
        raise UserError(
            f'{key} of shape {np.shape(value)} among others of {array.shape}; bring all to one '
            f'size, for example {how}'
        )
    if (dtype := ArraySpec.of(value).dtype) != array.dtype:
        raise UserError(f'{key} of {dtype} among others of {array.dtype}; give all one dtype')
    if array.dtype == np.int32:
        check_ids(key, np.asarray(value), vocab_size if array.ndim == 1 else 0)
    return value
