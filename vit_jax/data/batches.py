"""Batch shapes, each process's rows of a global batch, and the order of examples.

Every epoch is shuffled without storing a permutation.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import numpy as np

from vit_jax.array_types import Int
from vit_jax.data.records import Record
from vit_jax.errors import UserError

Batch = dict[str, np.ndarray]
INDEX_AND_MASK = {'index': np.dtype(np.int32), 'mask': np.dtype(np.float32)}
MASKED = {'pixel_mask': 'image', 'object_mask': 'boxes'}  # masks whose array has another name
BLOCKS = (100, 1000, 10_000)  # block lengths over which a mixture keeps its shares
PART = 4096  # positions of an epoch that are shuffled at once
# Luby and Rackoff (1988) need four rounds. Tiny data sets need a few more, and a domain of at least
# 64, to have all orders equally often.
ROUNDS = 6
MIN_HALF_BITS = 3


@dataclasses.dataclass(frozen=True)
class ArraySpec:
    """Shape and dtype of one example's array."""

    shape: tuple[int, ...]
    dtype: np.dtype

    @classmethod
    def from_value(cls, value: Any) -> ArraySpec:
        """Return the spec of a value in a batch: integers become int32, floats float32."""
        array = np.asarray(value)
        narrow = {'i': np.dtype(np.int32), 'f': np.dtype(np.float32)}
        return cls(array.shape, narrow.get(array.dtype.kind, array.dtype.newbyteorder('=')))


Spec = dict[str, ArraySpec]


@dataclasses.dataclass(frozen=True)
class Shape:
    """One kind of batch.

    Attributes:
      rows: Rows of a global batch including padding; one example per row unless `slots` is given.
      share: Share of this kind among an epoch's batches.
      spec: Spec of a row's examples.
      slots: See `Plan.slots`.
    """

    rows: int
    share: float
    spec: Spec
    slots: tuple[int, ...] = ()

    @property
    def arrays(self) -> Spec:
        """Arrays of a row, including `index` and `mask`."""
        return self.spec | index_and_mask(self.slots)


def as_facts(shapes: Sequence[Shape]) -> list[Any]:
    """Encode the kinds of batches as JSON values for a checkpoint; inverse of `from_facts`."""
    return [
        [kind.rows * kind.share, {k: [s.shape, s.dtype.name] for k, s in kind.spec.items()}]
        for kind in shapes
    ]


def from_facts(facts: Sequence[Any]) -> list[tuple[float, Spec]]:
    """Decode each kind of batch: its mean number of examples per step, and an example's spec."""
    return [
        (
            rows,
            {k: ArraySpec(tuple(shape), np.dtype(dtype)) for k, (shape, dtype) in arrays.items()},
        )
        for rows, arrays in facts
    ]


def kinds_from_checkpoint(meta: Mapping[str, Any]) -> list[tuple[float, Spec]]:
    """Return the kinds of batches that a run was trained on, see `from_facts`.

    Args:
      meta: Checkpoint metadata.

    Returns:
      The kinds; empty if the checkpoint does not record the shapes of its examples.
    """
    if 'shapes' in meta:
        return from_facts(meta['shapes'])
    # Older checkpoints record plain images or sequences only.
    size, channels = meta.get('input_size'), meta.get('image', {}).get('channels')
    if size and channels:
        images = ArraySpec((*size, channels), np.dtype(np.uint8))
        return [(meta['config']['batch_size'], {'image': images})]
    return [
        (
            rows,
            {name: ArraySpec(tuple(shape), np.dtype(np.int32)) for name, shape in arrays.items()},
        )
        for rows, arrays in meta.get('sequences', [])
    ]


