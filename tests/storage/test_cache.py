"""Files that are made once: by several processes at a time, after kills, and damaged since."""

import json
import os
import pathlib
import re

import numpy as np
import pytest

from vit_jax.__main__ import main
from vit_jax.runtime import caches
from vit_jax.storage import cache, paths

CONTENT = np.random.default_rng(0).integers(0, 256, 3 * 2**20 + 5, np.uint8).tobytes()


class Killed(BaseException):
    """The end of a process, of which only the file that it was writing stays."""


@pytest.fixture
def file(tmp_path, monkeypatch):
    monkeypatch.setenv('XDG_CACHE_HOME', str(tmp_path))
    return tmp_path / 'vit_jax' / 'arrow' / 'key.arrow'


def make_cached(file: pathlib.Path, make) -> pathlib.Path:
    return cache.make_once(file.parent.name, file.name, file.parents[3] / 'origin', make)


def make_once(file: pathlib.Path, made: list[str]) -> bytes:
    def make(partial: pathlib.Path) -> None:
        made.append(partial.name)
        partial.write_bytes(CONTENT)

    return make_cached(file, make).read_bytes()


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
            make_cached(file, half)
        with partial.open('ab') as opened:
            opened.write(CONTENT[100:])

    def half(partial: pathlib.Path) -> None:
        partial.write_bytes(b'half')
        raise Killed

    assert make_cached(file, make).read_bytes() == CONTENT
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
    file.parent.mkdir(parents=True)
    old, new = (file.parent / f'.{name}.partial' for name in ('old', 'new'))
    for path in (old, new):
        path.write_bytes(b'half')
    os.utime(old, (0, 0))
    make_once(file, [])
    assert partials(file.parent) == [new]


def test_what_was_not_used_for_longest_makes_room(file, monkeypatch):
    """But nothing that a run of the last week may still need."""
    monkeypatch.setenv(caches.LIMIT, str(2.5 * len(CONTENT) / 1e9))
    for day, name in enumerate('abcd'):
        made = make_cached(file.with_name(f'{name}.arrow'), lambda path: path.write_bytes(CONTENT))
        os.utime(made, (86400 * day,) * 2)
    assert sorted(path.stem for path in file.parent.glob('*.arrow')) == ['c', 'd']
    for path in file.parent.glob('*.arrow'):
        os.utime(path)
    make_once(file, [])
    assert len(caches.entries('arrow')) == 3
    assert {path.name.partition('.')[0] for path in file.parent.iterdir()} == {'c', 'd', 'key'}


def test_the_command_lists_and_clears_kinds(file, capsys):
    make_once(file, [])
    program = file.parents[1] / 'xla' / 'x86-1' / 'jit_step-123-cache'
    program.parent.mkdir(parents=True)
    program.write_bytes(bytes(1000))
    assert main(['list', 'cache']) == 0
    table = capsys.readouterr().out
    assert re.search(r'^arrow +1 +0\.003 +50 +today', table, re.M)
    assert all(kind in table for kind in caches.KINDS) and str(file.parents[1]) in table
    assert main(['list', 'cache', 'arrow', 'xla', '--json']) == 0
    arrow, compiled = json.loads(capsys.readouterr().out)
    assert (arrow['bytes'], arrow['origin']) == (len(CONTENT), str(file.parents[3] / 'origin'))
    assert (compiled['path'], compiled['origin']) == (str(program), 'jit_step')
    assert main(['list', 'cache', 'arrow', '--clear']) == 0
    assert not file.parent.exists() and program.exists()
    assert main(['list', 'models', '--clear']) == 2
    assert main(['list', 'cache', 'arow']) == 2
