"""Files that are made once: by several processes at a time, after kills, and damaged since."""

import os
import pathlib

import numpy as np
import pytest

from vit_jax.storage import cache, paths

CONTENT = np.random.default_rng(0).integers(0, 256, 3 * 2**20 + 5, np.uint8).tobytes()


class Killed(BaseException):
    """The end of a process, of which only the file that it was writing stays."""


@pytest.fixture
def file(tmp_path):
    return tmp_path / 'arrow' / 'key.arrow'


def make_once(file: pathlib.Path, made: list[str]) -> bytes:
    def make(partial: pathlib.Path) -> None:
        made.append(partial.name)
        partial.write_bytes(CONTENT)

    return cache.make_once(file, make).read_bytes()


def partials(folder: pathlib.Path) -> list[pathlib.Path]:
    return list(folder.glob('.*.partial'))


@pytest.mark.fault(141)
def test_processes_of_one_id_make_a_file_at_a_time(file, monkeypatch):
    """As in two containers with one cache; the second is killed in the middle."""
    monkeypatch.setattr(os, 'getpid', lambda: 1)
    made = []

    def make(partial: pathlib.Path) -> None:
        partial.write_bytes(CONTENT[:100])
        with pytest.raises(Killed):
            cache.make_once(file, half)
        with partial.open('ab') as opened:
            opened.write(CONTENT[100:])

    def half(partial: pathlib.Path) -> None:
        partial.write_bytes(b'half')
        raise Killed

    assert cache.make_once(file, make).read_bytes() == CONTENT
    assert make_once(file, made) == CONTENT
    assert not made
    assert not partials(file.parent)


def test_a_partial_file_is_of_its_writer_alone(tmp_path):
    target = tmp_path / ('long' * 60)
    with paths.partial_file(target) as first, paths.partial_file(target) as second:
        assert first != second
        paths.write_atomic(target, CONTENT)
        assert {*partials(tmp_path)} == {first, second}
    assert [path.name for path in tmp_path.iterdir()] == [target.name]


@pytest.mark.fault(141)
@pytest.mark.parametrize('damage', ['cut', 'hole', 'bit', 'no mark', 'empty mark'])
def test_a_file_that_changed_is_made_again(file, damage):
    made = []
    for _ in range(2):
        make_once(file, made)
    assert len(made) == 1
    mark = file.with_name(f'{file.name}.xxh3')
    if damage == 'cut':
        file.write_bytes(CONTENT[:-1])
    elif damage == 'hole':
        file.write_bytes(CONTENT[:5000] + bytes(4096) + CONTENT[9096:])
    elif damage == 'bit':
        file.write_bytes(CONTENT[:-1] + bytes([CONTENT[-1] ^ 1]))
    elif damage == 'no mark':
        mark.unlink()
    else:
        mark.write_text('')
    assert make_once(file, made) == CONTENT
    assert len(made) == 2


def test_remains_of_killed_processes_go_after_a_day(file):
    file.parent.mkdir()
    old, new = (file.parent / f'.{name}.partial' for name in ('old', 'new'))
    for path in (old, new):
        path.write_bytes(b'half')
    os.utime(old, (0, 0))
    make_once(file, [])
    assert partials(file.parent) == [new]
