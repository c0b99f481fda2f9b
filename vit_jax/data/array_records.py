"""ArrayRecord files read by ranges, where the library's own reader needs a file on a disk.

The format is Riegeli's (github.com/google/riegeli, doc/riegeli_records_file_format.md): blocks of
64 KiB that begin with a header of 24 bytes, and chunks of records across them. ArrayRecord adds a
chunk with the offsets of all others, and in the last block the position of that chunk.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import NamedTuple

import numpy as np

BLOCK = 1 << 16
BLOCK_HEADER = 24
HEADER = 40  # of a chunk
TAIL = 3 * BLOCK  # read at once; it holds the index of some thousand records
MAGIC = 0x71930E704FDAE05E
CODECS = {ord('z'): 'zstd', ord('b'): 'brotli', ord('s'): 'snappy'}
Read = Callable[[int, int], bytes]


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
      ValueError: if it does not fit the file, as in one that is cut off.
    """
    if size < 2 * BLOCK or size % BLOCK:
        raise ValueError(f'{size:,} bytes are no whole ArrayRecord file')
    first = max(0, size - TAIL)
    tail = read(first, size)
    last, footer = size - BLOCK, 0
    for number, value in _fields(records_of(tail[last - first :], last)[0]):
        footer = value if number == 1 else footer
        if number == 2 and value != MAGIC:
            raise ValueError('its last block is not that of an ArrayRecord file')
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
        raise ValueError('transposed records are read from a disk alone')
    if kind != b'r' or len(data) < size or not size:
        raise ValueError('the chunk is damaged')
    codec = data[0]
    length, at = _varint(data, 1)
    sizes = _numbers(_decompressed(codec, data[at : at + length]))
    values = _decompressed(codec, data[at + length :])
    if len(sizes) != count or sum(sizes) != len(values):
        raise ValueError('the sizes of its records do not fit')
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
    """A buffer of a chunk, which begins with its size unless it is stored as it is."""
    if not codec:
        return data
    if codec not in CODECS:
        raise ValueError(f'compressed in an unknown way, {codec}')
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
    raise ValueError('a number is cut off')


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
