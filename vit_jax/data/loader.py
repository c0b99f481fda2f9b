"""Batches of examples of one shape.

Example g of training is row g % batch_size of batch g // batch_size. It is example
shuffled(g % N) of epoch g // N, and its transforms draw from a generator keyed by
(seed, g).
"""

from __future__ import annotations

import contextlib
import dataclasses
from typing import Any

import numpy as np

from vit_jax.data import order
from vit_jax.data.records import BrokenRecord, Record, first_readable
from vit_jax.data.rng import example_rng
from vit_jax.data.specs import ArraySpec
from vit_jax.data.splits import Cached, Subset
from vit_jax.data.transforms import Transforms
from vit_jax.errors import UserError

Batch = dict[str, np.ndarray]


@dataclasses.dataclass(frozen=True)
class Loader:
    """Makes one process's rows of batch k.

    Attributes:
      source, transforms: of the examples.
      spec: of one example, see `element_spec`.
      batch_size: rows of a global batch.
      rows: this process's.
      seed: of the order of training, and of the transforms.
    """

    source: Subset | Cached
    transforms: Transforms
    spec: dict[str, ArraySpec]
    batch_size: int
    rows: range
    seed: int = 0

    def train_batch(self, k: int) -> Batch:
        examples = k * self.batch_size + np.arange(self.rows.start, self.rows.stop)
        batch = _zeros(self.spec, len(self.rows))
        indices = _train_indices(examples, len(self.source), self.seed)
        for row, (g, index) in enumerate(zip(examples.tolist(), indices, strict=True)):
            self._put(batch, row, *first_readable(self.source, index), g)
        return batch

    def eval_batch(self, k: int) -> Batch:
        batch = _zeros(self.spec, len(self.rows))
        mask = np.zeros(len(self.rows), np.float32)
        first = k * self.batch_size + self.rows.start
        for row, index in enumerate(range(first, min(first + len(mask), len(self.source)))):
            with contextlib.suppress(BrokenRecord):
                self._put(batch, row, index, self.source[index], index)
                mask[row] = 1
        return {**batch, 'mask': mask}

    def _put(self, batch: Batch, row: int, index: int, record: Record, example: int) -> None:
        try:
            record = self.transforms(record, example_rng(self.seed, example))
            for key, array in batch.items():
                array[row] = _checked(key, record[key], array.shape[1:])
        except UserError as error:
            raise UserError(f'{self.source.record_name(index)}: {error}') from error


def _train_indices(examples: np.ndarray, size: int, seed: int) -> list[int]:
    """The index in the source of each training example; a batch may span epochs."""
    epochs, positions = np.divmod(examples, size)
    indices = np.empty_like(examples)
    for epoch in np.unique(epochs):
        now = epochs == epoch
        indices[now] = order.shuffled(positions[now], size=size, seed=seed, epoch=int(epoch))
    return indices.tolist()


def _zeros(spec: dict[str, ArraySpec], rows: int) -> Batch:
    return {key: np.zeros((rows, *s.shape), s.dtype) for key, s in spec.items()}


def _checked(key: str, value: Any, shape: tuple[int, ...]) -> Any:
    # Assignment would broadcast one channel to three.
    if np.shape(value) != shape:
        how = "with 'resize(224)'" if len(shape) > 1 else 'set config.data.buckets=(16, 32, 64)'
        raise UserError(
            f'{key} of shape {np.shape(value)} among others of {shape}; bring all to one size, '
            f'for example {how}'
        )
    return value
