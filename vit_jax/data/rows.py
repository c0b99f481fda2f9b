"""One process's rows of a batch, made as a plan says."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Iterable
from typing import Any

import numpy as np

from vit_jax.data.batches import Batch, Process, Spec, zeros
from vit_jax.data.plans import Plan, base
from vit_jax.data.records import BrokenRecord, Record, check_ids
from vit_jax.errors import UserError

Read = tuple[int, Record]  # an example and its number in the source


@dataclasses.dataclass(frozen=True)
class Loader:
    """Makes batches by their numbers.

    Row r of batch k of training draws from the generator of (seed, k * R + r), with R rows of the
    largest batch; an example of an evaluation from that of (0, its number).

    Attributes:
      plan: which examples make which batch.
      process: whose rows to make.
    """

    plan: Plan
    process: Process

    def train_batch(self, k: int) -> Batch:
        """This process's rows of batch k of training."""
        spec, examples = self.plan.batch(k)
        draws = k * self._rows + np.arange(len(examples))
        slots = examples.reshape(len(examples), -1).shape[1]
        draws = draws[:, None] * slots + np.arange(slots)
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
        mine = self.process.rows(len(examples))
        batch = zeros(spec, len(mine))
        shape = (len(mine), draws.shape[1])
        index, mask = np.zeros(shape, np.int32), np.zeros(shape, np.float32)
        for row, number in enumerate(mine):
            pairs = zip(examples.reshape(draws.shape)[number], draws[number], strict=True)
            read = self._read(pairs, seed, replace)
            for slot, (found, _) in enumerate(read):
                index[row, slot], mask[row, slot] = found, 1
            if read:
                self._put(batch, row, read, spec)
        rest = (len(mine), *examples.shape[1:])
        return {**batch, 'index': index.reshape(rest), 'mask': mask.reshape(rest)}

    def _read(self, pairs: Iterable[tuple[Any, Any]], seed: int, replace: bool) -> list[Read]:
        """The examples, less padding and broken ones that are not replaced.

        Args:
          pairs: number and draw of each.
          seed: of what the transforms draw.
          replace: whether the next one takes the place of a broken one.
        """
        read, examples = [], self.plan.examples
        for index, draw in ((int(i), int(draw)) for i, draw in pairs if i != base.NONE):
            with contextlib.suppress(BrokenRecord):
                if replace:
                    read.append(examples.first_readable(index, seed, draw))
                else:
                    read.append((index, examples.read(index, seed, draw)))
        return read

    def _put(self, batch: Batch, row: int, read: list[Read], spec: Spec) -> None:
        """Fit examples into a row."""
        source = self.plan.examples.source
        try:
            made = self.plan.join([record for _, record in read], spec)
            for key, array in batch.items():
                array[row] = checked(key, made[key], array, source.info.vocab_size)
        except UserError as error:
            names = ', '.join(source.record_name(index) for index, _ in read)
            raise UserError(f'{names}: {error}') from error


def checked(key: str, value: Any, array: np.ndarray, vocab_size: int) -> Any:
    """The value of a record if it fits into a row of `array` as it is; raises UserError if not."""
    shape = array.shape[1:]
    # Assignment would broadcast one channel to three.
    if np.shape(value) != shape:
        if len(shape) == 1:
            how = 'set config.data.buckets=(16, 32, 64)'
        else:
            how = "with 'resize(224)'" if key == 'image' else "with 'pad_objects(100)'"
        raise UserError(
            f'{key} of shape {np.shape(value)} among others of {shape}; bring all to one size, '
            f'for example {how}'
        )
    if array.dtype == np.int32:
        check_ids(key, np.asarray(value), vocab_size if len(shape) == 1 else 0)
    return value
