"""What a source of examples is."""

from __future__ import annotations

import dataclasses
from typing import Any, Protocol

import numpy as np

Record = dict[str, Any]


class BrokenRecord(Exception):
    """A record that cannot be read or decoded; the message names it and says why."""


@dataclasses.dataclass(frozen=True)
class SourceInfo:
    """What a model must know of its data.

    Attributes:
      num_classes: labels are in 0..num_classes-1.
      class_names: one name a class.
      vocab_size: ids of sequences are in 0..vocab_size-1; 0 where there are none.
    """

    num_classes: int
    class_names: tuple[str, ...]
    vocab_size: int = 0

    @property
    def has_names(self) -> bool:
        """Whether every class has a name, and not merely its number."""
        numbers = tuple(map(str, range(self.num_classes)))
        return len(self.class_names) == self.num_classes and self.class_names != numbers


class Source(Protocol):
    """Random access to the examples of one split.

    A record is a dict of numpy arrays and numbers; for classification `image`
    (uint8 [H, W, C]) and `label`, for translation the texts `source` and `target`, or ids
    that end in `EOS`; the class may then have a `vocab` (a `vocabulary.Tokenizer`) to read them by.
    `__getitem__` is called from several threads at once, and raises `BrokenRecord` for a
    record that cannot be decoded.
    """

    @property
    def info(self) -> SourceInfo: ...

    def __len__(self) -> int: ...

    def __getitem__(self, index: int, /) -> Record: ...

    def labels(self) -> np.ndarray:
        """All labels, int64 [N], without decoding images where the format allows it."""
        ...

    def record_name(self, index: int, /) -> str:
        """What a message calls the record."""
        ...


def first_readable(source: Source, index: int) -> tuple[int, Record]:
    """The first record from `index` on that is not broken, and its index."""
    while True:  # the source raises UserError once too many are broken
        try:
            return index, source[index]
        except BrokenRecord:
            index = (index + 1) % len(source)
