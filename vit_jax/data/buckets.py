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
from collections.abc import Sequence

import numpy as np

from vit_jax.data import order
from vit_jax.data.records import BrokenRecord, Record, SourceInfo
from vit_jax.data.splits import Subset
from vit_jax.data.transforms import Transforms
from vit_jax.errors import UserError

ROWS = 8  # the rows of a training batch are a multiple of it, so that devices share them evenly
_UNUSED = np.random.default_rng(0)  # no transform of a sequence draws from it


@dataclasses.dataclass(frozen=True)
class Plan:
    """Which examples make which batch.

    Attributes:
      bounds: the length of the sequences of each bucket, in tokens.
      rows: of a batch of each bucket.
      members: the examples of each bucket, in the order of the source.
    """

    bounds: tuple[int, ...]
    rows: tuple[int, ...]
    members: tuple[np.ndarray, ...]

    @functools.cached_property
    def counts(self) -> tuple[int, ...]:
        """Batches of each bucket in an epoch."""
        return tuple(-(-len(m) // r) for m, r in zip(self.members, self.rows, strict=True))

    @property
    def steps(self) -> int:
        """Batches of an epoch."""
        return sum(self.counts)

    @property
    def examples(self) -> int:
        """Examples of an epoch."""
        return sum(map(len, self.members))

    def in_order(self, k: int) -> tuple[int, np.ndarray]:
        """The bucket and the examples of batch k of the only pass, bucket after bucket."""
        bucket, positions = self._locate(k)
        return bucket, self.members[bucket][positions]

    def shuffled(self, k: int, seed: int) -> tuple[int, np.ndarray]:
        """The bucket and the examples of batch k of training; fewer than its rows in the last."""
        epoch, position = divmod(k, self.steps)
        # An own shuffle for the batches, and one for each bucket.
        stream = epoch * (len(self.rows) + 1)
        number = order.shuffled(np.array([position]), size=self.steps, seed=seed, epoch=stream)
        bucket, positions = self._locate(int(number[0]))
        members = self.members[bucket]
        places = order.shuffled(positions, size=len(members), seed=seed, epoch=stream + 1 + bucket)
        return bucket, members[places]

    def _locate(self, number: int) -> tuple[int, np.ndarray]:
        ends = np.cumsum(self.counts)
        bucket = int(np.searchsorted(ends, number, side='right'))
        first = (number - int(ends[bucket]) + self.counts[bucket]) * self.rows[bucket]
        return bucket, np.arange(first, min(first + self.rows[bucket], len(self.members[bucket])))


class Bucketed:
    """A source of sequences, the transforms applied, whose lengths are known.

    Itself a `Source`; a record is {name: int32 [n]}.

    Attributes:
      source: the examples before the transforms.
      bounds: length of each bucket, growing.
      lengths: of the longest sequence of each example; 0 for a broken record.
      targets: of the sequence `target` of each example; 0 where there is none.
      names: of the sequences.
    """

    def __init__(
        self, source: Subset, transforms: Transforms, bounds: Sequence[int], cache: bool = False
    ):
        """Reads and transforms every example once.

        Args:
          source: what `open_source` returns.
          transforms: make sequences of it, as `tokenize` does.
          bounds: `config.data.buckets`.
          cache: keeps the sequences in memory, so that none is made again.

        Raises:
          UserError: if the bounds do not grow, a transform draws random numbers or something
            else than sequences comes out of them.
        """
        self.source, self.title, self.bounds = source, source.title, tuple(bounds)
        self._transforms = transforms
        _check_bounds(self.bounds)
        if transforms.random:
            raise UserError(
                f'transforms {transforms.spec!r}: lengths that are random have no bucket; leave '
                'out config.data.buckets or what draws random numbers'
            )
        self.lengths, self.targets = np.zeros((2, len(source)), np.int64)
        self.names: tuple[str, ...] = ()
        self._cache: list[Record] = []
        for index in range(len(source)):
            record: Record = {}
            with contextlib.suppress(BrokenRecord):
                record = self._read(index)
                self.names = tuple(record)
            self.lengths[index] = max(map(len, record.values()), default=0)
            self.targets[index] = len(record.get('target', ()))
            if cache:
                self._cache.append(record)

    @property
    def info(self) -> SourceInfo:
        if (vocab := self._transforms.vocab) is None:
            return self.source.info
        return dataclasses.replace(self.source.info, vocab_size=len(vocab))

    def __len__(self) -> int:
        return len(self.source)

    def __getitem__(self, index: int, /) -> Record:
        cached = self._cache[index] if self._cache else {}
        return cached or self._read(index)

    def labels(self) -> np.ndarray:
        return self.source.labels()

    def record_name(self, index: int, /) -> str:
        return self.source.record_name(index)

    def text(self, index: int, /) -> Record:
        """The strings of an example that the transforms make ids of; empty if there are none."""
        record: Record = {}
        with contextlib.suppress(BrokenRecord):
            now = self.source[index]
            for step in self._transforms.steps:
                texts = {name: value for name, value in now.items() if isinstance(value, str)}
                record = texts or record
                now = step(now, _UNUSED)
        return record

    def train_plan(self, batch_size: int) -> Plan:
        """Batches of about `batch_size` tokens; examples beyond the last bucket are left out.

        Raises:
          UserError: as `train_rows`, or if there is no example.
        """
        rows = train_rows(self.bounds, batch_size)
        plan = Plan(self.bounds, rows, self._members(self.bounds))
        if not plan.steps:
            raise UserError(f'{self.title}: no example has at most {self.bounds[-1]} tokens')
        return plan

    def eval_plan(self, batch_size: int, multiple: int = 1) -> Plan:
        """Batches of about `batch_size` tokens that leave nothing out.

        What is longer than the last bucket goes to a further one, as long as the longest. The
        rows are a multiple of `multiple`, and no more than needed.
        """
        longest = int(self.lengths.max(initial=0))
        bounds = (*self.bounds, longest) if longest > self.bounds[-1] else self.bounds
        members = self._members(bounds)
        wanted = (
            max(1, min(batch_size // bound, len(m)))
            for bound, m in zip(bounds, members, strict=True)
        )
        return Plan(bounds, tuple(-(-rows // multiple) * multiple for rows in wanted), members)

    def _members(self, bounds: tuple[int, ...]) -> tuple[np.ndarray, ...]:
        lows = (0, *bounds[:-1])
        return tuple(
            np.flatnonzero((self.lengths > low) & (self.lengths <= high))
            for low, high in zip(lows, bounds, strict=True)
        )

    def _read(self, index: int) -> Record:
        record = self.source[index]
        try:
            record = self._transforms(record, _UNUSED)
        except UserError as error:
            raise UserError(f'{self.record_name(index)}: {error}') from error
        for name, value in record.items():
            array = np.asarray(value)
            if array.ndim != 1 or array.dtype.kind != 'i':
                raise UserError(
                    f'{self.record_name(index)}: {name!r} is no sequence of ids; with buckets, '
                    "the transforms end in 'tokenize'"
                )
        return record


@dataclasses.dataclass(frozen=True)
class Loader:
    """Makes one process's rows of batch k.

    Attributes:
      source, plan: of the batches.
      rows: this process's rows of a batch of each bucket.
      seed: of the order of training.
    """

    source: Bucketed
    plan: Plan
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


def train_rows(bounds: Sequence[int], batch_size: int) -> tuple[int, ...]:
    """The rows of a batch of each bucket, about `batch_size` tokens, in training.

    Raises:
      UserError: if the longest bucket gets fewer than `ROWS`.
    """
    if batch_size < ROWS * bounds[-1]:
        raise UserError(
            f'batch_size={batch_size}: with buckets it counts tokens, and {ROWS} rows of '
            f'{bounds[-1]} are {ROWS * bounds[-1]}; raise it or lower the buckets'
        )
    return tuple(batch_size // bound // ROWS * ROWS for bound in bounds)


def _check_bounds(bounds: tuple[int, ...]) -> None:
    whole = all(isinstance(bound, int) and bound > 0 for bound in bounds)
    if not bounds or not whole or list(bounds) != sorted(set(bounds)):
        raise UserError(f'buckets={bounds}: write growing lengths in tokens, such as (16, 32, 64)')
