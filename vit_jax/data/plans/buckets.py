"""Sequences of different lengths in batches of few shapes.

Bucket b takes the examples of at most `buckets[b]` tokens (and more than `buckets[b - 1]`), where
the longest sequence of an example counts. Its batches are padded to that length, and have as many
rows as make `batch_size` tokens on one side. In every epoch each bucket is shuffled and cut into
batches, the last of them filled up with masked rows, and the batches of all buckets are shuffled.
So an epoch has always the same number of batches, and batch k stays a function of (seed, k).
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence

import numpy as np

from vit_jax.data import order
from vit_jax.data.batches import ArraySpec, Batch, Shape, Spec
from vit_jax.data.plans import base
from vit_jax.data.plans.lengths import Lengths, measure
from vit_jax.data.records import SourceInfo
from vit_jax.errors import UserError, check_choice

COUNTS = ('padded', 'target')
ROWS = 8  # the rows of a training batch are a multiple of it, so that devices share them evenly


@dataclasses.dataclass(frozen=True)
class Cut:
    """Examples sorted into buckets, and these cut into batches.

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
        """Batches of each bucket."""
        return tuple(-(-len(m) // r) for m, r in zip(self.members, self.rows, strict=True))

    @property
    def steps(self) -> int:
        """Batches of all buckets."""
        return sum(self.counts)

    def places(self, number: int) -> tuple[int, np.ndarray]:
        """The bucket of a batch, and the places of its examples in it."""
        ends = np.cumsum(self.counts)
        bucket = int(np.searchsorted(ends, number, side='right'))
        first = (number - int(ends[bucket]) + self.counts[bucket]) * self.rows[bucket]
        return bucket, np.arange(first, min(first + self.rows[bucket], len(self.members[bucket])))


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class Plan(base.Plan):
    """Batches of sequences of like lengths; every example is read when the plan is made.

    Attributes:
      buckets: length of each bucket in tokens, growing.
      count: the tokens that `batch_size` counts in training: 'padded', all slots of one side, or
        'target' for those of the target alone, on average over the batches of a bucket.

    Raises:
      UserError: for wrong options, or examples without sequences of known lengths.
    """

    buckets: tuple[int, ...]
    count: str = 'padded'

    replaces_broken = False  # the next example may be longer

    def __post_init__(self) -> None:
        super().__post_init__()
        check_bounds(self.buckets)
        check_choice('count', self.count, COUNTS)
        self.lengths  # noqa: B018  reads

    @property
    def unit(self) -> str:
        return 'tokens'

    @functools.cached_property
    def lengths(self) -> Lengths:
        return measure(self.examples)

    @property
    def info(self) -> SourceInfo:
        info = self.examples.info
        # A source may not tell the size of its vocabulary.
        return dataclasses.replace(info, vocab_size=info.vocab_size or self.lengths.largest + 1)

    @functools.cached_property
    def spec(self) -> Spec:
        return self._spec(self.buckets[-1])

    @functools.cached_property
    def epoch(self) -> Cut:
        """The batches of an epoch of training; examples beyond the last bucket are left out.

        Raises:
          UserError: if a batch cannot hold the longest sequences, or there is no example.
        """
        cut = train_cut(
            self.lengths.longest,
            self.buckets,
            self.batch_size,
            self.lengths.targets if self.count == 'target' else None,
        )
        if not cut.steps:
            raise UserError(
                f'{self.examples.source.title}: no example has at most {self.buckets[-1]} tokens'
            )
        return cut

    @functools.cached_property
    def _evaluation(self) -> Cut:
        return eval_cut(self.lengths.longest, self.buckets, self.batch_size, self.multiple)

    @property
    def shapes(self) -> tuple[Shape, ...]:
        cut = self.epoch
        kinds = zip(cut.rows, cut.counts, cut.bounds, strict=True)
        return tuple(Shape(rows, n / cut.steps, self._spec(bound)) for rows, n, bound in kinds)

    @property
    def members(self) -> np.ndarray:
        return np.concatenate(_members(self.lengths.longest, (self.buckets[-1],)))

    @property
    def examples_per_step(self) -> float:
        return len(self.members) / self.epoch.steps

    @property
    def tokens_per_step(self) -> float:
        return float(self.lengths.targets[self.members].sum() / self.epoch.steps)

    @property
    def notes(self) -> tuple[str, ...]:
        long = len(self.examples) - len(self.members)
        return (f'{long:,} examples are longer than the last bucket: left out',) if long else ()

    def batch(self, k: int) -> tuple[Spec, base.Rows]:
        cut = self.epoch
        epoch, position = divmod(k, cut.steps)
        # An own shuffle for the batches, and one for each bucket.
        stream = epoch * (len(cut.rows) + 1)
        shuffle = functools.partial(order.shuffled, seed=self.seed)
        number = shuffle(np.array([position]), size=cut.steps, epoch=stream)
        bucket, places = cut.places(int(number[0]))
        members = cut.members[bucket]
        places = shuffle(places, size=len(members), epoch=stream + 1 + bucket)
        return self._rows(cut, bucket, members[places])

    @property
    def eval_steps(self) -> int:
        return self._evaluation.steps

    def eval_batch(self, k: int) -> tuple[Spec, base.Rows]:
        cut = self._evaluation
        bucket, places = cut.places(k)
        return self._rows(cut, bucket, cut.members[bucket][places])

    def tally(self, batch: Batch) -> dict[str, int]:
        real = {'sentences': batch['mask'], 'tokens': batch.get('target', batch['mask'])}
        return {name: int(np.count_nonzero(array)) for name, array in real.items()}

    def _rows(self, cut: Cut, bucket: int, examples: np.ndarray) -> tuple[Spec, base.Rows]:
        rows = np.full(cut.rows[bucket], base.NONE)
        rows[: len(examples)] = examples
        return self._spec(cut.bounds[bucket]), rows

    def _spec(self, length: int) -> Spec:
        sequence = ArraySpec((length,), np.dtype(np.int32))
        return dict.fromkeys(self.lengths.names, sequence) | self.lengths.others


def train_cut(
    lengths: np.ndarray,
    bounds: Sequence[int],
    batch_size: int,
    targets: np.ndarray | None = None,
) -> Cut:
    """Batches of about `batch_size` tokens; examples beyond the last bucket are left out.

    Args:
      lengths: of the longest sequence of each example; 0 for a broken record.
      bounds: length of each bucket, growing.
      batch_size: tokens of one side of a batch, padding included.
      targets: of the target of each example; if given, `batch_size` counts these instead, on
        average over the batches of each bucket and without padding.

    Raises:
      UserError: as `train_rows`.
    """
    rows, members = train_rows(bounds, batch_size), _members(lengths, bounds)
    if targets is not None:
        means = [float(targets[m].mean()) if len(m) else 0.0 for m in members]
        rows = tuple(
            max(round(batch_size / mean / ROWS), 1) * ROWS if mean else bucket_rows
            for mean, bucket_rows in zip(means, rows, strict=True)
        )
    return Cut(tuple(bounds), rows, members)


def eval_cut(lengths: np.ndarray, bounds: Sequence[int], batch_size: int, multiple: int = 1) -> Cut:
    """Batches of about `batch_size` tokens that leave nothing out.

    What is longer than the last bucket goes to a further one, as long as the longest. The rows are
    a multiple of `multiple`, and no more than needed.
    """
    longest = int(lengths.max(initial=0))
    bounds = (*bounds, longest) if longest > bounds[-1] else tuple(bounds)
    members = _members(lengths, bounds)
    wanted = (
        max(1, min(batch_size // bound, len(m))) for bound, m in zip(bounds, members, strict=True)
    )
    return Cut(bounds, tuple(-(-rows // multiple) * multiple for rows in wanted), members)


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


def check_bounds(bounds: tuple[int, ...]) -> None:
    """Raises UserError unless the lengths of the buckets are positive and grow."""
    whole = all(isinstance(bound, int) and bound > 0 for bound in bounds)
    if not bounds or not whole or list(bounds) != sorted(set(bounds)):
        raise UserError(f'buckets={bounds}: write growing lengths in tokens, such as (16, 32, 64)')


def _members(lengths: np.ndarray, bounds: Sequence[int]) -> tuple[np.ndarray, ...]:
    lows = (0, *bounds[:-1])
    return tuple(
        np.flatnonzero((lengths > low) & (lengths <= high))
        for low, high in zip(lows, bounds, strict=True)
    )
