"""The number of functions and files that a reader has to follow, so that it does not creep up."""

from __future__ import annotations

import collections
import json
import os
import pathlib
import subprocess
import sys

import pytest
from helpers import released
from helpers.entered import ROOT
from helpers.xla import xla_flags

# The most functions, and the most files that hold them: a training of the digits from the command
# to its last line, with all that is imported; two steps of it between logs; loading a small file
# of another project, whose reader is imported.
BOUNDS = {'train': (1000, 130), 'steps': (70, 26), 'load': (235, 45)}

Rows = list[tuple[str, int, str]]


def enter(walk: str, folder: pathlib.Path) -> dict[str, Rows]:
    """The functions that walks in a fresh process enter, by their names."""
    env = {**os.environ, 'XLA_FLAGS': xla_flags(devices=1), 'PYTHONPATH': str(ROOT / 'tests')}
    words = [sys.executable, '-m', 'helpers.entered', walk, str(folder)]
    done = subprocess.run(words, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.fixture(scope='module')
def walks(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Rows]:
    """The functions of all walks."""
    base = tmp_path_factory.mktemp('walks')
    file = released.write('vit transformers', base / 'vit')
    return {**enter('train', base / 'run'), **enter('load', file)}


@pytest.mark.parametrize('walk', BOUNDS)
def test_a_walk_enters_few_functions_in_few_files(walk: str, walks: dict[str, Rows]) -> None:
    rows = walks[walk]
    files = {file for file, _, _ in rows}
    functions, most = BOUNDS[walk]
    assert rows, 'nothing was entered'
    assert len(rows) <= functions, by_room(rows)
    assert len(files) <= most, by_room(rows)


def by_room(rows: Rows) -> str:
    """The functions of each room, with its numbers of functions and files."""
    rooms: dict[str, Rows] = collections.defaultdict(list)
    for file, line, name in rows:
        rooms['/'.join(file.split('/')[:2])].append((file, line, name))
    lines = [f'{len(rows)} functions in {len({file for file, _, _ in rows})} files:']
    for room, held in sorted(rooms.items(), key=lambda item: -len(item[1])):
        lines.append(f'{room}: {len(held)} in {len({file for file, _, _ in held})} files')
        lines += [f'  {file}:{line} {name}' for file, line, name in held]
    return '\n'.join(lines)
