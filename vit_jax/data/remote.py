"""Records of ArrayRecord shards in object storage, read one by one."""

from __future__ import annotations

import concurrent.futures
import io
import itertools
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import numpy as np

from vit_jax.data import array_records
from vit_jax.data.array_records import Index
from vit_jax.data.parts import Parts
from vit_jax.errors import UserError
from vit_jax.storage import ranges

AHEAD = 64  # records of `__getitems__` that are on their way at once


class Records:
    """The records of several shards, with the interface of `ArrayRecordDataSource`."""

    def __init__(self, folder: ranges.Folder, shards: dict[str, int], title: str):
        """Read the indices of all shards.

        Args:
          folder: that holds them.
          shards: the number of records by the name of the file, in order.
          title: of the data, for messages.

        Raises:
          UserError: if a shard is missing, or its index does not fit it.
        """
        self._folder, self._names = folder, list(shards)
        self._parts = Parts(shards.values())
        self._indices: list[Index] = []
        for names in _batches(shards, ranges.AT_ONCE):
            self._indices += read_indices(folder, names, title)
        for (name, count), index in zip(shards.items(), self._indices, strict=True):
            if index.records != count:
                raise UserError(
                    f'{title}: {folder.path}/{name} holds {index.records:,} records instead of '
                    f'{count:,}: copy it again'
                )
        self._coming: dict[int, concurrent.futures.Future[bytes]] = {}

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {'_coming': {}}

    def __len__(self) -> int:
        return len(self._parts)

    def __getitem__(self, number: int) -> bytes:
        """A record.

        Raises:
          Unreachable: if the bucket does not answer.
          ValueError: if its bytes are damaged.
        """
        content = (self._coming.pop(number, None) or self._begin(number)).result()
        shard, row = self._parts.locate(number)
        index = self._indices[shard]
        found = array_records.records_of(content, index.range_of(row)[0])
        if row % index.group >= len(found):
            raise ValueError('the chunk has fewer records than its index says')
        return found[row % index.group]

    def __getitems__(self, numbers: Sequence[int]) -> list[bytes]:
        found = []
        for some in _batches(numbers, AHEAD):
            self.expect(some)
            found += [self[number] for number in some]
        return found

    def expect(self, numbers: Iterable[int]) -> None:
        """Start reading records that are asked for soon."""
        for number in numbers:
            if number not in self._coming:
                self._coming[number] = self._begin(number)

    def _begin(self, number: int) -> concurrent.futures.Future[bytes]:
        shard, row = self._parts.locate(number)
        return self._folder.begin(self._names[shard], *self._indices[shard].range_of(row))


def read_indices(folder: ranges.Folder, names: Sequence[str], title: str) -> list[Index]:
    """The indices of shards, kept on the local disk; all are read at the same time.

    Raises:
      UserError: if a shard is missing or damaged.
    """
    if missing := [name for name in names if name not in folder.files]:
        raise UserError(f'{title}: {folder.path}/{missing[0]} is missing: copy it again')
    kept = {name: folder.derived(f'{name}.index') for name in names}
    tails = {}
    for name in (name for name in names if kept[name] is None):
        size = folder.files[name].size
        tails[name] = folder.begin(name, max(0, size - array_records.TAIL), size, keep=False)
    found = []
    for name in names:
        if (content := kept[name]) is not None:
            group, records, *edges = np.load(io.BytesIO(content)).tolist()
            found.append(Index(np.array(edges, np.int64), records, group))
        else:
            found.append(_parsed(folder, name, tails[name].result(), title))
            folder.keep_derived(f'{name}.index', _stored(found[-1]))
    return found


def _parsed(folder: ranges.Folder, name: str, tail: bytes, title: str) -> Index:
    size = folder.files[name].size

    def read(start: int, end: int) -> bytes:
        first = size - len(tail)
        if start >= first:
            return tail[start - first : end - first]
        return folder.begin(name, start, end, keep=False).result()

    try:
        return array_records.read_index(read, size)
    except ValueError as error:
        raise UserError(
            f'{title}: {folder.path}/{name} cannot be read ({error}): copy it again'
        ) from error


def _stored(index: Index) -> bytes:
    content = io.BytesIO()
    np.save(content, np.array([index.group, index.records, *index.edges], np.int64))
    return content.getvalue()


def _batches(numbers: Iterable[Any], size: int) -> Iterator[list[Any]]:
    rest = iter(numbers)
    return iter(lambda: list(itertools.islice(rest, size)), [])
