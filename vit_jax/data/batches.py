"""What batches are like, and which of their rows a process makes."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from vit_jax.data.records import Record
from vit_jax.errors import UserError

Batch = dict[str, np.ndarray]


@dataclasses.dataclass(frozen=True)
class ArraySpec:
    """Shape and dtype of one example's array."""

    shape: tuple[int, ...]
    dtype: np.dtype

    @classmethod
    def of(cls, value: Any) -> ArraySpec:
        """The spec of a value in a batch: integers become int32, floats float32."""
        array = np.asarray(value)
        narrow = {'i': np.dtype(np.int32), 'f': np.dtype(np.float32)}
        return cls(array.shape, narrow.get(array.dtype.kind, array.dtype))


Spec = dict[str, ArraySpec]


@dataclasses.dataclass(frozen=True)
class Shape:
    """One kind of batch.

    Attributes:
      rows: examples of a global batch, padding rows included.
      share: of all batches of an epoch, those that are of this kind.
      spec: of one example.
    """

    rows: int
    share: float
    spec: Spec


def as_facts(shapes: Sequence[Shape]) -> list[Any]:
    """What a checkpoint keeps of the kinds of batches, as JSON can hold it: see `from_facts`."""
    return [
        [kind.rows * kind.share, {k: [s.shape, s.dtype.name] for k, s in kind.spec.items()}]
        for kind in shapes
    ]


def from_facts(facts: Sequence[Any]) -> list[tuple[float, Spec]]:
    """Each kind of batch: the examples that it contributes to a step on average, and one's spec."""
    return [
        (
            rows,
            {name: ArraySpec(tuple(shape), np.dtype(dtype)) for name, (shape, dtype) in it.items()},
        )
        for rows, it in facts
    ]


def kinds_of_checkpoint(meta: Mapping[str, Any]) -> list[tuple[float, Spec]]:
    """Each kind of batch that a run was trained on, see `from_facts`.

    Args:
      meta: of a checkpoint.

    Returns:
      An empty list for a checkpoint that does not tell the shapes of its examples.
    """
    if 'shapes' in meta:
        return from_facts(meta['shapes'])
    # Checkpoints of before said as much of plain images and of sequences alone.
    size, channels = meta.get('input_size'), meta.get('image', {}).get('channels')
    if size and channels:
        images = ArraySpec((*size, channels), np.dtype(np.uint8))
        return [(meta['config']['batch_size'], {'image': images})]
    return [
        (rows, {name: ArraySpec(tuple(shape), np.dtype(np.int32)) for name, shape in it.items()})
        for rows, it in meta.get('sequences', [])
    ]


@dataclasses.dataclass(frozen=True)
class Process:
    """One of the processes that share every global batch.

    Attributes:
      index: which one this is, from 0.
      count: how many there are.
    """

    index: int = 0
    count: int = 1

    def rows(self, batch_size: int) -> range:
        """The rows of a global batch that this process makes.

        Raises:
          UserError: if the processes cannot share the batch equally.
        """
        if batch_size < 1 or batch_size % self.count:
            raise UserError(
                f'batch_size={batch_size}: must be positive and divide among the {self.count} '
                'processes'
            )
        each = batch_size // self.count
        return range(self.index * each, (self.index + 1) * each)


MASKED = {'pixel_mask': 'image', 'object_mask': 'boxes'}  # masks that are not called NAME_mask


def fit(record: Record, spec: Spec) -> Record:
    """Pad every array of an example with zeros, so that it goes into a batch with others.

    Args:
      record: as it comes out of the transforms.
      spec: of the padded arrays; one that is called `NAME_mask`, and is not in the record, becomes
        true where the array NAME has values.

    Returns:
      the arrays of `spec`. One that is larger than that stays as it is.
    """
    row = {name: _padded(np.asarray(record[name]), spec[name].shape) for name in record}
    for name in spec.keys() - record.keys():
        of = MASKED.get(name, name.removesuffix('_mask'))
        mask = np.zeros(spec[name].shape, bool)
        mask[tuple(map(slice, np.shape(record[of])[: mask.ndim]))] = True
        row[name] = mask
    return row


def _padded(array: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
    smaller = array.ndim == len(shape) and all(
        n <= m for n, m in zip(array.shape, shape, strict=True)
    )
    if not smaller or array.shape == shape:
        return array
    padded = np.zeros(shape, array.dtype)
    padded[tuple(map(slice, array.shape))] = array
    return padded


def zeros(spec: Spec, rows: int) -> Batch:
    """A batch of `rows` examples that are all zero."""
    return {name: np.zeros((rows, *s.shape), s.dtype) for name, s in spec.items()}
