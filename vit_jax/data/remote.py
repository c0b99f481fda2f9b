"""Records of ArrayRecord shards in object storage, read individually by byte ranges.

ArrayRecord's own reader opens gs://, but not s3://, keeps nothing on the local disk, and reads only
when it is called; here records are cached and requested in advance. The format is Riegeli's
(github.com/google/riegeli,
doc/riegeli_records_file_format.md): blocks of 64 KiB that begin with a header of 24 bytes, and
chunks of records across them. ArrayRecord adds a chunk with the offsets of all other chunks, and
stores the position of this index in the last block.
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
HEADER = 40  # bytes of a chunk's header
TAIL = 3 * BLOCK  # bytes read at once; enough for the index of a few thousand records
MAGIC = 0x71930E704FDAE05E
CODECS = {ord('z'): 'zstd', ord('b'): 'brotli', ord('s'): 'snappy'}
Read = Callable[[int, int], bytes]


class Records:
    """Records of several shards, with the interface of `ArrayRecordDataSource`."""

    def __init__(self, folder: ranges.Folder, shards: dict[str, int], title: str):
        """Read the indices of all shards.

        Args:
          folder: Folder of the shards.
          shards: {file name: number of records}, in order.
          title: Name of the data, for messages.

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
        self._pending: dict[int, concurrent.futures.Future[bytes]] = {}  # requested in advance

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {'_pending': {}}

    def __len__(self) -> int:
        return len(self._shard_index)

    def __getitem__(self, number: int) -> bytes:
        """Read a record.

        Raises:
          Unreachable: if the bucket does not answer.
          ValueError: if the record is damaged.
        """
        content = (self._pending.pop(number, None) or self._begin(number)).result()
        shard, row = self._shard_index.locate(number)
        index = self._indices[shard]
        chunk = decode_chunk(content, index.range_of(row)[0])
        if row % index.group >= len(chunk):
            raise ValueError('the chunk has fewer records than its index lists')
        return chunk[row % index.group]

    def __getitems__(self, numbers: Sequence[int]) -> list[bytes]:
        records = []
        for batch in _batches(numbers, AHEAD):
            self.expect(batch)
            records += [self[number] for number in batch]
        return records

    def expect(self, numbers: Iterable[int]) -> None:
        """Start reading records that will be needed soon."""
        for number in numbers:
            if number not in self._pending:
                self._pending[number] = self._begin(number)

    def _begin(self, number: int) -> concurrent.futures.Future[bytes]:
        shard, row = self._shard_index.locate(number)
        return self._folder.begin(self._names[shard], *self._indices[shard].range_of(row))


def read_indices(folder: ranges.Folder, names: Sequence[str], title: str) -> list[Index]:
    """Read the indices of shards concurrently, and cache them on the local disk.

    Raises:
      UserError: if a shard is missing or damaged.
    """
    if missing := [name for name in names if name not in folder.files]:
        raise UserError(f'{title}: {folder.path}/{missing[0]} is missing: copy it again')
    cached = {name: folder.derived(f'{name}.index') for name in names}
    tails = {}
    for name in (name for name in names if cached[name] is None):
        size = folder.files[name].size
        tails[name] = folder.begin(name, max(0, size - TAIL), size, keep=False)
    indices = []
    for name in names:
        if (content := cached[name]) is not None:
            group, records, *edges = np.load(io.BytesIO(content)).tolist()
            indices.append(Index(np.array(edges, np.int64), records, group))
        else:
            indices.append(_parse_index(folder, name, tails[name].result(), title))
            folder.keep_derived(f'{name}.index', _serialize_index(indices[-1]))
    return indices


def _parse_index(folder: ranges.Folder, name: str, tail: bytes, title: str) -> Index:
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


def _serialize_index(index: Index) -> bytes:
    content = io.BytesIO()
    np.save(content, np.array([index.group, index.records, *index.edges], np.int64))
    return content.getvalue()


def _batches(numbers: Iterable[Any], size: int) -> Iterator[list[Any]]:
    remaining = iter(numbers)
    return iter(lambda: list(itertools.islice(remaining, size)), [])


class Index(NamedTuple):
    """Chunks of a file.

    Attributes:
      edges: Start of each chunk, and the end of the last, int64 [chunks + 1].
      records: Number of records in the file.
      group: Records per chunk; the last may have fewer.
    """

    edges: np.ndarray
    records: int
    group: int

    def range_of(self, record: int) -> tuple[int, int]:
        """Return the byte range of a record's chunk."""
        chunk = record // self.group
        return int(self.edges[chunk]), int(self.edges[chunk + 1])


