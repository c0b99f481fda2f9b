"""Sources with other numbers of their classes.

Classes may have ids in the data's own files. A file numbers the classes that it lists, so files
that list others agree by ids alone.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np

from vit_jax.data import listing
from vit_jax.data.records import (
    Annotated,
    Listing,
    Record,
    Source,
    SourceInfo,
    listing_of,
    with_class,
)
from vit_jax.errors import UserError


def numbered_as(source: Source, classes: SourceInfo, title: str) -> Source:
    """A source with classes numbered as others', by their ids; itself if one has no ids.

    Args:
      source: may lack some of the classes.
      classes: to number by.
      title: of the source, for messages.

    Raises:
      UserError: for a class that is not among `classes`, or has another name there.
    """
    info = source.info
    if not (info.class_ids and classes.class_ids):
        return source
    numbers = {number: label for label, number in enumerate(classes.class_ids)}
    for number, name in zip(info.class_ids, info.class_names, strict=True):
        if number not in numbers:
            raise UserError(f'{title}: category {number} ({name!r}) is none of the training data')
        if name != (other := classes.class_names[numbers[number]]):
            raise UserError(
                f'{title}: category {number} is {name!r}, and {other!r} in another file'
            )
    if info.class_ids == classes.class_ids:
        return source
    new = np.array([numbers[number] for number in info.class_ids])
    stuff = tuple(new[list(info.stuff)].tolist())
    kind = _Annotated if isinstance(source, Annotated) else _Renumbered
    return kind(source, new, dataclasses.replace(classes, stuff=stuff))


def chosen(source: Source, classes: Sequence[int]) -> Source:
    """A source with class `classes[k]` numbered k; labels of other classes become -1."""
    new = np.full(source.info.num_classes, -1)
    new[list(classes)] = np.arange(len(classes))
    names = source.info.class_names
    info = SourceInfo(len(classes), tuple(names[c] for c in classes if c < len(names)))
    return _Renumbered(source, new, info)


def union(infos: Sequence[SourceInfo]) -> SourceInfo:
    """All classes of files that are read as one, by their ids; the first file's without ids."""
    first, *others = infos
    if not all(info.class_ids for info in infos) or all(info == first for info in others):
        return first
    rows = {
        number: (name, label in info.stuff)
        for info in reversed(infos)
        for label, (number, name) in enumerate(zip(info.class_ids, info.class_names, strict=True))
    }
    ids = tuple(sorted(rows))
    names, stuff = zip(*(rows[number] for number in ids), strict=True)
    return SourceInfo(len(ids), names, stuff=tuple(np.flatnonzero(stuff).tolist()), class_ids=ids)


class _Renumbered:
    """A source whose class k is numbered `new[k]`, -1 if it is left out."""

    def __init__(self, source: Source, new: np.ndarray, info: SourceInfo):
        self._source, self._new, self.info = source, new, info

    def __len__(self) -> int:
        return len(self._source)

    def __getitem__(self, index: int, /) -> Record:
        record = with_class(self._source[index], len(self._new), self._source, index)
        return self._renumbered(record)

    def labels(self) -> np.ndarray:
        return self._new[self._source.labels()]

    def listing(self, indices: np.ndarray, /) -> Listing:
        found = listing_of(self._source, indices)
        return found._replace(examples=listing.digest_of(found.examples, self._new))

    def record_name(self, index: int, /) -> str:
        return self._source.record_name(index)

    def _renumbered(self, record: Record) -> Record:
        found = {key: self._new[record[key]] for key in ('label', 'labels') if key in record}
        return record | {key: value.astype(np.int32) for key, value in found.items()}


class _Annotated(_Renumbered):
    """One that knows all but the image without reading it."""

    def annotations(self, index: int) -> Record:
        return self._renumbered(self._source.annotations(index))  # type: ignore[attr-defined]
