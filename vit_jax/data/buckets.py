"""Sequences of different lengths in batches of few shapes.

Bucket b takes the examples of at most `bounds[b]` tokens (and more than `bounds[b - 1]`), where
the longest sequence of an example counts. Its batches are padded to that length, and have as many
rows as make `batch_size` tokens on one side. In every epoch each bucket is shuffled and cut into
batches, the last of them filled up with masked rows, and the batches of all buckets are shuffled.
So an epoch has always the same number of batches, and batch k stays a function of (seed, k).
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import math
import pathlib
import sys
from collections.abc import Iterator
from typing import Any

import numpy as np

from vit_jax.data import bucket_plan, vocabulary
from vit_jax.data.batches import ArraySpec, Batch, Process, Shape, Spec, as_facts
from vit_jax.data.bucket_plan import BucketPlan
from vit_jax.data.read_ahead import Loading, read_ahead
from vit_jax.data.records import BrokenRecord, Record, SourceInfo
from vit_jax.data.sequences import SequenceSource
from vit_jax.data.splits import Subset
from vit_jax.errors import UserError, check_choice
from vit_jax.storage import paths, run_folder

COUNTS = ('padded', 'target')


class Buckets:
    """A `Dataset` of sequences in batches of like lengths.

    Args:
      source: the sequences.
      batch_size: tokens of one side of a global batch, padding included.
      count: what `batch_size` counts in training: 'padded', or 'target' for the tokens of the
        target alone, on average over the batches of a bucket.
      seed: of the order, 0 or more.
      multiple: the rows of evaluation batches are a multiple of it.
      process: whose rows to make.
      loading: how batches are read ahead.
    """

    unit = 'tokens'

    def __init__(
        self,
        source: SequenceSource,
        batch_size: int,
        *,
        count: str = 'padded',
        seed: int = 0,
        multiple: int = 1,
        process: Process = Process(),  # noqa: B008  frozen
        loading: Loading = Loading(),  # noqa: B008  frozen
    ):
        if seed < 0:
            raise UserError(f'seed={seed}: must be 0 or more')
        check_choice('count', count, COUNTS)
        self.source, self.batch_size, self._count = source, batch_size, count
        self._seed, self._multiple, self._process, self._loading = seed, multiple, process, loading

    @property
    def examples(self) -> Subset:
        return self.source.source

    @property
    def info(self) -> SourceInfo:
        return self.source.info

    @property
    def vocab(self) -> vocabulary.Tokenizer | None:
        return self.source.vocab

    @functools.cached_property
    def train_plan(self) -> BucketPlan:
        """The batches of an epoch.

        Raises:
          UserError: if a batch cannot hold the longest sequences, or there is no example.
        """
        bounds = self.source.bounds
        targets = self.source.targets if self._count == 'target' else None
        plan = bucket_plan.train_plan(self.source.lengths, bounds, self.batch_size, targets)
        if not plan.steps:
            raise UserError(f'{self.source.title}: no example has at most {bounds[-1]} tokens')
        return plan

    @property
    def spec(self) -> Spec:
        return self._spec(self.source.bounds[-1])

    @property
    def image_size(self) -> None:
        return None

    @property
    def num_examples(self) -> int:
        return self.train_plan.examples

    @property
    def notes(self) -> tuple[str, ...]:
        long = len(self.source) - self.num_examples
        return (f'{long:,} examples are longer than the last bucket: left out',) if long else ()

    @property
    def examples_per_step(self) -> float:
        return self.train_plan.examples / self.train_plan.steps

    @property
    def tokens_per_step(self) -> float:
        """Tokens of the target in a batch of training, on average and without padding."""
        members = self.train_plan.members
        return float(sum(self.source.targets[m].sum() for m in members) / self.train_plan.steps)

    @functools.cached_property
    def shapes(self) -> tuple[Shape, ...]:
        plan = self.train_plan
        kinds = zip(plan.rows, plan.counts, plan.bounds, strict=True)
        return tuple(Shape(rows, n / plan.steps, self._spec(bound)) for rows, n, bound in kinds)

    def train_batches(self, start_step: int = 0) -> Iterator[Batch]:
        make = self._loader(self.train_plan).train_batch
        return read_ahead(make, start_step, sys.maxsize, self._loading, self.examples)

    def eval_batches(self) -> Iterator[Batch]:
        lengths, bounds = self.source.lengths, self.source.bounds
        multiple = math.lcm(self._multiple, self._process.count)
        plan = bucket_plan.eval_plan(lengths, bounds, self.batch_size, multiple)
        make = self._loader(plan).eval_batch
        return read_ahead(make, 0, plan.steps, self._loading, self.examples)

    def count(self, batch: Batch) -> dict[str, int]:
        real = {'sentences': batch['mask'], 'tokens': batch.get('target', batch['mask'])}
        count = self._process.count
        return {name: count * int(np.count_nonzero(array)) for name, array in real.items()}

    def facts(self) -> dict[str, Any]:
        vocab = self.source.vocab
        return {
            'class_names': list(self.info.class_names),
            'image': {},
            'input_size': self.image_size,
            'num_examples': self.num_examples,
            'shapes': as_facts(self.shapes),
            **({'vocab': vocab.digest} if isinstance(vocab, vocabulary.Vocabulary) else {}),
        }

    def text(self, index: int) -> Record:
        return self.source.text(index)

    def check(self, folder: pathlib.Path) -> None:
        vocabulary.require_same(self._file, folder)

    def save(self, folder: pathlib.Path) -> None:
        if self._file is not None:
            paths.write_atomic(folder / run_folder.VOCAB, self._file.model)

    @property
    def _file(self) -> vocabulary.Vocabulary | None:
        """The vocabulary that belongs into the run folder."""
        vocab = self.source.vocab
        return vocab if isinstance(vocab, vocabulary.Vocabulary) else None

    def _spec(self, length: int) -> Spec:
        return {name: ArraySpec((length,), np.dtype(np.int32)) for name in self.source.names}

    def _loader(self, plan: BucketPlan) -> SequenceLoader:
        rows = tuple(self._process.rows(count) for count in plan.rows)
        return SequenceLoader(self.source, plan, rows, self._seed)


@dataclasses.dataclass(frozen=True)
class SequenceLoader:
    """Makes one process's rows of batch k.

    Attributes:
      source, plan: of the batches.
      rows: this process's rows of a batch of each bucket.
      seed: of the order of training.
    """

    source: SequenceSource
    plan: BucketPlan
    rows: tuple[range, ...]
    seed: int = 0

    def train_batch(self, k: int) -> dict[str, np.ndarray]:
        return self._batch(*self.plan.shuffled(k, self.seed))

    def eval_batch(self, k: int) -> dict[str, np.ndarray]:
        return self._batch(*self.plan.in_order(k))

    def _batch(self, bucket: int, examples: np.ndarray) -> dict[str, np.ndarray]:
        rows = self.rows[bucket]
        shape = len(rows), self.plan.bounds[bucket]
        batch = {name: np.zeros(shape, np.int32) for name in self.source.names}
        index, mask = np.zeros(len(rows), np.int32), np.zeros(len(rows), np.float32)
        for row, example in enumerate(examples[rows.start : rows.stop].tolist()):
            with contextlib.suppress(BrokenRecord):
                for name, ids in self.source[example].items():
                    batch[name][row, : len(ids)] = ids
                index[row], mask[row] = example, 1
        return {**batch, 'index': index, 'mask': mask}
