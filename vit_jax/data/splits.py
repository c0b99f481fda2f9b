"""Selections of any source's examples, in the notation of TFDS, and numbers of their classes.

    train                     all of it
    train[:90%]  train[90%:]  shares; the bounds are rounded to the nearest example
    train[100:200]            examples 100 to 199
    train[-10%:]              the last tenth
    train[:5 per class]       the first five of each class
    train[:10% per class]     the first tenth of each class
    train[:50%]+test          one after the other

Examples are counted in the order in which the source stores them.

Two data sets with the same classes may number them differently: a folder by the alphabet, a file by
its ids, a checkpoint as its author did. Classes are therefore matched by ids if both have them,
else by names.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
import logging
import multiprocessing
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from vit_jax.data import batches, class_names, images, listing
from vit_jax.data.records import (
    OBJECTS,
    Annotated,
    BrokenRecord,
    CountsClasses,
    Expects,
    Listing,
    Record,
    ShardIndex,
    Source,
    SourceInfo,
    StoresFiles,
    listing_of,
    with_class,
    with_numbers,
)
from vit_jax.errors import UserError, one_line
from vit_jax.ops import panoptic

log = logging.getLogger(__name__)

BOUND = r'-?\d+(?:(?:\.\d+)?%)?'
TERM = re.compile(
    rf'(?P<name>[^\[\]+\s]+)(\[(?P<low>{BOUND})?:(?P<high>{BOUND})?(?P<per_class> per class)?\])?'
)
ABSENT = -1  # the number of a class that the others lack
WORDNET_ID = re.compile(r'n\d{8}')  # n01440764, as ImageNet's folders are called
LISTED = 3  # classes that a message names


class Member(NamedTuple):
    """A source of a mixture.

    Attributes:
      name: name of the source.
      weight: weight of its examples in training.
      parts: parts of the `Subset` that are its own.
    """

    name: str
    weight: float
    parts: int


class Subset:
    """The examples of one or more sources that a split expression selects.

    It is a `Source` itself. A label outside of 0..num_classes-1 is refused on reading. Broken
    records are logged, and refused once there are more than `broken_limit`. Its copies in other
    processes, workers and those of a job, exchange them by `pop_broken` and `record_broken`, so
    that all of them count together.

    Attributes:
      title: the source's name and the split, for messages.
      members: the sources of a mixture with weights; empty for a single one.
      broken: index -> name and reason of the broken records seen so far, by any copy.
    """

    def __init__(
        self,
        title: str,
        parts: list[tuple[Source, np.ndarray]],
        members: tuple[Member, ...] = (),
    ):
        """`parts` are sources, each with the indices of its selected examples, in order."""
        self.title, self.members = title, members
        self.broken: dict[int, str] = {}
        self._unreported: dict[int, str] = {}
        self._parts = parts
        self._index = ShardIndex(len(indices) for _, indices in parts)
        self._has_slow_storage = any(isinstance(source, Expects) for source, _ in parts)

    @functools.cached_property
    def info(self) -> SourceInfo:
        return self._parts[0][0].info

    def __len__(self) -> int:
        return len(self._index)

    def __getitem__(self, index: int, /) -> Record:
        source, original = self._locate(index)
        try:
            record = source[original]
            record = with_class(record, self.info.num_classes, source, original)
            return with_numbers(record, source, original)
        except BrokenRecord as reason:
            self.report_broken(index, reason)
            raise

    def encoded(self, index: int) -> Record:
        """An example with its image as a file: that of the source, or a PNG without loss.

        Raises:
          BrokenRecord: if it cannot be read.
        """
        source, original = self._locate(index)
        if not (self.has_files and isinstance(source, StoresFiles)):
            return images.as_png(self[index])
        record = with_class(source.encoded(original), self.info.num_classes, source, original)
        return with_numbers(record, source, original)

    @property
    def has_files(self) -> bool:
        """Whether images are stored as files, which `encoded` reads."""
        return all(isinstance(source, StoresFiles) for source, _ in self._parts)

    def annotations(self, index: int) -> Record:
        """The fields of an example's record other than the image, and `size`, the height and width
        of the image in the source. Empty if it is broken.
        """
        source, original = self._locate(index)
        try:
            if isinstance(source, Annotated):
                return source.annotations(original)
            record = dict(source[original])
        except BrokenRecord as reason:
            self.report_broken(index, reason)
            return {}
        return {'size': record.pop('image').shape[:2], **record}

    @property
    def has_annotations(self) -> bool:
        """Whether `annotations` reads no images."""
        return all(isinstance(source, Annotated) for source, _ in self._parts)

    def expect(self, indices: Iterable[int]) -> None:
        """Start reading examples that are needed soon, if their storage is slow."""
        if not self._has_slow_storage:
            return
        for index in indices:
            source, original = self._locate(index)
            if isinstance(source, Expects):
                source.expect([original])

    def labels(self) -> np.ndarray:
        return np.concatenate([source.labels()[indices] for source, indices in self._parts])

    def listing(self) -> Listing:
        """Digests of the examples' metadata, which take no reading of examples."""
        found = [listing_of(source, indices) for source, indices in self._parts]
        chosen = (indices for _, indices in self._parts)
        contents = [one.contents for one in found]
        return Listing(
            listing.digest_of(*chosen, [one.examples for one in found]),
            listing.digest_of(contents) if any(contents) else '',
        )

    def record_name(self, index: int, /) -> str:
        source, original = self._locate(index)
        return source.record_name(original)

    def only_classes(self, classes: Sequence[int]) -> Subset:
        """The examples of `classes`, in unchanged order; class `classes[k]` becomes class k.

        Raises:
          UserError: if a class does not exist or is named twice, or if none is left.
        """
        _check_classes(classes, self.info.num_classes, self.title)
        title = f'{self.title} of classes {",".join(map(str, classes))}'
        parts: list[tuple[Source, np.ndarray]] = [
            (
                with_only_classes(source, classes),
                indices[np.isin(source.labels()[indices], classes)],
            )
            for source, indices in self._parts
        ]
        if not any(len(indices) for _, indices in parts):
            raise UserError(f'{title}: none of the {len(self)} examples is of these classes')
        return Subset(title, parts, self.members)

    def numbered_as(self, classes: SourceInfo) -> Subset:
        """The examples with classes numbered as others', by their ids, or else by their names.

        Examples and objects of classes that the others lack are left out. The log reports that,
        and a match by names. Unchanged if neither ids nor names match.

        Raises:
          UserError: if a class has another name there, or no example is left.
        """
        parts: list[tuple[Source, np.ndarray]] = []
        notes = []
        for source, indices in self._parts:
            new = class_numbers(source.info, classes, self.title)
            if new is None:
                parts.append((source, indices))
                continue
            notes.append(renumbering_remark(source.info, classes, new))
            if ABSENT in new and not (isinstance(source, Annotated) or source.info.multilabel):
                indices = indices[new[source.labels()[indices]] != ABSENT]
            parts.append((with_new_numbers(source, new, classes), indices))
        found = Subset(self.title, parts, self.members)
        if not len(found):
            raise UserError(f'{self.title}: none of its examples is of a class of the model')
        share = f' ({len(found)} of {len(self)} examples are kept)'
        for note in dict.fromkeys(filter(None, notes)):
            log.warning('%s: %s%s', self.title, note, share if len(found) < len(self) else '')
        return found

    def class_counts(self) -> np.ndarray | None:
        """The examples of each class, or the objects if images have several, int64 [num_classes];
        None if counting would have to read examples.
        """
        total = np.zeros(self.info.num_classes, np.int64)
        for source, indices in self._parts:
            found = source.class_counts(indices) if isinstance(source, CountsClasses) else None
            if found is None:
                return None
            total += found
        return total

    def class_shares(self) -> np.ndarray | None:
        """The share of training examples of each class, float64 [num_classes]; in a mixture by the
        weights of its sources. None if counting would have to read examples.
        """
        if self.mixture is None:
            counts = self.class_counts()
            return None if counts is None else counts / max(counts.sum(), 1)
        shares = np.zeros(self.info.num_classes)
        parts = iter(self._parts)
        for member, share in zip(self.members, self.mixture.shares, strict=True):
            counts = Subset(member.name, list(itertools.islice(parts, member.parts))).class_counts()
            if counts is None:
                return None
            shares += share * counts / max(counts.sum(), 1)
        return shares

    @functools.cached_property
    def mixture(self) -> batches.Mixture | None:
        """The order of training of a mixture; None for a single source.

        Raises:
          UserError: if a source of the mixture has no example.
        """
        if not self.members:
            return None
        ends = np.cumsum([member.parts for member in self.members])
        lengths = np.cumsum([0, *(len(indices) for _, indices in self._parts)])
        sizes = np.diff(lengths[[0, *ends]])
        names = tuple(member.name for member in self.members)
        if not sizes.all():
            raise UserError(f'{self.title}: no example is left of {names[int(sizes.argmin())]}')
        weights = np.array([member.weight for member in self.members])
        shares = tuple((weights / weights.sum()).tolist())
        mixture = batches.Mixture(names, shares, tuple(sizes.tolist()))
        if not mixture.counts.all():
            least = names[int(mixture.counts.argmin())]
            raise UserError(f'{self.title}: the weight of {least} is below 1 in 10,000; raise it')
        return mixture

    @property
    def broken_limit(self) -> int:
        """The tolerated number of broken records: 1 %, of small data up to ten but at most 25 %."""
        return max(len(self) // 100, min(10, len(self) // 4))

    def _locate(self, index: int) -> tuple[Source, int]:
        part, number = self._index.locate(index)
        source, indices = self._parts[part]
        return source, int(indices[number])

    def report_broken(self, index: int, reason: BrokenRecord) -> None:
        """Count a record that this copy found broken; see `record_broken`."""
        if index not in self.broken:
            self._unreported[index] = str(reason)
            self.record_broken({index: str(reason)})

    def pop_broken(self) -> dict[int, str]:
        """Return the records that this copy has found broken since the last call."""
        found = {}
        while self._unreported:
            with contextlib.suppress(KeyError):  # another thread took the last one
                index, reason = self._unreported.popitem()
                found[index] = reason
        return found

    def record_broken(self, found: Mapping[int, str]) -> None:
        """Count broken records that this copy or another has found.

        Raises:
          UserError: if there are now more than `broken_limit`.
        """
        for index, reason in found.items():
            if index in self.broken:
                continue
            self.broken[index] = reason
            if multiprocessing.parent_process() is None:  # workers report to it
                log.warning('%s: %s: %s', self.title, self._count(), reason)
        if len(self.broken) > self.broken_limit:
            raise UserError(
                f'{self.title}: {self._count()}, more than the {self.broken_limit} that are '
                'tolerated (one in a hundred, of small data up to ten but no quarter); repair or '
                f'remove: {"; ".join(self.broken.values())}'
            )

    def _count(self) -> str:
        return f'{len(self.broken)} of {len(self)} records broken'


def select(name: str, split: str, open_base: Callable[[str], Source]) -> Subset:
    """Open the splits in an expression by `open_base(split name)`, and select its examples.

    Raises:
      UserError: if the expression is malformed, out of range, or selects nothing.
    """
    title = f'{name} {split}'
    sources: dict[str, Source] = {}
    parts = []
    for text in split.split('+'):
        term = TERM.fullmatch(text.strip())
        if term is None:
            raise UserError(
                f'split {split!r} of {name}: cannot read {text.strip()!r}; write for example '
                "'train', 'train[:90%]', 'train[100:200]', 'train[:5 per class]' or 'train+test'"
            )
        base = term['name']
        if base not in sources:
            sources[base] = open_base(base)
        parts.append((sources[base], _indices(sources[base], term, title)))
    if not sum(len(indices) for _, indices in parts):
        raise UserError(f'{title}: selects no example (the split has {_sizes(sources)})')
    if len(sources) == 1:
        return Subset(title, parts)
    classes = merge_classes([source.info for source in sources.values()])
    return Subset(title, [(with_shared_classes(s, classes, title), rows) for s, rows in parts])


def mix(title: str, sources: Sequence[tuple[str, float, Subset]]) -> Subset:
    """Put sources with weights together, with the classes of all of them.

    Classes are matched by ids if all have them, else by names: those of the first source keep their
    numbers, and each other source appends those that are new.

    Args:
      title: name of the mixture, for messages.
      sources: names, weights and examples.

    Raises:
      UserError: if the classes cannot be matched, or a weight is 0.
    """
    if twice := [name for name, _, _ in sources if [n for n, *_ in sources].count(name) > 1]:
        raise UserError(f'{title}: {twice[0]} is named twice; add its weights')
    if none := [name for name, weight, _ in sources if weight <= 0]:
        raise UserError(f'{title}: the weight of {none[0]} must be positive; leave it out')
    classes = _classes_of_all({name: subset.info for name, _, subset in sources}, title)
    parts = [
        (with_shared_classes(source, classes, title), indices)
        for _, _, subset in sources
        for source, indices in subset._parts
    ]
    members = tuple(Member(name, weight, len(one._parts)) for name, weight, one in sources)
    return Subset(title, parts, members)


def _classes_of_all(infos: Mapping[str, SourceInfo], title: str) -> SourceInfo:
    """The classes of all sources of a mixture; UserError if they cannot be matched."""
    (first_name, first), *others = infos.items()
    for name, info in others:
        kinds = [(bool(one.num_classes), one.multilabel, one.vocab_size) for one in (first, info)]
        if kinds[0] != kinds[1]:
            raise UserError(
                f'{title}: {first_name} and {name} differ in kind: classes, one or several an '
                'image, or ids of texts; mix sources of one kind'
            )
        same = first.class_names == info.class_names
        by_ids = bool(first.class_ids and info.class_ids)
        unique = all(len(set(one.class_names)) == one.num_classes for one in (first, info))
        if not (same or by_ids or (unique and have_comparable_names(first, info))):
            raise UserError(
                f'{title}: the classes of {first_name}{in_brackets(first, info)} and {name}'
                f'{in_brackets(info, first)} cannot be matched by names; rename them, or mix '
                'sources with the same classes'
            )
    if all(info.class_ids for info in infos.values()):
        return merge_classes(list(infos.values()))
    names = _names_of_all(infos, title)
    if names == first.class_names:
        return first
    return dataclasses.replace(first, num_classes=len(names), class_names=names, class_ids=())


def _names_of_all(infos: Mapping[str, SourceInfo], title: str) -> tuple[str, ...]:
    """The names of the classes of a mixture; UserError if two differ only in case."""
    spellings: dict[str, str] = {}
    for source, info in infos.items():
        names = {class_names.compose(name): name for name in info.class_names}
        if alike := class_names.find_alike(names, spellings):
            raise UserError(
                f'{title}: {source} has a class {alike[0]!r}, another source a class {alike[1]!r}: '
                'give both one name'
            )
        spellings |= {key: name for key, name in names.items() if key not in spellings}
    return tuple(spellings.values())


def _indices(source: Source, term: re.Match[str], title: str) -> np.ndarray:
    if not term['per_class']:
        low, high = _bounds(term, len(source), title)
        return np.arange(low, high)
    labels = source.labels()
    by_class = np.argsort(labels, kind='stable')  # once, as there may be thousands of classes
    edges = np.searchsorted(labels, np.arange(source.info.num_classes + 1), sorter=by_class)
    chosen = []
    for label, (start, stop) in enumerate(itertools.pairwise(edges)):
        members = by_class[start:stop]
        low, high = _bounds(term, len(members), f'{title}, class {source.info.class_names[label]}')
        chosen.append(members[low:high])
    return np.sort(np.concatenate(chosen))


def _check_classes(classes: Sequence[int], num_classes: int, title: str) -> None:
    known = range(num_classes)
    if not classes or len(set(classes)) < len(classes) or any(c not in known for c in classes):
        raise UserError(
            f'{title}: classes={tuple(classes)}: name one or more of 0..{num_classes - 1}, '
            'each once'
        )


def _bounds(term: re.Match[str], size: int, title: str) -> tuple[int, int]:
    low = _position(term['low'], size, title) if term['low'] else 0
    high = _position(term['high'], size, title) if term['high'] else size
    return low, high


def _position(text: str, size: int, title: str) -> int:
    # Rounded as in TFDS, so that the same expression selects the same examples.
    at = round(float(text[:-1]) * size / 100) if text.endswith('%') else int(text)
    if abs(at) > size:
        raise UserError(f'{title}: {text} is beyond the {size} examples')
    return at + size if at < 0 else at


def _sizes(sources: dict[str, Source]) -> str:
    return ', '.join(f'{len(source)} in {base!r}' for base, source in sources.items())


def class_numbers(info: SourceInfo, others: SourceInfo, title: str) -> np.ndarray | None:
    """The number of each class among others', int64 [num_classes]; ABSENT if they lack it.

    Args:
      info: of the classes to number.
      others: the classes that give their numbers.
      title: name of the data, for messages.

    Returns:
      None if neither ids nor names match: one side has none, or neither has all of the other's.

    Raises:
      UserError: if an id has another name among the others.
    """
    if info.class_ids and others.class_ids:
        return _by_id(info, others, title)
    sides = info, others
    mine, theirs = (tuple(map(class_names.compose, side.class_names)) for side in sides)
    if not mine or any(len(side.class_names) != side.num_classes for side in sides):
        return None
    if mine == theirs:
        return np.arange(len(mine))
    number_of = {name: number for number, name in enumerate(theirs)}
    shared = {name for name in mine if name in number_of}
    if len(number_of) < len(theirs):  # a name of several classes stands for none of them
        shared -= {name for name in shared if theirs.count(name) > 1}
    if len(shared) < min(len(mine), len(theirs)) or len(set(mine)) < len(mine):
        return None
    if len(mine) != len(theirs) and not (info.has_names and others.has_names):
        return None  # as numbers, 0 and 1 are among 0 to 9, whatever the classes are
    return np.array([number_of[name] if name in shared else ABSENT for name in mine])


def _by_id(info: SourceInfo, others: SourceInfo, title: str) -> np.ndarray:
    number_of = {number: label for label, number in enumerate(others.class_ids)}
    for number, name in zip(info.class_ids, info.class_names, strict=True):
        if number in number_of and others.class_names:
            other = others.class_names[number_of[number]]
            if name != other:
                raise UserError(
                    f'{title}: category {number} is {name!r}, and {other!r} in another file'
                )
    return np.array([number_of.get(number, ABSENT) for number in info.class_ids])


def have_comparable_names(info: SourceInfo, others: SourceInfo) -> bool:
    """Whether both name their classes in the same terms.

    Numbers are not names. ImageNet's classes have WordNet ids in some data and words in others.
    """
    if not (info.has_names and others.has_names):
        return False
    by_id = [all(map(WORDNET_ID.fullmatch, one.class_names)) for one in (info, others)]
    return by_id[0] == by_id[1]


def in_brackets(info: SourceInfo, others: SourceInfo) -> str:
    """The first few names of classes in brackets; those that the others lack come first."""
    if not info.has_names:
        return ''
    known = set(others.class_names)
    return f' ({first_names(sorted(info.class_names, key=lambda name: name in known))})'


def first_names(names: Sequence[str]) -> str:
    """The first few of some names, as 'cat, dog, emu, ...'."""
    return ', '.join([*map(_short, names[:LISTED]), *(['...'] if len(names) > LISTED else [])])


def _short(name: str) -> str:
    return one_line(name if len(name) <= 40 else f'{name[:39]}…')


def renumbering_remark(info: SourceInfo, model: SourceInfo, new: np.ndarray) -> str:
    """A warning about data whose class k is number `new[k]` among a model's classes.

    Empty if the classes are the model's, or all are matched by id.
    """
    if lacking := [info.class_names[label] for label in np.flatnonzero(new == ABSENT)]:
        return f'classes that the model lacks are left out: {first_names(lacking)}'
    if (info.class_ids and model.class_ids) or np.array_equal(new, np.arange(model.num_classes)):
        return ''
    if info.num_classes == model.num_classes:
        how = f'the model has them in another order ({first_names(model.class_names)})'
    else:
        how = f'the model has {model.num_classes:,}, all of which it may predict'
    return f'its {info.num_classes:,} classes are matched by name: {how}'


def with_shared_classes(source: Source, classes: SourceInfo, title: str) -> Source:
    """A source with its classes numbered as in `classes`, the classes of all sources together.

    Raises:
      UserError: if it has other classes.
    """
    new, info = class_numbers(source.info, classes, title), source.info
    if have_comparable_names(info, classes) if new is None else ABSENT in new:
        have, need = in_brackets(info, classes), in_brackets(classes, info)
        raise UserError(
            f'{title}: its splits have other classes, {info.num_classes}{have} and '
            f'{classes.num_classes}{need}'
        )
    return source if new is None else with_new_numbers(source, new, classes)


def with_new_numbers(source: Source, new: np.ndarray, classes: SourceInfo) -> Source:
    """A source whose class k is class `new[k]` of `classes`; the same source if nothing changes.

    Objects of an ABSENT class are left out of their images. Labels of images become ABSENT: leave
    these images out.
    """
    info = source.info
    has_names = classes.class_names in ((), info.class_names)  # else they are spelled otherwise
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
    """A source with class `classes[k]` numbered k; labels of other classes become -1."""
    new = np.full(source.info.num_classes, -1)
    new[list(classes)] = np.arange(len(classes))
    names = source.info.class_names
    info = SourceInfo(len(classes), tuple(names[c] for c in classes if c < len(names)))
    return _Renumbered(source, new, info)


def merge_classes(infos: Sequence[SourceInfo]) -> SourceInfo:
    """The classes of several files together, by their ids; those of the first file without ids."""
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
    """A source whose class k has the number `new[k]`, ABSENT to leave it out."""

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
        if self.info.multilabel:
            found['label'] = self._moved(record['label'])
        elif 'label' in record:
            found['label'] = self._new[record['label']].astype(np.int32)
        if 'labels' in record:
            labels = self._new[record['labels']].astype(np.int32)
            kept = labels != ABSENT
            found['labels'] = labels
            if not kept.all():
                found |= {name: found[name][kept] for name in OBJECTS if name in found}
                if 'segments' in found:
                    found['segments'] = panoptic.keep_rows(found['segments'], kept)
        if 'real_label' in record:  # a mark for each class
            found['real_label'] = self._moved(record['real_label'])
        return found

    def _moved(self, values: np.ndarray) -> np.ndarray:
        """A value for each class, [num_classes], reordered by the new numbers."""
        moved = np.zeros(self.info.num_classes, values.dtype)
        kept = self._new != ABSENT
        moved[self._new[kept]] = values[kept]
        return moved


class _Annotated(_Renumbered):
    """A renumbered source with annotations."""

    def annotations(self, index: int) -> Record:
        return self._renumbered(self._source.annotations(index))  # type: ignore[attr-defined]
