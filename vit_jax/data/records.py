"""Interface of sources; checks and random numbers for records."""

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
MOST_CLASSES = 10**6  # limit for data that number their classes
_INT32 = np.iinfo(np.int32)
OBJECTS = ('boxes', 'masks', 'labels', 'crowd', 'ids', 'areas')  # fields with a row per object
MAPS = ('segments', 'depth')  # fields with a value per pixel
DENSE = ('depth', 'normals')  # measured values of pixels
COORDINATES = ('boxes', 'points', 'areas')  # fields in pixels
_local = threading.local()


class BrokenRecord(Exception):
    """A record that cannot be read or decoded; the message gives its name and the reason."""


class UnknownSplit(UserError):
    """Requested split does not exist in the source."""

    @classmethod
    def from_splits(cls, source: str, split: str, splits: Iterable[str]) -> UnknownSplit:
        """Make the error for `split` of a source that has `splits`; suggest the nearest."""
        return cls(f'{source}: {nearest("split", split, splits)}')


@dataclasses.dataclass(frozen=True)
class SourceInfo:
    """Facts about the data for the model.

    Attributes:
      num_classes: Number of classes; labels are in 0..num_classes-1.
      class_names: One name per class.
      vocab_size: Number of token ids; 0 without sequences.
      stuff: Classes, such as sky, with at most one segment per image.
      class_ids: Ids of the classes in the data's files; empty if these have none.
      multilabel: Whether an image may have any number of classes; its `label` is then 1 or 0 for
        each class, uint8 [num_classes].
    """

    num_classes: int
    class_names: tuple[str, ...]
    vocab_size: int = 0
    stuff: tuple[int, ...] = ()
    class_ids: tuple[int, ...] = ()
    multilabel: bool = False

    @property
    def has_names(self) -> bool:
        """Whether every class has a name that differs from its number."""
        numbers = tuple(map(str, range(self.num_classes)))
        return len(self.class_names) == self.num_classes and self.class_names != numbers


class Source(Protocol):
    """Random access to the examples of one split.

    A record is a dict of numpy arrays and numbers; for classification `image`
    (uint8 [H, W, C]) and `label`, for translation the texts `source` and `target`, or ids
    that end in `EOS`; the class may then have a `vocab` (a `vocabulary.Tokenizer`) to decode them.
    For detection they are `image`, `boxes`, `labels` and other fields of `OBJECTS`; for depth,
    `image` and `depth`.
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
        """Return all labels, int64 [N], without decoding images where the format allows it.

        Raises:
          UserError: if records lack a single label, or a label is not a class.
        """
        ...

    def record_name(self, index: int, /) -> str:
        """Return the record's name for messages."""
        ...


@runtime_checkable
class StoresFiles(Protocol):
    """A source whose image files can be copied without decoding."""

    def encoded(self, index: int, /) -> Record:
        """Return the record with an encoded image, see `images.decode_record`."""
        ...


@runtime_checkable
class Annotated(Protocol):
    """A source that returns annotations without reading images."""

    def annotations(self, index: int, /) -> Record:
        """Return the fields except the image, and `size`, the image's height and width."""
        ...


@runtime_checkable
class CountsClasses(Protocol):
    """A source that may count its classes without reading examples."""

    def class_counts(self, indices: np.ndarray, /) -> np.ndarray | None:
        """Count the examples, or the objects, of each class among `indices`, int64 [num_classes];
        None if counting required reading examples.
        """
        ...


@runtime_checkable
class Expects(Protocol):
    """A source in slow storage, which can start reading examples before they are needed."""

    def expect(self, indices: Iterable[int], /) -> None: ...


class Listing(NamedTuple):
    """Digests of examples' metadata; empty strings if the source has none.

    Attributes:
      examples: Digest of names, labels and annotations, in order.
      contents: Digest of file sizes or checksums.
    """

    examples: str = ''
    contents: str = ''


@runtime_checkable
class Lists(Protocol):
    """A source that can be compared with another process's source or an earlier run's."""

    def listing(self, indices: np.ndarray, /) -> Listing:
        """Digest these examples without reading any, by names relative to the source's folder."""
        ...


