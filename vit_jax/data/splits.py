"""Selection of any source's examples in TFDS notation.

    train                     all of it
    train[:90%]  train[90%:]  shares; the bounds are rounded to the nearest example
    train[100:200]            examples 100 to 199
    train[-10%:]              the last tenth
    train[:5 per class]       the first five of each class
    train[:10% per class]     the first tenth of each class
    train[:50%]+test          one after the other

Examples are counted in the order in which the source stores them.
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

from vit_jax.data import batches, class_names, images, listing, numbering
from vit_jax.data.records import (
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
    check_label,
    convert_coordinates,
    list_examples,
)
from vit_jax.errors import UserError

log = logging.getLogger(__name__)

BOUND = r'-?\d+(?:(?:\.\d+)?%)?'
TERM = re.compile(
    rf'(?P<name>[^\[\]+\s]+)(\[(?P<low>{BOUND})?:(?P<high>{BOUND})?(?P<per_class> per class)?\])?'
)


class Member(NamedTuple):
    """A source of a mixture.

    Attributes:
      name: Name of the source.
      weight: Weight of its examples in training.
      parts: Number of its parts in the `Subset`.
    """

    name: str
    weight: float
    parts: int


class Subset:
    """Examples of one or more sources that a split expression selects.

    It is a `Source` itself. A label outside of 0..num_classes-1 is refused on reading. Broken
    records are logged, and refused once there are more than `broken_limit`. Copies in other
    processes, both data workers and processes of a job, exchange them by `pop_broken` and
    `record_broken`, so that the limit holds for all copies together.

    Attributes:
      title: Name of source and split, for messages.
      members: Sources of a mixture; empty for a single source.
      broken: {index: name and reason} of broken records that any copy has found.
    """

    def __init__(
        self,
        title: str,
        parts: list[tuple[Source, np.ndarray]],
        members: tuple[Member, ...] = (),
    ):
        """Select examples: `parts` are sources, each with the indices of its examples, in order."""
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
            record = check_label(record, self.info.num_classes, source, original)
            return convert_coordinates(record, source, original)
        except BrokenRecord as reason:
            self.report_broken(index, reason)
            raise

    def encoded(self, index: int) -> Record:
        """Return an example with an encoded image: the source's file, or a lossless PNG.

        Raises:
          BrokenRecord: if the example cannot be read.
        """
        source, original = self._locate(index)
        if not (self.has_files and isinstance(source, StoresFiles)):
            return images.as_png(self[index])
        record = check_label(source.encoded(original), self.info.num_classes, source, original)
        return convert_coordinates(record, source, original)

    @property
    def has_files(self) -> bool:
        """Whether images are stored as files, which `encoded` reads."""
        return all(isinstance(source, StoresFiles) for source, _ in self._parts)

    def annotations(self, index: int) -> Record:
        """Return an example's fields except the image, and `size`, the height and width of the
        image in the source; empty for a broken record.
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
        """Start reading examples that will be needed soon, if their storage is slow."""
        if not self._has_slow_storage:
            return
        for index in indices:
            source, original = self._locate(index)
            if isinstance(source, Expects):
                source.expect([original])

    def labels(self) -> np.ndarray:
        return np.concatenate([source.labels()[indices] for source, indices in self._parts])

    def listing(self) -> Listing:
        """Digest the examples' metadata without reading examples."""
        listings = [list_examples(source, indices) for source, indices in self._parts]
        selections = (indices for _, indices in self._parts)
        contents = [part.contents for part in listings]
        return Listing(
            listing.digest_of(*selections, [part.examples for part in listings]),
            listing.digest_of(contents) if any(contents) else '',
        )

    def record_name(self, index: int, /) -> str:
        source, original = self._locate(index)
        return source.record_name(original)

    def only_classes(self, classes: Sequence[int]) -> Subset:
        """Select the examples of `classes`, in unchanged order; class `classes[k]` becomes class k.

        Raises:
          UserError: if a class does not exist or is listed twice, or if no example remains.
        """
        _check_classes(classes, self.info.num_classes, self.title)
        title = f'{self.title} of classes {",".join(map(str, classes))}'
        parts: list[tuple[Source, np.ndarray]] = [
            (
                numbering.with_only_classes(source, classes),
                indices[np.isin(source.labels()[indices], classes)],
            )
            for source, indices in self._parts
        ]
        if not any(len(indices) for _, indices in parts):
            raise UserError(f'{title}: none of the {len(self)} examples has one of these classes')
        return Subset(title, parts, self.members)

    def numbered_as(self, classes: SourceInfo) -> Subset:
        """Renumber classes as in `classes`, matched by their ids, or else by their names.

        Examples and objects of other classes are dropped. The log reports that, and a match by
        names. The subset is unchanged if neither ids nor names match.

        Raises:
          UserError: if an id has a different name in `classes`, or no example remains.
        """
        parts: list[tuple[Source, np.ndarray]] = []
        notes = []
        for source, indices in self._parts:
            new = numbering.class_numbers(source.info, classes, self.title)
            if new is None:
                parts.append((source, indices))
                continue
            notes.append(numbering.renumbering_remark(source.info, classes, new))
            if numbering.ABSENT in new and not (
                isinstance(source, Annotated) or source.info.multilabel
            ):
                indices = indices[new[source.labels()[indices]] != numbering.ABSENT]
            parts.append((numbering.with_new_numbers(source, new, classes), indices))
        subset = Subset(self.title, parts, self.members)
        if not len(subset):
            raise UserError(f"{self.title}: none of its examples has one of the model's classes")
        share = f' ({len(subset)} of {len(self)} examples are kept)'
        for note in dict.fromkeys(filter(None, notes)):
            log.warning('%s: %s%s', self.title, note, share if len(subset) < len(self) else '')
        return subset

    def class_counts(self) -> np.ndarray | None:
        """Count the examples, or the objects, of each class, int64 [num_classes]; None if counting
        required reading examples.
        """
        total = np.zeros(self.info.num_classes, np.int64)
        for source, indices in self._parts:
            counts = source.class_counts(indices) if isinstance(source, CountsClasses) else None
            if counts is None:
                return None
            total += counts
        return total

    def class_shares(self) -> np.ndarray | None:
        """Return each class's share of training examples, float64 [num_classes], by the sources'
        weights in a mixture; None if counting required reading examples.
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
        """Training order of a mixture; None for a single source.

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
            raise UserError(f'{self.title}: no example of {names[int(sizes.argmin())]} remains')
        weights = np.array([member.weight for member in self.members])
        shares = tuple((weights / weights.sum()).tolist())
        mixture = batches.Mixture(names, shares, tuple(sizes.tolist()))
        if not mixture.counts.all():
            least = names[int(mixture.counts.argmin())]
            raise UserError(f'{self.title}: the weight of {least} is below 1 in 10,000; raise it')
        return mixture

    @property
    def broken_limit(self) -> int:
        """Tolerated number of broken records: 1%; in small data up to ten, but at most 25%."""
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
        """Return the broken records that this copy has found since the last call."""
        reasons = {}
        while self._unreported:
            with contextlib.suppress(KeyError):  # another thread took the last one
                index, reason = self._unreported.popitem()
                reasons[index] = reason
        return reasons

    def record_broken(self, reasons: Mapping[int, str]) -> None:
        """Count broken records that this copy or another has found.

        Raises:
          UserError: if there are now more than `broken_limit`.
        """
        for index, reason in reasons.items():
            if index in self.broken:
                continue
            self.broken[index] = reason
            if multiprocessing.parent_process() is None:  # workers report to this process
                log.warning('%s: %s: %s', self.title, self._count(), reason)
        if len(self.broken) > self.broken_limit:
            raise UserError(
                f'{self.title}: {self._count()}, more than the {self.broken_limit} that are '
                'tolerated (1%; in small data up to ten, but at most 25%); repair or remove: '
                f'{"; ".join(self.broken.values())}'
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
        parts.append((sources[base], _select_indices(sources[base], term, title)))
    if not sum(len(indices) for _, indices in parts):
        raise UserError(f'{title}: selects no example (the split has {_format_sizes(sources)})')
    if len(sources) == 1:
        return Subset(title, parts)
    classes = numbering.merge_classes([source.info for source in sources.values()])
    return Subset(
        title, [(numbering.with_shared_classes(s, classes, title), rows) for s, rows in parts]
    )


def mix(title: str, sources: Sequence[tuple[str, float, Subset]]) -> Subset:
    """Combine weighted sources, with the classes of all of them.

    Classes are matched by ids if all have them, else by names: the first source's classes keep
    their numbers, and each further source appends new ones.

    Args:
      title: Name of the mixture, for messages.
      sources: Names, weights and examples.

    Raises:
      UserError: if the classes cannot be matched, or a weight is 0.
    """
    if repeated := [name for name, _, _ in sources if [n for n, *_ in sources].count(name) > 1]:
        raise UserError(
            f'{title}: {repeated[0]} is listed twice; list it once with the sum of weights'
        )
    if weightless := [name for name, weight, _ in sources if weight <= 0]:
        raise UserError(
            f'{title}: the weight of {weightless[0]} must be positive; or remove the source'
        )
    classes = _combine_classes({name: subset.info for name, _, subset in sources}, title)
    parts = [
        (numbering.with_shared_classes(source, classes, title), indices)
        for _, _, subset in sources
        for source, indices in subset._parts
    ]
    members = tuple(Member(name, weight, len(subset._parts)) for name, weight, subset in sources)
    return Subset(title, parts, members)


def _combine_classes(infos: Mapping[str, SourceInfo], title: str) -> SourceInfo:
    """Combine the classes of a mixture's sources; UserError if they cannot be matched."""
    (first_name, first), *others = infos.items()
    for name, info in others:
        kinds = [
            (bool(side.num_classes), side.multilabel, side.vocab_size) for side in (first, info)
        ]
        if kinds[0] != kinds[1]:
            raise UserError(
                f'{title}: {first_name} and {name} differ in kind: one class or several per image, '
                'or token ids; mix only sources of one kind'
            )
        same = first.class_names == info.class_names
        by_ids = bool(first.class_ids and info.class_ids)
        unique = all(len(set(side.class_names)) == side.num_classes for side in (first, info))
        if not (same or by_ids or (unique and numbering.have_comparable_names(first, info))):
            raise UserError(
                f'{title}: the classes of {first_name}{numbering.in_brackets(first, info)} and '
                f'{name}{numbering.in_brackets(info, first)} cannot be matched by names; rename '
                'them, or mix sources with the same classes'
            )
    if all(info.class_ids for info in infos.values()):
        return numbering.merge_classes(list(infos.values()))
    names = _combine_names(infos, title)
    if names == first.class_names:
        return first
    return dataclasses.replace(first, num_classes=len(names), class_names=names, class_ids=())


def _combine_names(infos: Mapping[str, SourceInfo], title: str) -> tuple[str, ...]:
    """Combine the class names of a mixture; UserError if two differ only in case."""
    spellings: dict[str, str] = {}
    for source, info in infos.items():
        names = {class_names.compose(name): name for name in info.class_names}
        if pair := class_names.find_alike(names, spellings):
            raise UserError(
                f'{title}: {source} has a class {pair[0]!r}, another source a class {pair[1]!r}; '
                'give both the same name'
            )
        spellings |= {key: name for key, name in names.items() if key not in spellings}
    return tuple(spellings.values())


def _select_indices(source: Source, term: re.Match[str], title: str) -> np.ndarray:
    if not term['per_class']:
        low, high = _parse_bounds(term, len(source), title)
        return np.arange(low, high)
    labels = source.labels()
    by_class = np.argsort(labels, kind='stable')  # sorted once: there may be thousands of classes
    edges = np.searchsorted(labels, np.arange(source.info.num_classes + 1), sorter=by_class)
    selected = []
    for label, (start, stop) in enumerate(itertools.pairwise(edges)):
        members = by_class[start:stop]
        low, high = _parse_bounds(
            term, len(members), f'{title}, class {source.info.class_names[label]}'
        )
        selected.append(members[low:high])
    return np.sort(np.concatenate(selected))


def _check_classes(classes: Sequence[int], num_classes: int, title: str) -> None:
    all_classes = range(num_classes)
    if (
        not classes
        or len(set(classes)) < len(classes)
        or any(c not in all_classes for c in classes)
    ):
        raise UserError(
            f'{title}: classes={tuple(classes)}: list one or more of 0..{num_classes - 1}, '
            'each once'
        )


def _parse_bounds(term: re.Match[str], size: int, title: str) -> tuple[int, int]:
    low = _parse_bound(term['low'], size, title) if term['low'] else 0
    high = _parse_bound(term['high'], size, title) if term['high'] else size
    return low, high


def _parse_bound(text: str, size: int, title: str) -> int:
    # Rounded as in TFDS, so that the same expression selects the same examples.
    position = round(float(text[:-1]) * size / 100) if text.endswith('%') else int(text)
    if abs(position) > size:
        raise UserError(f'{title}: {text} is beyond the {size} examples')
    return position + size if position < 0 else position


def _format_sizes(sources: dict[str, Source]) -> str:
    return ', '.join(f'{len(source)} in {base!r}' for base, source in sources.items())
