"""Transforms of the record's fields, not of its pixels."""

from __future__ import annotations

import logging
from collections.abc import Callable

import numpy as np

from vit_jax.data.records import Record
from vit_jax.data.transforms.arguments import check_positive
from vit_jax.data.transforms.movable import OBJECTS, check_objects
from vit_jax.data.transforms.registry import of_annotations, transform
from vit_jax.errors import UserError

log = logging.getLogger(__name__)


@transform
@of_annotations
def keep(*names: str) -> Callable[[Record], Record]:
    """Keep only the named fields of the record."""
    if not names or not all(isinstance(name, str) for name in names):
        raise ValueError("needs the fields' names, for example keep('image', 'label')")

    def apply(record: Record) -> Record:
        if missing := [name for name in names if name not in record]:
            raise UserError(f'there is no {missing[0]!r}; the record has {", ".join(record)}')
        return {name: record[name] for name in names}

    return apply


@transform
@of_annotations
def pad_objects(count: int) -> Callable[[Record], Record]:
    """Pad every record to `count` objects for batching; the last transform.

    The arrays of `movable.OBJECTS` are padded with zeros, and `object_mask`, bool [count], is
    true in the rows of objects. If there are more objects, the first are kept; this is logged when
    it happens for the first, tenth, hundredth time, and so on.
    """
    check_positive(count=count)
    cut = 0

    def apply(record: Record) -> Record:
        nonlocal cut
        if 'boxes' not in record and 'masks' not in record:
            raise UserError(f'the record has no boxes or masks; it has {", ".join(record)}')
        check_objects(record)
        rows = {name: np.asarray(record[name]) for name in OBJECTS if name in record}
        number = len(next(iter(rows.values())))
        if number > count:
            cut += 1
            if str(cut).strip('0') == '1':
                message = 'pad_objects(%d): a record with %d objects is cut; %d so far'
                log.warning(message, count, number, cut)
        padded = {name: _padded(array, count) for name, array in rows.items()}
        return {**record, **padded, 'object_mask': np.arange(count) < number}

    return apply


@transform
@of_annotations
def number_masks() -> Callable[[Record], Record]:
    """Join the `masks` [N, H, W] of objects into `segments`, int16 [H, W]: 1 + the row of the
    object that a pixel belongs to, the last of several, or 0 for none.

    Segments take one N-th of the memory of masks in a batch.
    """

    def apply(record: Record) -> Record:
        if 'masks' not in record:
            raise UserError(f'the record has no masks; it has {", ".join(record)}')
        segments = np.zeros(np.shape(record['masks'])[1:], np.int16)
        for row, mask in enumerate(record['masks']):
            segments[mask != 0] = row + 1
        rest = {name: value for name, value in record.items() if name != 'masks'}
        return {**rest, 'segments': segments}

    return apply


def _padded(array: np.ndarray, count: int) -> np.ndarray:
    padded = np.zeros((count, *array.shape[1:]), array.dtype)
    padded[: len(array)] = array[:count]
    return padded