def read_index(read: Read, size: int) -> Index:
    """Read the index at the end of a file.

    Args:
      read: Function that returns the bytes of a range.
      size: File size in bytes.

    Raises:
      ValueError: if the index does not match the file, such as a truncated one.
    """
    if size < 2 * BLOCK or size % BLOCK:
        raise ValueError(f'{size:,} bytes are not a complete ArrayRecord file')
    first = max(0, size - TAIL)
    tail = read(first, size)
    last, footer = size - BLOCK, 0
    for number, value in _fields(decode_chunk(tail[last - first :], last)[0]):
        footer = value if number == 1 else footer
        if number == 2 and value != MAGIC:
            raise ValueError('its last block is not the footer of an ArrayRecord file')
    if not 0 < footer < last:
        raise ValueError('its last block points outside of the file')
    content = tail[footer - first : last - first] if footer >= first else read(footer, last)
    summary, *chunks = decode_chunk(content, footer)
    offsets, counts = zip(*map(_read_chunk_entry, chunks), strict=True) if chunks else ((), ())
    edges = np.array([*offsets, footer], np.int64)
    group = counts[0] if counts else 1
    if (np.diff(edges) < HEADER).any() or any(n != group for n in counts[:-1]) or group < 1:
        raise ValueError('its index is damaged')
    index = Index(edges, sum(counts), group)
    if index.records != _read_record_count(summary):
        raise ValueError(
            f'its index lists {index.records} of {_read_record_count(summary)} records'
        )
    return index


def decode_chunk(content: bytes, start: int) -> list[bytes]:
    """Decode the records of a chunk.

    Args:
      content: Bytes of the chunk, and any that follow.
      start: Position of the first byte in the file.

    Raises:
      ValueError: if the chunk is damaged or transposed.
    """
    chunk = _strip_block_headers(content, start)
    size = int.from_bytes(chunk[8:16], 'little')
    kind, count = chunk[24:25], int.from_bytes(chunk[25:32], 'little')
    data = chunk[HEADER : HEADER + size]
    if kind == b't':
        raise ValueError('transposed records can be read only from a disk')
    if kind != b'r' or len(data) < size or not size:
        raise ValueError('the chunk is damaged')
    codec = data[0]
    length, position = _read_varint(data, 1)
    sizes = _read_varints(_decompress(codec, data[position : position + length]))
    values = _decompress(codec, data[position + length :])
    if len(sizes) != count or sum(sizes) != len(values):
        raise ValueError('the sizes of its records do not match')
    edges = np.cumsum([0, *sizes]).tolist()
    return [values[a:b] for a, b in itertools.pairwise(edges)]


def _strip_block_headers(content: bytes, start: int) -> bytes:
    pieces, position = [], 0
    while position < len(content):
        offset = (start + position) % BLOCK
        end = position + BLOCK - offset
        pieces.append(content[position + max(0, BLOCK_HEADER - offset) : end])
        position = end
    return b''.join(pieces)


def _decompress(codec: int, data: bytes) -> bytes:
    """Decompress a buffer of a chunk; a compressed one begins with its size."""
    if not codec:
        return data
    if codec not in CODECS:
        raise ValueError(f'unknown compression {codec}')
    import pyarrow as pa

    size, position = _read_varint(data, 0)
    if size > 1 << 31:
        raise ValueError(f'a buffer of {size:,} bytes')
    try:
        return pa.decompress(data[position:], size, CODECS[codec], asbytes=True)
    except (pa.ArrowException, OSError) as error:
        raise ValueError(f'the chunk is damaged: {error}') from error


def _read_varint(data: bytes, position: int) -> tuple[int, int]:
    """Read an integer of a protocol buffer; return it and the position after it."""
    value = shift = 0
    while shift < 64 and position < len(data):
        byte = data[position]
        value |= (byte & 127) << shift
        position, shift = position + 1, shift + 7
        if byte < 128:
            return value, position
    raise ValueError('a number is truncated')


def _read_varints(data: bytes) -> list[int]:
    values, position = [], 0
    while position < len(data):
        value, position = _read_varint(data, position)
        values.append(value)
    return values


def _fields(message: bytes) -> Iterator[tuple[int, int]]:
    """Yield the integer fields of a protocol buffer as (field number, value)."""
    position = 0
    while position < len(message):
        key, position = _read_varint(message, position)
        if key & 7 == 2:
            length, position = _read_varint(message, position)
            position += length
        elif key & 7 == 0:
            value, position = _read_varint(message, position)
            yield key >> 3, value
        else:
            raise ValueError('the index is damaged')


def _read_chunk_entry(message: bytes) -> tuple[int, int]:
    """Return a chunk's position and its number of records."""
    fields = dict(_fields(message))
    return fields.get(1, 0), fields.get(3, 0)


def _read_record_count(message: bytes) -> int:
    """Return the number of records, from the first record of the index."""
    _, position = _read_varint(message, 0)
    length, position = _read_varint(message, position)
    return dict(_fields(message[position : position + length])).get(3, 0)
