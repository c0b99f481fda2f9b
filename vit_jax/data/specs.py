"""What the examples and the batches of a source are like, before any is made."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np

from vit_jax.data.buckets import Bucketed
from vit_jax.data.records import first_readable
from vit_jax.data.rng import example_rng
from vit_jax.data.splits import Subset
from vit_jax.data.transforms import Transforms
from vit_jax.errors import UserError


@dataclasses.dataclass(frozen=True)
class ArraySpec:
    """Shape and dtype of one example's array."""

    shape: tuple[int, ...]
    dtype: np.dtype


@dataclasses.dataclass(frozen=True)
class Epoch:
    """The batches of training data.

    Attributes:
      examples: of an epoch.
      batch_size: examples of a global batch, on average where there are buckets.
      rows: of each kind of batch; None stands for `batch_size`.
      shapes: of one example of each kind of batch, and how many of them a batch has on the
        average of all batches.
    """

    examples: int
    batch_size: float
    rows: tuple[int | None, ...]
    shapes: tuple[tuple[float, dict[str, ArraySpec]], ...]


def epoch(source: Subset | Bucketed, transforms: Transforms, batch_size: int) -> Epoch:
    """What an epoch of `train_batches` is made of."""
    if not isinstance(source, Bucketed):
        shapes = ((batch_size, element_spec(source, transforms)),)
        return Epoch(len(source), batch_size, (None,), shapes)
    plan = source.train_plan(batch_size)
    kinds = zip(plan.counts, plan.rows, plan.bounds, strict=True)
    return Epoch(
        plan.examples,
        plan.examples / plan.steps,
        plan.rows,
        tuple((n * rows / plan.steps, _sequences(source, bound)) for n, rows, bound in kinds),
    )


def element_spec(source: Subset | Bucketed, transforms: Transforms) -> dict[str, ArraySpec]:
    """Shapes and dtypes of one transformed example: integers are int32, floats float32.

    Sequences in buckets have the length of the longest bucket.
    """
    if isinstance(source, Bucketed):
        return _sequences(source, source.bounds[-1])
    index, record = first_readable(source, 0)
    try:
        record = transforms(record, example_rng(0, 0))
    except UserError as error:
        raise UserError(f'{source.record_name(index)}: {error}') from error
    if texts := [key for key, value in record.items() if isinstance(value, str)]:
        raise UserError(
            f'{source.title}: {texts[0]!r} is text; make ids of it with config.data.vocab and '
            "transforms='tokenize', and batches with config.data.buckets=(16, 32, 64)"
        )
    return {key: _array_spec(value) for key, value in record.items()}


def _sequences(source: Bucketed, length: int) -> dict[str, ArraySpec]:
    return {name: ArraySpec((length,), np.dtype(np.int32)) for name in source.names}


def _array_spec(value: Any) -> ArraySpec:
    array = np.asarray(value)
    narrow = {'i': np.dtype(np.int32), 'f': np.dtype(np.float32)}
    return ArraySpec(array.shape, narrow.get(array.dtype.kind, array.dtype))
