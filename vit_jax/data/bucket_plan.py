"""Which sequences make which batch: buckets of like lengths, cut into batches and shuffled."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence

import numpy as np

from vit_jax.data import order
from vit_jax.errors import UserError

ROWS = 8  # the rows of a training batch are a multiple of it, so that devices share them evenly


@dataclasses.dataclass(frozen=True)
class BucketPlan:
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


def train_plan(
    lengths: np.ndarray,
    bounds: Sequence[int],
    batch_size: int,
    targets: np.ndarray | None = None,
) -> BucketPlan:
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
    return BucketPlan(tuple(bounds), rows, members)


def eval_plan(
    lengths: np.ndarray, bounds: Sequence[int], batch_size: int, multiple: int = 1
) -> BucketPlan:
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
    return BucketPlan(bounds, tuple(-(-rows // multiple) * multiple for rows in wanted), members)


def _members(lengths: np.ndarray, bounds: Sequence[int]) -> tuple[np.ndarray, ...]:
    lows = (0, *bounds[:-1])
    return tuple(
        np.flatnonzero((lengths > low) & (lengths <= high))
        for low, high in zip(lows, bounds, strict=True)
    )


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
