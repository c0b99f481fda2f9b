"""The lengths of sequences of ids, for plans that sort examples by them."""

from __future__ import annotations

import contextlib
import dataclasses

import numpy as np
from jaxtyping import Int

from vit_jax.data.batches import ArraySpec, Spec
from vit_jax.data.examples import Examples
from vit_jax.data.records import BrokenRecord, Record, check_ids
from vit_jax.errors import UserError


@dataclasses.dataclass(frozen=True)
class Lengths:
    """How long the sequences of all examples are.

    Attributes:
      longest: sequence of each example; 0 for a broken record.
      targets: of the sequence `target` of each example; 0 where there is none.
      names: of the sequences, the fields that are arrays of one dimension of whole numbers.
      others: the specs of the other fields.
      largest: of all ids.
    """

    longest: Int[np.ndarray, ' N']
    targets: Int[np.ndarray, ' N']
    names: tuple[str, ...]
    others: Spec
    largest: int


def measure(examples: Examples) -> Lengths:
    """Read and transform every example once.

    Raises:
      UserError: if a transform draws random numbers, or there are no sequences.
    """
    if examples.transforms.random:
        raise UserError(
            f'transforms {examples.transforms.spec!r}: lengths that are random have no bucket; '
            'leave out config.data.buckets or what draws random numbers'
        )
    longest, targets = np.zeros((2, len(examples)), np.int64)
    names: tuple[str, ...] = ()
    others: Spec = {}
    largest = 0
    for index in range(len(examples)):
        with contextlib.suppress(BrokenRecord):
            record = examples.read(index)
            ids = _sequences(examples, index, record)
            names = tuple(ids)
            others = {k: ArraySpec.of(value) for k, value in record.items() if k not in ids}
            longest[index] = max(map(len, ids.values()))
            targets[index] = len(ids.get('target', ()))
            largest = max(largest, *(int(np.max(array, initial=0)) for array in ids.values()))
    return Lengths(longest, targets, names, others, largest)


def _sequences(examples: Examples, index: int, record: Record) -> dict[str, np.ndarray]:
    """The sequences of a record, checked."""
    name = examples.source.record_name(index)
    for key, value in record.items():
        if isinstance(value, str):
            raise UserError(
                f'{name}: {key!r} is no sequence of ids; with buckets, the transforms end in '
                "'tokenize'"
            )
    arrays = {key: np.asarray(value) for key, value in record.items()}
    ids = {k: array for k, array in arrays.items() if array.ndim == 1 and array.dtype.kind == 'i'}
    if not ids:
        raise UserError(f'{name}: there is no sequence of ids; it has {", ".join(record)}')
    for key, array in ids.items():
        try:
            # Of a source that does not tell its vocabulary, ids are what an int32 holds.
            check_ids(key, array, examples.info.vocab_size or 2**31)
        except UserError as error:
            raise UserError(
                f'{name}: {error}; correct it, or the size of the vocabulary'
            ) from error
    return ids
