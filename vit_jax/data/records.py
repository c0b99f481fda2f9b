"""The interface of sources, and checks and random numbers of their records."""

from __future__ import annotations

import bisect
import dataclasses
import itertools
import threading
from collections.abc import Iterable
from typing import Any, NamedTuple, Protocol, runtime_checkable

import numpy as np

from vit_jax.errors import UserError, nearest

Record = dict[str, Any]
MOST_CLASSES = 10**6  # of data that give classes by numbers, without names
_INT32 = np.iinfo(np.int32)
OBJECTS = ('boxes', 'masks', 'labels', 'crowd', 'ids', 'areas')  # fields with a row an object
COORDINATES = ('boxes', 'points', 'areas')  # of objects, in pixels
_local = threading.local()


class BrokenRecord(Exception):
    """A record that cannot be read or decoded; the message names it and says why."""


class UnknownSplit(UserError):
    """The requested split does not exist in the source."""

    @classmethod
    def from_splits(cls, source: str, split: str, splits: Iterable[str]) -> UnknownSplit:
        """The error for `split` of a source that has `splits`; suggests the nearest."""
        return cls(f'{source}: {nearest("split", split, splits)}')


@dataclasses.dataclass(frozen=True)
class SourceInfo:
    """Facts about the data for the model.

    Attributes:
      num_classes: labels are in 0..num_classes-1.
      class_names: one name a class.
      vocab_size: ids of sequences are in 0..vocab_size-1; 0 if there are none.
      stuff: the classes, such as sky, with at most one segment in an image.
      class_ids: the ids of the classes in the data's own files; empty if these have none.
      multilabel: whether an image may have any number of classes; its `label` is then a mark, 1 or
        0, for each class, uint8 [num_classes].
    """

    num_classes: int
    class_names: tuple[str, ...]
    vocab_size: int = 0
    stuff: tuple[int, ...] = ()
    class_ids: tuple[int, ...] = ()
    multilabel: bool = False

    @property
    def has_names(self) -> bool:
        """Whether every class has a name other than its number."""
        numbers = tuple(map(str, range(self.num_classes)))
        return len(self.class_names) == self.num_classes and self.class_names != numbers


class Source(Protocol):
    """Random access to the examples of one split.

    A record is a dict of numpy arrays and numbers; for classification `image`
    (uint8 [H, W, C]) and `label`, for translation the texts `source` and `target`, or ids
    that end in `EOS`; the class may then have a `vocab` (a `vocabulary.Tokenizer`) to read them by.
    For detection they are `image`, `boxes`, `labels` and others of `OBJECTS`.
    A source may also be `StoresFiles`, `Annotated`, `CountsClasses`, `Expects` and `Lists`.
    The class is called with a path and a split, and raises `UnknownSplit` for a split that the data
    do not have. `__getitem__` is called from several threads at once, and raises `BrokenRecord` for
    a record that cannot be decoded.
    """

    @property
    def info(self) -> SourceInfo: ...

    def __len__(self) -> int: ...

    def __getitem__(self, index: int, /) -> Record: ...

    def labels(self) -> np.ndarray:
        """All labels, int64 [N], without decoding images where the format allows it.

        Raises:
          UserError: if the records have no single label, or one is not a class.
        """
        ...

    def record_name(self, index: int, /) -> str:
        """The name of the record in messages."""
        ...


@runtime_checkable
class StoresFiles(Protocol):
    """A source whose images are files, which need not be decoded to be copied."""

    def encoded(self, index: int, /) -> Record:
        """The record with its image as a file, see `images.decoded`."""
        ...


@runtime_checkable
class Annotated(Protocol):
    """A source that has annotations without reading images."""

    def annotations(self, index: int, /) -> Record:
        """The fields other than the image, and `size`, the image's height and width."""
        ...


@runtime_checkable
class CountsClasses(Protocol):
    """A source that may count its classes without reading examples."""

    def class_counts(self, indices: np.ndarray, /) -> np.ndarray | None:
        """The examples of each class among `indices`, int64 [num_classes]; objects if images have
        several. None if counting would have to read them.
        """
        ...


@runtime_checkable
class Expects(Protocol):
    """A source in slow storage, which can start reading examples before they are needed."""

    def expect(self, indices: Iterable[int], /) -> None: ...


class Listing(NamedTuple):
    """Digests of examples' metadata; empty strings if the source has none.

    Attributes:
      examples: digest of their names, labels and annotations, in their order.
      contents: digest of the sizes or the checksums of their files.
    """

    examples: str = ''
    contents: str = ''


@runtime_checkable
class Lists(Protocol):
    """A source whose examples can be compared with another process's, or with an earlier run's."""

    def listing(self, indices: np.ndarray, /) -> Listing:
        """Digests of these examples, by names relative to the source's folder; reads no example."""
        ...