class ShardIndex:
    """Lookup of every example's shard and row by the sizes of the shards."""

    def __init__(self, sizes: Iterable[int]):
        self._ends = list(itertools.accumulate(sizes))

    def __len__(self) -> int:
        return self._ends[-1] if self._ends else 0

    def locate(self, index: int) -> tuple[int, int]:
        """Return an example's shard, and its row in the shard."""
        shard = bisect.bisect_right(self._ends, index)
        return shard, index - (self._ends[shard - 1] if shard else 0)


def count_labels(labels: np.ndarray, num_classes: int) -> np.ndarray:
    """Count the labels of each class, int64 [num_classes]; ignore labels out of range."""
    labels = np.asarray(labels)
    return np.bincount(labels[(labels >= 0) & (labels < num_classes)], minlength=num_classes)


def list_examples(source: Source, indices: np.ndarray) -> Listing:
    """Digest examples of any source; empty unless it is `Lists`."""
    return source.listing(indices) if isinstance(source, Lists) else Listing()


def check_ids(name: str, values: np.ndarray, vocab_size: int) -> None:
    """Check that integers fit into an int32, and ids into their vocabulary.

    Args:
      name: Name of the values.
      values: Integers of any dtype and shape.
      vocab_size: Number of ids; 0 for integers that are not ids.

    Raises:
      UserError: if a value is out of range: it would wrap around, or index beyond the embedding.
    """
    low, high = (0, vocab_size - 1) if vocab_size else (_INT32.min, _INT32.max)
    if not values.size or (low <= values.min() and values.max() <= high):
        return
    invalid = values[(values < low) | (values > high)].flat[0]
    noun = 'id' if vocab_size else 'number'
    raise UserError(f'{name!r} has the {noun} {invalid}, outside of {low}..{high}')


def check_label(record: Record, num_classes: int, source: Source, index: int) -> Record:
    """Check the label of a record, and convert it to an integer.

    Args:
      record: Record of `source`.
      num_classes: Number of classes; if it is 0, a label may be any floating-point number.
      source: Source, for messages.
      index: Index of the record.

    Raises:
      UserError: for any other label.
    """
    label = record.get('label')
    if label is None or np.ndim(label):  # the task checks several labels
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


def convert_coordinates(record: Record, source: Source, index: int) -> Record:
    """Convert `COORDINATES` and `DENSE` of a record to float32, which transforms also return.

    Args:
      record: Record whose image may be an encoded file.
      source: Source, for messages.
      index: Index of the record.

    Raises:
      BrokenRecord: if images, coordinates, masks or labels are not finite in float32.
    """
    changed = {}
    for key, value in record.items():
        dtype = getattr(value, 'dtype', np.dtype(float) if isinstance(value, float) else None)
        if (
            key in (*COORDINATES, *DENSE)
            and isinstance(value, np.ndarray)
            and value.dtype.kind in 'iuf'
        ):
            with np.errstate(over='ignore'):
                changed[key] = value.astype(np.float32, copy=False)
        if dtype is None or dtype.kind != 'f' or not _is_measured(key):
            continue
        with np.errstate(over='ignore'):
            is_infinite = ~np.isfinite(np.asarray(value).astype(np.float32))
        if is_infinite.any():
            number = np.asarray(value)[is_infinite].flat[0]
            raise BrokenRecord(f'{source.record_name(index)}: {key!r} holds {number}')
    return record | changed if changed else record


def _is_measured(key: str) -> bool:
    """Return whether a field holds pixels, `DENSE`, coordinates or labels, which must be finite."""
    measured = ('image', 'masks', *DENSE, 'label', 'labels', *COORDINATES)
    return key in measured or key.endswith('_image')


def first_readable(source: Source, index: int) -> tuple[int, Record]:
    """Return the index and content of the first readable record from `index` on."""
    while True:  # the source raises UserError once too many are broken
        try:
            return index, source[index]
        except BrokenRecord:
            index = (index + 1) % len(source)


def example_rng(seed: int, example: int) -> np.random.Generator:
    """Return the random generator of an example, the same in every process and thread.

    It is valid until the thread's next call. Setting a key of Philox takes a microsecond, while
    seeding takes far longer.
    """
    if not hasattr(_local, 'rng'):
        _local.rng = np.random.Generator(np.random.Philox(key=0))
        _local.state = _local.rng.bit_generator.state
    key = _local.state['state']['key']
    key[0], key[1] = seed, example  # three times as fast as assigning the whole array
    _local.rng.bit_generator.state = _local.state
    return _local.rng
