"""Numbers of the classes of several data sets, or of the data and a model.

Two data sets with the same classes may number them differently: a folder alphabetically, a file by
its ids, a checkpoint as its author chose. Classes are therefore matched by ids if both have them,
else by names.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterable, Sequence

import numpy as np

from vit_jax.data import class_names, listing
from vit_jax.data.records import (
    OBJECTS,
    Annotated,
    CountsClasses,
    Expects,
    Listing,
    Record,
    Source,
    SourceInfo,
    check_label,
    list_examples,
)
from vit_jax.errors import UserError, one_line
from vit_jax.ops import panoptic

ABSENT = -1  # number of a class that the others lack
WORDNET_ID = re.compile(r'n\d{8}')  # a folder name of ImageNet, such as n01440764
LISTED = 3  # number of classes named in a message


def class_numbers(info: SourceInfo, others: SourceInfo, title: str) -> np.ndarray | None:
    """Return each class's number among `others`, int64 [num_classes]; ABSENT if they lack it.

    Args:
      info: Classes to number.
      others: Classes with the numbers to use.
      title: Name of the data, for messages.

    Returns:
      The numbers; None if neither ids nor names match: one side has none, or neither contains all
      of the other's.

    Raises:
      UserError: if an id has a different name among the others.
    """
    if info.class_ids and others.class_ids:
        return _match_ids(info, others, title)
    sides = info, others
    names, other_names = (tuple(map(class_names.compose, side.class_names)) for side in sides)
    if not names or any(len(side.class_names) != side.num_classes for side in sides):
        return None
    if names == other_names:
        return np.arange(len(names))
    number_of = {name: number for number, name in enumerate(other_names)}
    shared = {name for name in names if name in number_of}
    if len(number_of) < len(
        other_names
    ):  # a name shared by several classes identifies none of them
        shared -= {name for name in shared if other_names.count(name) > 1}
    if len(shared) < min(len(names), len(other_names)) or len(set(names)) < len(names):
        return None
    if len(names) != len(other_names) and not (info.has_names and others.has_names):
        return None  # plain numbers always match: 0 and 1 are among 0 to 9
    return np.array([number_of[name] if name in shared else ABSENT for name in names])


def _match_ids(info: SourceInfo, others: SourceInfo, title: str) -> np.ndarray:
    number_of = {number: label for label, number in enumerate(others.class_ids)}
    for number, name in zip(info.class_ids, info.class_names, strict=True):
        if number in number_of and others.class_names:
            other = others.class_names[number_of[number]]
            if name != other:
                raise UserError(
                    f'{title}: category {number} is {name!r}, but {other!r} in another file'
                )
    return np.array([number_of.get(number, ABSENT) for number in info.class_ids])


def have_comparable_names(info: SourceInfo, others: SourceInfo) -> bool:
    """Return whether both use the same kind of class names.

    Numbers are not names. ImageNet's classes have WordNet ids in some data and words in others.
    """
    if not (info.has_names and others.has_names):
        return False
    by_id = [all(map(WORDNET_ID.fullmatch, side.class_names)) for side in (info, others)]
    return by_id[0] == by_id[1]


def in_brackets(info: SourceInfo, others: SourceInfo) -> str:
    """Format the first few class names in brackets, starting with those that `others` lack."""
    if not info.has_names:
        return ''
    shared = set(others.class_names)
    return f' ({first_names(sorted(info.class_names, key=lambda name: name in shared))})'


def first_names(names: Sequence[str]) -> str:
    """Format the first few names, such as 'cat, dog, emu, ...'."""
    return ', '.join([*map(_shorten, names[:LISTED]), *(['...'] if len(names) > LISTED else [])])


def _shorten(name: str) -> str:
    return one_line(name if len(name) <= 40 else f'{name[:39]}…')


def renumbering_remark(info: SourceInfo, model: SourceInfo, new: np.ndarray) -> str:
    """Return a warning about data whose class k is number `new[k]` among a model's classes.

    Empty if the classes are the model's, or if all match by id.
    """
    if lacking := [info.class_names[label] for label in np.flatnonzero(new == ABSENT)]:
        return f'ignoring classes that the model lacks: {first_names(lacking)}'
    if (info.class_ids and model.class_ids) or np.array_equal(new, np.arange(model.num_classes)):
        return ''
    if info.num_classes == model.num_classes:
        how = f'the model has them in a different order ({first_names(model.class_names)})'
    else:
        how = f'the model has {model.num_classes:,}, and may predict any of them'
    return f'its {info.num_classes:,} classes are matched by name: {how}'


def with_shared_classes(source: Source, classes: SourceInfo, title: str) -> Source:
    """Renumber a source's classes as in `classes`, the classes of all sources together.

    Raises:
      UserError: if the source has different classes.
    """
    new, info = class_numbers(source.info, classes, title), source.info
    if have_comparable_names(info, classes) if new is None else ABSENT in new:
        have, need = in_brackets(info, classes), in_brackets(classes, info)
        raise UserError(
            f'{title}: its splits have different classes, {info.num_classes}{have} and '
            f'{classes.num_classes}{need}'
        )
    return source if new is None else with_new_numbers(source, new, classes)


def with_new_numbers(source: Source, new: np.ndarray, classes: SourceInfo) -> Source:
    """Renumber class k of a source as class `new[k]` of `classes`; the same source if unchanged.

    Objects of an ABSENT class are dropped from their images. Labels of images become ABSENT: the
    caller drops these images.
    """
    info = source.info
    has_names = classes.class_names in ((), info.class_names)  # else their spelling differs
    if has_names and np.array_equal(new, np.arange(classes.num_classes)):
        return source
    stuff = tuple(sorted(int(new[label]) for label in info.stuff if new[label] != ABSENT))
    kind = _Annotated if isinstance(source, Annotated) else _Renumbered
    placed = dict(zip(new.tolist(), info.class_names, strict=False))
    names = classes.class_names or tuple(
        placed.get(label, str(label)) for label in range(classes.num_classes)
    )
    named = dataclasses.replace(classes, class_names=names, multilabel=info.multilabel)
    return kind(source, new, dataclasses.replace(named, stuff=stuff, vocab_size=info.vocab_size))


def with_only_classes(source: Source, classes: Sequence[int]) -> Source:
    """Renumber class `classes[k]` of a source as k; labels of other classes become -1."""
    new = np.full(source.info.num_classes, -1)
    new[list(classes)] = np.arange(len(classes))
    names = source.info.class_names
    info = SourceInfo(len(classes), tuple(names[c] for c in classes if c < len(names)))
    return _Renumbered(source, new, info)


def merge_classes(infos: Sequence[SourceInfo]) -> SourceInfo:
    """Combine the classes of several files by their ids; without ids return the first file's."""
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
    """A source whose class k has the number `new[k]`, ABSENT to drop it."""

    def __init__(self, source: Source, new: np.ndarray, info: SourceInfo):
        self._source, self._new, self.info = source, new, info

    def __len__(self) -> int:
        return len(self._source)

    def __getitem__(self, index: int, /) -> Record:
        record = check_label(self._source[index], len(self._new), self._source, index)
        return self._renumber(record)

    def labels(self) -> np.ndarray:
        return self._new[self._source.labels()]

    def listing(self, indices: np.ndarray, /) -> Listing:
        digests = list_examples(self._source, indices)
        return digests._replace(examples=listing.digest_of(digests.examples, self._new))

    def class_counts(self, indices: np.ndarray, /) -> np.ndarray | None:
        if not isinstance(self._source, CountsClasses):
            return None
        counts = self._source.class_counts(indices)
        return None if counts is None else self._reorder(counts)

    def expect(self, indices: Iterable[int], /) -> None:
        if isinstance(self._source, Expects):
            self._source.expect(indices)

    def record_name(self, index: int, /) -> str:
        return self._source.record_name(index)

    def _renumber(self, record: Record) -> Record:
        renumbered = dict(record)
        if self.info.multilabel:
            renumbered['label'] = self._reorder(record['label'])
        elif 'label' in record:
            renumbered['label'] = self._new[record['label']].astype(np.int32)
        if 'labels' in record:
            labels = self._new[record['labels']].astype(np.int32)
            is_present = labels != ABSENT
            renumbered['labels'] = labels
            if not is_present.all():
                renumbered |= {
                    name: renumbered[name][is_present] for name in OBJECTS if name in renumbered
                }
                if 'segments' in renumbered:
                    renumbered['segments'] = panoptic.keep_rows(renumbered['segments'], is_present)
        if 'real_label' in record:  # 1 or 0 for each class
            renumbered['real_label'] = self._reorder(record['real_label'])
        return renumbered

    def _reorder(self, values: np.ndarray) -> np.ndarray:
        """Reorder values of classes, [num_classes], by the new numbers."""
        moved = np.zeros(self.info.num_classes, values.dtype)
        is_present = self._new != ABSENT
        moved[self._new[is_present]] = values[is_present]
        return moved


class _Annotated(_Renumbered):
    """A renumbered source with annotations."""

    def annotations(self, index: int) -> Record:
        return self._renumber(self._source.annotations(index))  # type: ignore[attr-defined]
