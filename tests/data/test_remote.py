"""ArrayRecord files read by ranges give what the library's reader gives."""

import random

import pytest
from array_record.python.array_record_module import ArrayRecordWriter

from vit_jax.data import remote


def written(folder, options, records):
    file = folder / 'x.array_record'
    writer = ArrayRecordWriter(str(file), options)
    for record in records:
        writer.write(record)
    writer.close()
    return file.read_bytes()


def index_of(content):
    return remote.read_index(lambda start, end: content[start:end], len(content))


def read_back(content):
    index = index_of(content)
    for number in range(index.records):
        start, end = index.range_of(number)
        yield remote.decode_chunk(content[start:end], start)[number % index.group]


@pytest.mark.parametrize(
    'options',
    ['group_size:1', 'group_size:3', 'group_size:1,uncompressed', 'group_size:2,brotli:1'],
)
def test_records_are_read_back(options, tmp_path):
    drawn = random.Random(0)
    sizes = [0, 1, 65000, 65536, 200_000, *(int(10 ** drawn.uniform(0, 5)) for _ in range(30))]
    records = [drawn.randbytes(n) if n % 2 else bytes(n) for n in sizes]
    content = written(tmp_path, options, records)
    assert list(read_back(content)) == records


def test_an_index_longer_than_what_is_read_at_once(tmp_path, monkeypatch):
    monkeypatch.setattr(remote, 'TAIL', remote.BLOCK)
    records = [random.Random(0).randbytes(500)] * 400
    assert list(read_back(written(tmp_path, 'group_size:1', records))) == records


def test_a_file_without_records(tmp_path):
    assert index_of(written(tmp_path, 'group_size:1', [])).records == 0


@pytest.mark.fault(97)
def test_damaged_files_are_refused_and_never_misread(tmp_path):
    """Any damage of the index or of a chunk's header ends in a ValueError, or changes nothing."""
    drawn = random.Random(0)
    records = [drawn.randbytes(300) for _ in range(20)]
    whole = written(tmp_path, 'group_size:1', records)
    with pytest.raises(ValueError, match=f'{len(whole) - 1:,} bytes'):
        index_of(whole[:-1])
    with pytest.raises(ValueError, match=r'damaged|last block|bytes'):
        index_of(whole[: -remote.BLOCK])
    for _ in range(300):
        damaged = bytearray(whole)
        for _ in range(drawn.choice([1, 20])):
            damaged[drawn.randrange(len(whole) - 3 * remote.BLOCK, len(whole))] ^= 255
        try:
            found = list(read_back(bytes(damaged)))
        except ValueError:
            continue
        assert len(found) == len(records)


def test_transposed_records_are_named(tmp_path):
    with pytest.raises(ValueError, match='transposed'):
        list(read_back(written(tmp_path, 'group_size:1,transpose', [b'abc'])))