class ShardIndex:
    """The shard and the row of every example, by the sizes of the shards."""

    def __init__(self, sizes: Iterable[int]):
        self._ends = list(itertools.accumulate(sizes))

    def __len__(self) -> int:
        return self._ends[-1] if self._ends else 0

    def locate(self, index: int) -> tuple[int, int]:
        """The shard of an example, and its row in the shard."""
        shard = bisect.bisect_right(self._ends, index)
        return shard, index - (self._ends[shard - 1] if shard else 0)


def count_labels(labels: np.ndarray, num_classes: int) -> np.ndarray:
    """The number of labels of each class, int64 [num_classes]; labels of no class are ignored."""
    labels = np.asarray(labels)
    return np.bincount(labels[(labels >= 0) & (labels < num_classes)], minlength=num_classes)


def listing_of(source: Source, indices: np.ndarray) -> Listing:
    """The digests of examples of any source; empty if it is not `Lists`."""
    return source.listing(indices) if isinstance(source, Lists) else Listing()


def check_ids(name: str, values: np.ndarray, vocab_size: int) -> None:
    """Check that integers of a record fit into an int32, and ids into their vocabulary.

    Args:
      name: name of the values.
      values: of any dtype and shape.
      vocab_size: ids are in 0..vocab_size-1; 0 for numbers other than ids.

    Raises:
      UserError: if one is out of range; it would wrap around, or index beyond the embedding.
    """
    low, high = (0, vocab_size - 1) if vocab_size else (_INT32.min, _INT32.max)
    if not values.size or (low <= values.min() and values.max() <= high):
        return
    wrong = values[(values < low) | (values > high)].flat[0]
    what = 'id' if vocab_size else 'number'
    raise UserError(f'{name!r} has the {what} {wrong}, which is outside of {low}..{high}')


def with_class(record: Record, num_classes: int, source: Source, index: int) -> Record:
    """The record with a single label as an integer.

    Args:
      record: of `source`.
      num_classes: labels are below it; without classes a label may be any floating-point number.
      source: names the record in the message.
      index: index of the record.

    Raises:
      UserError: for any other label.
    """
    label = record.get('label')
    if label is None or np.ndim(label):  # several are for the task to check
        return record
    kind = np.asarray(label).dtype.kind
    if kind == 'f' and not num_classes:
        return record
    if kind not in 'biuf' or not (0 <= label < num_classes and label == int(label)):
        raise UserError(
            f'{source.record_name(index)}: label {label} is outside of 0..{num_classes - 1}; '
            'correct the label or the number of classes'
        )
    return record if isinstance(label, (int, np.integer)) else {**record, 'label': int(label)}


def with_numbers(record: Record, source: Source, index: int) -> Record:
    """The record with its `COORDINATES` in float32, as transforms return them.

    Args:
      record: its image may be a file, or not decoded yet; then it is made of bytes.
      source: names the record in the message.
      index: index of the record.

    Raises:
      BrokenRecord: if images, coordinates, masks or labels are not finite in float32.
    """
    changed = {}
    for key, value in record.items():
        dtype = getattr(value, 'dtype', np.dtype(float) if isinstance(value, float) else None)
        if key in COORDINATES and isinstance(value, np.ndarray) and value.dtype.kind in 'iuf':
            with np.errstate(over='ignore'):
                changed[key] = value.astype(np.float32, copy=False)
        if dtype is None or dtype.kind != 'f' or not _is_measured(key):
            continue
        with np.errstate(over='ignore'):
            wrong = ~np.isfinite(np.asarray(value).astype(np.float32))
        if wrong.any():
            found = np.asarray(value)[wrong].flat[0]
            raise BrokenRecord(f'{source.record_name(index)}: {key!r} holds {found}')
    return record | changed if changed else record


def _is_measured(key: str) -> bool:
    """Whether a field holds pixels, coordinates or labels, which have to be finite."""
    known = ('image', 'masks', 'label', 'labels', *COORDINATES)
    return key in known or key.endswith('_image')


def first_readable(source: Source, index: int) -> tuple[int, Record]:
    """The first record from `index` on that is not broken, and its index."""
    while True:  # the source raises UserError once too many are broken
        try:
            return index, source[index]
        except BrokenRecord:
            index = (index + 1) % len(source)


def example_rng(seed: int, example: int) -> np.random.Generator:
    """The random generator of one example, the same in every process and thread.

    It is valid until the thread's next call. Philox is keyed, not seeded, so that a new key costs a
    microsecond.
    """
    if not hasattr(_local, 'rng'):
        _local.rng = np.random.Generator(np.random.Philox(key=0))
        _local.state = _local.rng.bit_generator.state
    key = _local.state['state']['key']
    key[0], key[1] = seed, example  # in a third of the time of an assignment to all of it
    _local.rng.bit_generator.state = _local.state
    return _local.rng
