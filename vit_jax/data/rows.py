"""Loading of one process's rows of a batch, by a plan."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
from collections.abc import Iterator
from typing import Any

import numpy as np

from vit_jax.data.batches import Batch, Process, Spec, marks, marks_of, zeros
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

    def _batch(
        self, spec: Spec, examples: np.ndarray, draws: np.ndarray, seed: int, replace: bool
    ) -> Batch:
        self._check(examples)
        mine = self.process.rows(len(examples))
        batch = zeros(spec | marks(self.plan.slots), len(mine))
        index, mask = marks_of(batch)
        coming = iter(examples[mine].ravel().tolist())
        slots = examples[0].size
        self._expect(coming, AHEAD * slots)
        for row, at in enumerate(mine):
            self._expect(coming, slots)
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

    def _expect(self, coming: Iterator[int], count: int) -> None:
        some = itertools.islice(coming, count)
        self.plan.examples.expect(i for i in some if i != base.NONE)

    def _read(self, index: int, seed: int, draw: int, replace: bool) -> tuple[int, Record] | None:
        """An example and its index; None for a broken one that is not replaced."""
        if replace:
            return self.plan.examples.first_readable(index, seed, draw)
        with contextlib.suppress(BrokenRecord):
            return index, self.plan.examples.read(index, seed, draw)
        return None

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


def checked(key: str, value: Any, array: np.ndarray, vocab_size: int) -> Any:
    """Return the value of a record if it has the shape of `array`; else raise UserError."""
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
    if array.dtype == np.int32:
        check_ids(key, np.asarray(value), vocab_size if array.ndim == 1 else 0)
    return value
