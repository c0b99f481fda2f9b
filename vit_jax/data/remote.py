"""Records of ArrayRecord shards in object storage, read one by one by ranges of bytes.

ArrayRecord's own reader needs a file on a disk. The format is Riegeli's (github.com/google/riegeli,
doc/riegeli_records_file_format.md): blocks of 64 KiB that begin with a header of 24 bytes, and
chunks of records across them. ArrayRecord adds a chunk with the offsets of all others, and in the
last block the position of that chunk.
"""

from __future__ import annotations

import concurrent.futures
import io
import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from vit_jax.data.records import ShardIndex
from vit_jax.errors import UserError
from vit_jax.storage import ranges

AHEAD = 64  # records that `__getitems__` requests at once
BLOCK = 1 << 16
BLOCK_HEADER = 24
HEADER = 40  # of a chunk
TAIL = 3 * BLOCK  # read at once; it holds the index of some thousand records
MAGIC = 0x71930E704FDAE05E
CODECS = {ord('z'): 'zstd', ord('b'): 'brotli', ord('s'): 'snappy'}
Read = Callable[[int, int], bytes]


class Records:
    """The records of several shards, with the interface of `ArrayRecordDataSource`."""

    def __init__(self, folder: ranges.Folder, shards: dict[str, int], title: str):
        """Read the indices of all shards.

        Args:
          folder: that holds them.
          shards: the number of records by the name of the file, in order.
          title: name of the data, for messages.

        Raises:
          UserError: if a shard is missing, or its index does not match it.
        """
        self._folder, self._names = folder, list(shards)
        self._shard_index = ShardIndex(shards.values())
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
        return len(self._shard_index)

    def __getitem__(self, number: int) -> bytes:
        """A record.

        Raises:
          Unreachable: if the bucket does not answer.
          ValueError: if its bytes are damaged.
        """
        content = (self._coming.pop(number, None) or self._begin(number)).result()
        shard, row = self._shard_index.locate(number)
        index = self._indices[shard]
        found = records_of(content, index.range_of(row)[0])
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
        """Start reading records that are needed soon."""
        for number in numbers:
            if number not in self._coming:
                self._coming[number] = self._begin(number)

    def _begin(self, number: int) -> concurrent.futures.Future[bytes]:
        shard, row = self._shard_index.locate(number)
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
        tails[name] = folder.begin(name, max(0, size - TAIL), size, keep=False)
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
        return read_index(read, size)
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


class Index(NamedTuple):
    """The chunks of a file.

    Attributes:
      edges: int64 [chunks + 1], where each begins, and the end of the last.
      records: in the file.
      group: records of a chunk; the last may have fewer.
    """

    edges: np.ndarray
    records: int
    group: int

    def range_of(self, record: int) -> tuple[int, int]:
        """The bytes of the chunk of a record."""
        chunk = record // self.group
        return int(self.edges[chunk]), int(self.edges[chunk + 1])


def read_index(read: Read, size: int) -> Index:
    """The index at the end of a file.

    Args:
      read: returns the bytes of a range.
      size: of the file in bytes.

    Raises:
      ValueError: if it does not match the file, for example a truncated one.
    """
    if size < 2 * BLOCK or size % BLOCK:
        raise ValueError(f'{size:,} bytes are not a whole ArrayRecord file')
    first = max(0, size - TAIL)
    tail = read(first, size)
    last, footer = size - BLOCK, 0
    for number, value in _fields(records_of(tail[last - first :], last)[0]):
        footer = value if number == 1 else footer
        if number == 2 and value != MAGIC:
            raise ValueError('its last block is not the footer of an ArrayRecord file')
    if not 0 < footer < last:
        raise ValueError('its last block points outside of the file')
    content = tail[footer - first : last - first] if footer >= first else read(footer, last)
    about, *chunks = records_of(content, footer)
    offsets, counts = zip(*map(_chunk, chunks), strict=True) if chunks else ((), ())
    edges = np.array([*offsets, footer], np.int64)
    group = counts[0] if counts else 1
    if (np.diff(edges) < HEADER).any() or any(n != group for n in counts[:-1]) or group < 1:
        raise ValueError('its index is damaged')
    found = Index(edges, sum(counts), group)
    if found.records != _count(about):
        raise ValueError(f'its index lists {found.records} of {_count(about)} records')
    return found


def records_of(content: bytes, start: int) -> list[bytes]:
    """The records of a chunk.

    Args:
      content: its bytes, and any after it.
      start: position of the first byte in the file.

    Raises:
      ValueError: if it is damaged, or transposed.
    """
    chunk = _without_block_headers(content, start)
    size = int.from_bytes(chunk[8:16], 'little')
    kind, count = chunk[24:25], int.from_bytes(chunk[25:32], 'little')
    data = chunk[HEADER : HEADER + size]
    if kind == b't':
        raise ValueError('transposed records can be read only from a disk')
    if kind != b'r' or len(data) < size or not size:
        raise ValueError('the chunk is damaged')
    codec = data[0]
    length, at = _varint(data, 1)
    sizes = _numbers(_decompressed(codec, data[at : at + length]))
    values = _decompressed(codec, data[at + length :])
    if len(sizes) != count or sum(sizes) != len(values):
        raise ValueError('the sizes of its records do not match')
    edges = np.cumsum([0, *sizes]).tolist()
    return [values[a:b] for a, b in itertools.pairwise(edges)]


def _without_block_headers(content: bytes, start: int) -> bytes:
    pieces, at = [], 0
    while at < len(content):
        inside = (start + at) % BLOCK
        end = at + BLOCK - inside
        pieces.append(content[at + max(0, BLOCK_HEADER - inside) : end])
        at = end
    return b''.join(pieces)


def _decompressed(codec: int, data: bytes) -> bytes:
    """Decompress a buffer of a chunk; a compressed one begins with its size."""
    if not codec:
        return data
    if codec not in CODECS:
        raise ValueError(f'unknown compression {codec}')
    import pyarrow as pa

    size, at = _varint(data, 0)
    if size > 1 << 31:
        raise ValueError(f'a buffer of {size:,} bytes')
    try:
        return pa.decompress(data[at:], size, CODECS[codec], asbytes=True)
    except (pa.ArrowException, OSError) as error:
        raise ValueError(f'the chunk is damaged: {error}') from error


def _varint(data: bytes, at: int) -> tuple[int, int]:
    """An integer of a protocol buffer, and the position after it."""
    value = shift = 0
    while shift < 64 and at < len(data):
        byte = data[at]
        value |= (byte & 127) << shift
        at, shift = at + 1, shift + 7
        if byte < 128:
            return value, at
    raise ValueError('a number is truncated')


def _numbers(data: bytes) -> list[int]:
    found, at = [], 0
    while at < len(data):
        value, at = _varint(data, at)
        found.append(value)
    return found


def _fields(message: bytes) -> Iterator[tuple[int, int]]:
    """The integers of a protocol buffer, as pairs of number and value."""
    at = 0
    while at < len(message):
        key, at = _varint(message, at)
        if key & 7 == 2:
            length, at = _varint(message, at)
            at += length
        elif key & 7 == 0:
            value, at = _varint(message, at)
            yield key >> 3, value
        else:
            raise ValueError('the index is damaged')


def _chunk(message: bytes) -> tuple[int, int]:
    """Position and number of records of a chunk."""
    fields = dict(_fields(message))
    return fields.get(1, 0), fields.get(3, 0)


def _count(message: bytes) -> int:
    """The number of records, from the first record of the index."""
    _, at = _varint(message, 0)
    length, at = _varint(message, at)
    return dict(_fields(message[at : at + length])).get(3, 0)