@dataclasses.dataclass(frozen=True)
class Process:
    """One of the processes that share every global batch.

    Attributes:
      parts: Ascending indices, from 0, of the equal parts of a batch that this process makes.
      count: Number of parts of a batch.
    """

    parts: tuple[int, ...] = (0,)
    count: int = 1

    @classmethod
    def holding(cls, shards: Collection[int], count: int) -> Process:
        """Return the process whose devices hold `shards` of a batch of `count`, in lowest terms.

        Raises:
          ValueError: if the shards are not among `count`.
        """
        for size in range(count, 0, -1):
            parts = {shard // size for shard in shards}
            if count % size == 0 and len(parts) * size == len(shards):
                return cls(tuple(sorted(parts)), count // size)
        raise ValueError(f'{shards} are not among {count} shards')

    def rows(self, batch_size: int) -> Int[np.ndarray, ' rows']:
        """Return the rows of a global batch that this process makes.

        Raises:
          UserError: if the batch does not divide into the parts.
        """
        if batch_size < 1 or batch_size % self.count:
            raise UserError(
                f'batch_size={batch_size}: must be positive and divide into the {self.count} equal '
                'parts that processes share'
            )
        return np.arange(batch_size).reshape(self.count, -1)[list(self.parts)].ravel()


def pad(record: Record, spec: Spec) -> Record:
    """Pad every array of an example with zeros to the shapes of its batch.

    Args:
      record: Transformed record.
      spec: Spec of the padded arrays. A mask `NAME_mask` that the record lacks is added, true where
        the array NAME has values.

    Returns:
      The arrays of `spec`. An array larger than its spec stays unchanged.
    """
    row = {name: _pad_array(np.asarray(record[name]), spec[name].shape) for name in record}
    for name in spec.keys() - record.keys():
        masked = MASKED.get(name, name.removesuffix('_mask'))
        mask = np.zeros(spec[name].shape, bool)
        mask[tuple(map(slice, np.shape(record[masked])[: mask.ndim]))] = True
        row[name] = mask
    return row


def _pad_array(array: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
    fits = array.ndim == len(shape) and all(n <= m for n, m in zip(array.shape, shape, strict=True))
    if not fits or array.shape == shape:
        return array
    padded = np.zeros(shape, array.dtype)
    padded[tuple(map(slice, array.shape))] = array
    return padded


def index_and_mask(slots: tuple[int, ...] = ()) -> Spec:
    """Return the arrays that every row has: source `index` of its examples, and `mask`, 1 if real.

    Args:
      slots: (n,) for a row of up to n examples, () for one example; see `Plan.slots`.
    """
    return {name: ArraySpec(slots, dtype) for name, dtype in INDEX_AND_MASK.items()}


def empty_batch(
    spec: Spec, rows: int, slots: tuple[int, ...] = ()
) -> tuple[Batch, np.ndarray, np.ndarray]:
    """Make a batch of padding, with views [rows n] of its `index` and `mask` to fill.

    Args:
      spec: Spec of the arrays except `index` and `mask`.
      rows: Number of rows.
      slots: See `index_and_mask`; n is 1 if empty.
    """
    batch = {name: np.zeros((rows, *s.shape), s.dtype) for name, s in spec.items()}
    batch |= {name: np.zeros((rows, *slots), dtype) for name, dtype in INDEX_AND_MASK.items()}
    return batch, batch['index'].reshape(rows, -1), batch['mask'].reshape(rows, -1)


def shuffled(positions: np.ndarray, *, size: int, seed: int, epoch: int) -> np.ndarray:
    """Return the examples at `positions` of a shuffled epoch of `size` examples.

    A permutation of 0..size-1 for every (seed, epoch): a Feistel network over the next
    power of four, walked along its cycle until the value is inside (Black and Rogaway,
    2002, "Ciphers with arbitrary finite domains"). Each position is computed independently, so
    resuming is immediate, and no library release can change the order.

    Args:
      positions: Integers in 0..size-1, any shape.
      size: Number of examples.
      seed: Any integer.
      epoch: Any integer.

    Returns:
      int64 indices with the shape of `positions`.
    """
    half = max(MIN_HALF_BITS, ((size - 1).bit_length() + 1) // 2)
    keys = [_word(seed, epoch, number) for number in range(ROUNDS)]
    index = _feistel(np.asarray(positions, np.uint64).reshape(-1), half, keys)
    while (outside := index >= size).any():
        index[outside] = _feistel(index[outside], half, keys)
    return index.astype(np.int64).reshape(np.shape(positions))


def shuffled_epochs(positions: np.ndarray, *, size: int, seed: int) -> np.ndarray:
    """Return the training examples at `positions`, one shuffled epoch after the other.

    Args:
      positions: Nonnegative integers, [n].
      size: Number of examples.
      seed: Any integer.

    Returns:
      int64 [n].
    """
    epochs, within = np.divmod(positions, size)
    parts_per_epoch = -(-size // PART)
    parts = epochs * parts_per_epoch + within // PART
    examples = np.empty(len(positions), np.int64)
    for number in np.unique(parts).tolist():
        in_part = parts == number
        epoch, part = divmod(number, parts_per_epoch)
        examples[in_part] = _shuffle_part(part, size, seed, epoch)[within[in_part] - part * PART]
    return examples


@functools.lru_cache(maxsize=16)
def _shuffle_part(part: int, size: int, seed: int, epoch: int) -> Int[np.ndarray, ' n']:
    """Return the examples at PART positions of an epoch, or fewer at its end.

    Thousands at once take little longer than one small batch.
    """
    positions = np.arange(part * PART, min((part + 1) * PART, size))
    return shuffled(positions, size=size, seed=seed, epoch=epoch)


@dataclasses.dataclass(frozen=True)
class Mixture:
    """An order of examples that mixes sources in fixed shares.

    Every block of positions has the same number of examples of each source. Each source runs
    through its own shuffled epochs, at its own pace.

    Attributes:
      names: Source names.
      shares: Share of the examples that each source contributes; they sum to 1.
      sizes: Number of examples of each source.
    """

    names: tuple[str, ...]
    shares: tuple[float, ...]
    sizes: tuple[int, ...]

    @functools.cached_property
    def counts(self) -> Int[np.ndarray, ' S']:
        """Number of each source's examples in a block, exact for shares in steps of 0.01%."""
        for block in BLOCKS:
            exact = np.array(self.shares) * block
            if np.allclose(exact, np.rint(exact), rtol=0, atol=1e-6):
                return np.rint(exact).astype(np.int64)
        counts = np.floor(exact).astype(np.int64)
        counts[np.argsort(counts - exact, kind='stable')[: block - counts.sum()]] += 1
        return counts

    def examples(self, positions: Int[np.ndarray, ' n'], seed: int) -> Int[np.ndarray, ' n']:
        """Return the training examples at `positions`, numbered through all sources."""
        member, numbers = self._slots(positions, seed)
        examples = np.empty_like(numbers)
        for source, size in enumerate(self.sizes):
            in_source = member == source
            source_seed = int(_word(seed, source + 1)[0])
            examples[in_source] = shuffled_epochs(numbers[in_source], size=size, seed=source_seed)
        return examples + np.cumsum([0, *self.sizes])[member]

    def seen(self, positions: int, seed: int) -> dict[str, float]:
        """Return the share of each source in the first `positions` training examples.

        Paths are shortened to their last components, unless two of these are equal.
        """
        full_blocks, remainder = divmod(positions, int(self.counts.sum()))
        member, _ = self._slots(positions - remainder + np.arange(remainder), seed)
        counts = full_blocks * self.counts + np.bincount(member, minlength=len(self.names))
        short = [name.rpartition('/')[2] or name for name in self.names]
        names = short if len(set(short)) == len(short) else self.names
        return dict(zip(names, (counts / max(positions, 1)).tolist(), strict=True))

    def _slots(
        self, positions: Int[np.ndarray, ' n'], seed: int
    ) -> tuple[Int[np.ndarray, ' n'], Int[np.ndarray, ' n']]:
        """Return the source of each position, and how many of its examples come before."""
        blocks, within = np.divmod(positions, self.counts.sum())
        member, number = np.empty_like(positions), np.empty_like(positions)
        for block in np.unique(blocks):
            in_block = blocks == block
            members, ranks = _mix_block(tuple(self.counts.tolist()), seed, int(block))
            member[in_block], number[in_block] = members[within[in_block]], ranks[within[in_block]]
        return member, number + blocks * self.counts[member]


@functools.lru_cache
def _mix_block(
    counts: tuple[int, ...], seed: int, block: int
) -> tuple[Int[np.ndarray, ' n'], Int[np.ndarray, ' n']]:
    """Return each position's source in a block, and its rank among positions of that source."""
    size, block_seed = sum(counts), int(_word(seed, 0)[0])
    slots = shuffled(np.arange(size), size=size, seed=block_seed, epoch=block)
    members = np.searchsorted(np.cumsum(counts), slots, side='right')
    ranks = np.empty_like(members)
    ranks[np.argsort(members, kind='stable')] = np.concatenate(list(map(np.arange, counts)))
    return members, ranks


def _feistel(x: np.ndarray, half: int, keys: Sequence[np.ndarray]) -> np.ndarray:
    mask = np.uint64((1 << half) - 1)
    left, right = x >> np.uint64(half), x & mask
    for key in keys:
        left, right = right, left ^ (_mix(right ^ key) & mask)
    return (left << np.uint64(half)) | right


def _mix(x: np.ndarray) -> np.ndarray:
    """Apply the finalizer of SplitMix64 (Steele et al. 2014)."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def _word(*parts: int) -> np.ndarray:
    """Hash integers to one 64-bit word, in an array because NumPy wraps arrays silently."""
    word = np.zeros(1, np.uint64)
    for part in parts:
        word = _mix(word + np.uint64((part + 0x9E3779B97F4A7C15) % 2**64))
    return word
