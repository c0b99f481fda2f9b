"""Sequences of different lengths in batches of few shapes.

Bucket b holds the examples whose longest sequence has at most `buckets[b]` tokens (and more than
`buckets[b - 1]`). Its batches are padded to that length, with as many rows as make `batch_size`
tokens on one side. In every epoch each bucket is shuffled and divided into batches, the last one
padded with masked rows, and the batches of all buckets are shuffled. So every epoch has the same
number of batches, and batch k remains a function of (seed, k).
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import functools
from collections.abc import Sequence

import numpy as np

from vit_jax.data import batches
from vit_jax.data.batches import ArraySpec, Batch, Shape, Spec
from vit_jax.data.plans import base
from vit_jax.data.records import BrokenRecord, Record, SourceInfo, check_ids
from vit_jax.errors import UserError, check_choice

COUNTS = ('padded', 'target')
ROWS = 8  # divisor of a training batch's rows, so that devices share them evenly


@dataclasses.dataclass(frozen=True)
class BucketBatches:
    """Examples sorted into buckets, and buckets divided into batches.

    Attributes:
      bounds: Sequence length of each bucket, in tokens.
      rows: Rows per batch of each bucket.
      members: Examples of each bucket, in the order of the source.
    """

    bounds: tuple[int, ...]
    rows: tuple[int, ...]
    members: tuple[np.ndarray, ...]

    @functools.cached_property
    def counts(self) -> tuple[int, ...]:
        """Number of batches of each bucket."""
        return tuple(-(-len(m) // r) for m, r in zip(self.members, self.rows, strict=True))

    @property
    def steps(self) -> int:
        """Number of batches of all buckets."""
        return sum(self.counts)

    def locate(self, number: int) -> tuple[int, np.ndarray]:
        """Return the bucket of a batch, and the positions of its examples in the bucket."""
        ends = np.cumsum(self.counts)
        bucket = int(np.searchsorted(ends, number, side='right'))
        first = (number - int(ends[bucket]) + self.counts[bucket]) * self.rows[bucket]
        return bucket, np.arange(first, min(first + self.rows[bucket], len(self.members[bucket])))


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class Plan(base.Plan):
    """Batches of sequences of similar lengths; every example is read when the plan is made.

    Sequences are fields with one-dimensional integer arrays.

    Attributes:
      buckets: Increasing lengths of the buckets, in tokens.
      count: Tokens that `batch_size` counts in training: 'padded', all slots of one side, or
        'target', only real target tokens, averaged over the batches of a bucket.

    Raises:
      UserError: for wrong options, transforms that draw random numbers, or no sequences.
    """

    buckets: tuple[int, ...]
    count: str = 'padded'

    replaces_broken = False  # the next example may be too long

    def __post_init__(self) -> None:
        super().__post_init__()
        check_bounds(self.buckets)
        check_choice('count', self.count, COUNTS)
        if self.examples.transforms.random:
            raise UserError(
                f'transforms {self.examples.transforms.spec!r}: buckets need fixed lengths; unset '
                'config.data.buckets or remove the random transforms'
            )
        self._lengths  # noqa: B018  reads all examples

    @functools.cached_property
    def _lengths(self) -> dict[str, np.ndarray]:
        """Length of each sequence of all examples, 0 in broken records."""
        lengths: dict[str, np.ndarray] = collections.defaultdict(
            lambda: np.zeros(len(self.examples), np.int64)
        )
        for index in range(len(self.examples)):
            with contextlib.suppress(BrokenRecord):
                for name, ids in self._sequences(index, self.examples.read(index)).items():
                    lengths[name][index] = len(ids)
        return dict(lengths)  # a default factory does not pickle

    def _sequences(self, index: int, record: Record) -> dict[str, np.ndarray]:
        """Check and return the sequences of a record."""
        record_name = self.examples.source.record_name(index)
        arrays = {name: np.asarray(value) for name, value in record.items()}
        for name, array in arrays.items():
            if array.dtype.kind == 'U':
                raise UserError(
                    f'{record_name}: {name!r} is not a sequence of ids; with buckets, the '
                    'transforms '
                    "end in 'tokenize'"
                )
        ids = {k: x for k, x in arrays.items() if x.ndim == 1 and x.dtype.kind == 'i'}
        if not ids:
            raise UserError(
                f'{record_name}: has no sequence of ids; its fields: {", ".join(record)}'
            )
        for name, array in ids.items():
            try:
                # If a source does not declare its vocabulary, ids are any int32.
                check_ids(name, array, self.examples.info.vocab_size or 2**31)
            except UserError as error:
                raise UserError(
                    f'{record_name}: {error}; correct it, or the size of the vocabulary'
                ) from error
        return ids

    @functools.cached_property
    def longest(self) -> np.ndarray:
        """Length of each example's longest sequence; 0 for a broken record."""
        return np.max(list(self._lengths.values()), axis=0)

    @functools.cached_property
    def targets(self) -> np.ndarray:
        """Length of each example's sequence `target`; 0 if it has none."""
        return self._lengths.get('target', np.zeros_like(self.longest))

    @functools.cached_property
    def info(self) -> SourceInfo:
        info = self.examples.info
        if info.vocab_size:
            return info
        # A source need not know the size of its vocabulary.
        real = np.flatnonzero(self.longest)
        records = (self.examples.read(int(i)) for i in real)
        largest = max(int(np.max(r[name], initial=0)) for r in records for name in self._lengths)
        return dataclasses.replace(info, vocab_size=largest + 1)

    @property
    def unit(self) -> str:
        return 'tokens'

    @functools.cached_property
    def spec(self) -> Spec:
        return self._spec(self.buckets[-1])

    @functools.cached_property
    def epoch(self) -> BucketBatches:
        """Batches of a training epoch, without examples that exceed the last bucket.

        Raises:
          UserError: if a batch cannot hold the longest sequences, or no example is left.
        """
        rows, members = train_rows(self.buckets, self.batch_size), self._members(self.buckets)
        if self.count == 'target':
            means = (float(self.targets[m].mean()) if len(m) else 0.0 for m in members)
            rows = tuple(
                max(round(self.batch_size / mean / ROWS), 1) * ROWS if mean else padded
                for mean, padded in zip(means, rows, strict=True)
            )
        if not any(map(len, members)):
            raise UserError(
                f'{self.examples.source.title}: no example has at most {self.buckets[-1]} tokens'
            )
        return BucketBatches(self.buckets, rows, members)

    @functools.cached_property
    def evaluation(self) -> BucketBatches:
        """Batches of an evaluation, with no more rows than needed.

        Sequences longer than the last bucket go to an extra one that fits the longest.
        """
        most, bounds = int(self.longest.max(initial=0)), self.buckets
        bounds = (*bounds, most) if most > bounds[-1] else bounds
        members = self._members(bounds)
        requested = (
            max(1, min(self.batch_size // bound, len(m)))
            for bound, m in zip(bounds, members, strict=True)
        )
        rows = tuple(-(-n // self.multiple) * self.multiple for n in requested)
        return BucketBatches(bounds, rows, members)

    def _members(self, bounds: tuple[int, ...]) -> tuple[np.ndarray, ...]:
        """Return the examples of each bucket."""
        lows, lengths = (0, *bounds[:-1]), self.longest
        return tuple(
            np.flatnonzero((lengths > low) & (lengths <= high))
            for low, high in zip(lows, bounds, strict=True)
        )

    @property
    def shapes(self) -> tuple[Shape, ...]:
        epoch = self.epoch
        kinds = zip(epoch.rows, epoch.counts, epoch.bounds, strict=True)
        return tuple(Shape(rows, n / epoch.steps, self._spec(bound)) for rows, n, bound in kinds)

    @property
    def members(self) -> np.ndarray:
        return np.concatenate(self._members((self.buckets[-1],)))

    @property
    def examples_per_step(self) -> float:
        return len(self.members) / self.epoch.steps

    @property
    def tokens_per_step(self) -> float:
        return float(self.targets[self.members].sum() / self.epoch.steps)

    @property
    def notes(self) -> tuple[str, ...]:
        long = len(self.examples) - len(self.members)
        return (f'{long:,} examples exceed the last bucket and are ignored',) if long else ()

    def batch(self, k: int) -> tuple[Spec, base.Rows]:
        kinds = self.epoch
        epoch, position = divmod(k, kinds.steps)
        # One shuffle for the batches, and one for each bucket.
        stream = epoch * (len(kinds.rows) + 1)
        shuffle = functools.partial(batches.shuffled, seed=self.seed)
        number = shuffle(np.array([position]), size=kinds.steps, epoch=stream)
        bucket, positions = kinds.locate(int(number[0]))
        size = len(kinds.members[bucket])
        positions = shuffle(positions, size=size, epoch=stream + 1 + bucket)
        return self._rows(kinds, bucket, positions)

    @property
    def eval_steps(self) -> int:
        return self.evaluation.steps

    def eval_batch(self, k: int) -> tuple[Spec, base.Rows]:
        return self._rows(self.evaluation, *self.evaluation.locate(k))

    def tally(self, batch: Batch) -> dict[str, int]:
        real = {'sentences': batch['mask'], 'tokens': batch.get('target', batch['mask'])}
        return {name: int(np.count_nonzero(array)) for name, array in real.items()}

    def _rows(
        self, kinds: BucketBatches, bucket: int, positions: np.ndarray
    ) -> tuple[Spec, base.Rows]:
        rows = np.full(kinds.rows[bucket], base.NONE)
        rows[: len(positions)] = kinds.members[bucket][positions]
        return self._spec(kinds.bounds[bucket]), rows

    def _spec(self, length: int) -> Spec:
        sequence = ArraySpec((length,), np.dtype(np.int32))
        spec = {name: ArraySpec.from_value(value) for name, value in self.example.items()}
        return spec | dict.fromkeys(self._lengths, sequence)


def train_rows(bounds: Sequence[int], batch_size: int) -> tuple[int, ...]:
    """Compute the rows of each bucket's training batches, about `batch_size` tokens each.

    Raises:
      UserError: if the longest bucket gets fewer than `ROWS` rows.
    """
    if batch_size < ROWS * bounds[-1]:
        raise UserError(
            f'batch_size={batch_size}: with buckets it counts tokens, and {ROWS} rows of '
            f'{bounds[-1]} are {ROWS * bounds[-1]}; raise it or lower the buckets'
        )
    return tuple(batch_size // bound // ROWS * ROWS for bound in bounds)


def check_bounds(bounds: tuple[int, ...]) -> None:
    """Raise UserError unless the bucket lengths are positive and increasing."""
    are_positive = all(isinstance(bound, int) and bound > 0 for bound in bounds)
    if not bounds or not are_positive or list(bounds) != sorted(set(bounds)):
        raise UserError(
            f'buckets={bounds}: write increasing lengths in tokens, such as (16, 32, 64)'
        )
