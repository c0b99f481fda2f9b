"""Sources with other numbers of their classes.

Two data sets that have the same classes may number them differently: a folder by the alphabet, a
file by the ids in it, a checkpoint as its author did. Classes are therefore matched by their ids,
if both have these, else by their names.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterable, Sequence

import numpy as np

from vit_jax.data import listing
from vit_jax.data.records import (
    Annotated,
    CountsClasses,
    Expects,
    Listing,
    Record,
    Source,
    SourceInfo,
    listing_of,
    with_class,
)
from vit_jax.data.transforms.movable import OBJECTS
from vit_jax.errors import UserError, one_line

ABSENT = -1  # the number of a class that the others lack
WORDNET_ID = re.compile(r'n\d{8}')  # n01440764, as ImageNet's folders are called
LISTED = 3  # classes that a message names


def numbers(info: SourceInfo, others: SourceInfo, title: str) -> np.ndarray | None:
    """The number of each class among others', int64 [num_classes]; ABSENT for one they lack.

    Args:
      info: of the classes.
      others: to number by.
      title: of the data, for messages.

    Returns:
      None if neither ids nor names tell: one side has none, or neither has all that the other has.

    Raises:
      UserError: if an id has another name among the others.
    """
    if info.class_ids and others.class_ids:
        return _by_id(info, others, title)
    mine, theirs = info.class_names, others.class_names
    if not mine or any(len(one.class_names) != one.num_classes for one in (info, others)):
        return None
    if mine == theirs:
        return np.arange(len(mine))
    place = {name: number for number, name in enumerate(theirs)}
    shared = {name for name in mine if name in place}
    if len(place) < len(theirs):  # a name of several classes stands for none of them
        shared -= {name for name in shared if theirs.count(name) > 1}
    if len(shared) < min(len(mine), len(theirs)) or len(set(mine)) < len(mine):
        return None
    if len(mine) != len(theirs) and not (info.has_names and others.has_names):
        return None  # as numbers, 0 and 1 are among 0 to 9, whatever the classes are
    return np.array([place[name] if name in shared else ABSENT for name in mine])


def _by_id(info: SourceInfo, others: SourceInfo, title: str) -> np.ndarray:
    place = {number: label for label, number in enumerate(others.class_ids)}
    for number, name in zip(info.class_ids, info.class_names, strict=True):
        if number in place and others.class_names:
            other = others.class_names[place[number]]
            if name != other:
                raise UserError(
                    f'{title}: category {number} is {name!r}, and {other!r} in another file'
                )
    return np.array([place.get(number, ABSENT) for number in info.class_ids])


def comparable(info: SourceInfo, others: SourceInfo) -> bool:
    """Whether both name their classes, in the same terms.

    Numbers are no names. ImageNet's classes have ids of WordNet in one place and words in another.
    """
    if not (info.has_names and others.has_names):
        return False
    by_id = [all(map(WORDNET_ID.fullmatch, one.class_names)) for one in (info, others)]
    return by_id[0] == by_id[1]


def listed(info: SourceInfo, others: SourceInfo) -> str:
    """The first few names of classes in brackets, those that the others lack before the rest."""
    if not info.has_names:
        return ''
    known = set(others.class_names)
    return f' ({some(sorted(info.class_names, key=lambda name: name in known))})'


def some(names: Sequence[str]) -> str:
    """The first few of some names, as 'cat, dog, emu, ...'."""
    return ', '.join([*map(_short, names[:LISTED]), *(['...'] if len(names) > LISTED else [])])


def _short(name: str) -> str:
    return one_line(name if len(name) <= 40 else f'{name[:39]}…')


def note(info: SourceInfo, model: SourceInfo, new: np.ndarray) -> str:
    """What a user should know of data whose class k is number `new[k]` among a model's classes.

    Empty if they are the model's, or all of them are matched by id.
    """
    if lacking := [info.class_names[label] for label in np.flatnonzero(new == ABSENT)]:
        return f'classes that the model lacks are left out: {some(lacking)}'
    if (info.class_ids and model.class_ids) or np.array_equal(new, np.arange(model.num_classes)):
        return ''
    if info.num_classes == model.num_classes:
        how = f'the model has them in another order ({some(model.class_names)})'
    else:
        how = f'the model has {model.num_classes:,}, all of which it may predict'
    return f'its {info.num_classes:,} classes are matched by name: {how}'


def joined(source: Source, classes: SourceInfo, title: str) -> Source:
    """A source with the numbers of `classes`, those of all sources that are read as one.

    Raises:
      UserError: if it has other classes.
    """
    new, info = numbers(source.info, classes, title), source.info
    if comparable(info, classes) if new is None else ABSENT in new:
        raise UserError(
            f'{title}: its splits have other classes, {info.num_classes}{listed(info, classes)} '
            f'and {classes.num_classes}{listed(classes, info)}'
        )
    return source if new is None else renumbered(source, new, classes)


def renumbered(source: Source, new: np.ndarray, classes: SourceInfo) -> Source:
    """A source whose class k is class `new[k]` of `classes`; itself if that changes nothing.

    Objects of a class that is ABSENT are left out of their images. Labels of images become ABSENT:
    leave these images out.
    """
    info = source.info
    if np.array_equal(new, np.arange(classes.num_classes)):
        return source
    stuff = tuple(sorted(int(new[label]) for label in info.stuff if new[label] != ABSENT))
    kind = _Annotated if isinstance(source, Annotated) else _Renumbered
    placed = dict(zip(new.tolist(), info.class_names, strict=False))
    names = classes.class_names or tuple(
        placed.get(label, str(label)) for label in range(classes.num_classes)
    )
    named = dataclasses.replace(classes, class_names=names)
    return kind(source, new, dataclasses.replace(named, stuff=stuff, vocab_size=info.vocab_size))


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
    """A source whose class k is numbered `new[k]`, ABSENT if it is left out."""

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

    def class_counts(self, indices: np.ndarray, /) -> np.ndarray | None:
        if not isinstance(self._source, CountsClasses):
            return None
        counts = self._source.class_counts(indices)
        return None if counts is None else self._moved(counts)

    def expect(self, indices: Iterable[int], /) -> None:
        if isinstance(self._source, Expects):
            self._source.expect(indices)

    def record_name(self, index: int, /) -> str:
        return self._source.record_name(index)

    def _renumbered(self, record: Record) -> Record:
        found = dict(record)
        if 'label' in record:
            found['label'] = self._new[record['label']].astype(np.int32)
        if 'labels' in record:
            labels = self._new[record['labels']].astype(np.int32)
            kept = labels != ABSENT
            found['labels'] = labels
            if not kept.all():
                found |= {name: found[name][kept] for name in OBJECTS if name in found}
        if 'real_label' in record:  # a mark for each class
            found['real_label'] = self._moved(record['real_label'])
        return found

    def _moved(self, values: np.ndarray) -> np.ndarray:
        """A value for each class, [num_classes], in the places of the new numbers."""
        moved = np.zeros(self.info.num_classes, values.dtype)
        kept = self._new != ABSENT
        moved[self._new[kept]] = values[kept]
        return moved


class _Annotated(_Renumbered):
    """One that knows all but the image without reading it."""

    def annotations(self, index: int) -> Record:
        return self._renumbered(self._source.annotations(index))  # type: ignore[attr-defined]
