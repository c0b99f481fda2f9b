"""The number of functions and files that a reader has to follow, so that it does not creep up."""

from __future__ import annotations

import collections
import json
import os
import pathlib
import re
import subprocess
import sys

import pytest
from helpers import released
from helpers.entered import ROOT
from helpers.xla import xla_flags

# The most functions, and the most files that hold them: a training of the digits from the command
# to its last line, with all that is imported; two steps of it between logs; loading a small file
# of another project, whose reader is imported. Two steps enter 67 functions, and up to three more
# depending on the timing of threads: the meter's `_finish_time`, the clock's `_heard` and `_pause`.
BOUNDS = {'train': (961, 127), 'steps': (70, 18), 'load': (228, 44)}

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


@pytest.mark.slow
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


# The most files, and lines of these, from the command `train` to the last layer of a ViT.
MOST_FILES, MOST_LINES = 15, 4000


def life(title: str) -> list[tuple[str, list[str]]]:
    """The files of a list of CONTRIBUTING.md in their order, and the functions that it names."""
    section = (ROOT / 'CONTRIBUTING.md').read_text().split(f'## {title}\n')[1].split('\n## ')[0]
    entries = re.findall(r'^\d+\. `([\w/]+\.py)`:((?:.|\n(?! *\d+\.|\n))*)', section, re.M)
    return [(f'vit_jax/{file}', re.findall(r'`(\w+)`', text)) for file, text in entries]


@pytest.mark.parametrize('title', ['The life of a run', 'The life of a batch'])
def test_the_lists_of_files_name_functions_that_a_training_enters(
    title: str, walks: dict[str, Rows]
) -> None:
    entered = {(file, name.rpartition('.')[2]) for file, _, name in walks['train']}
    listed = life(title)
    assert len(listed) >= 10
    wrong = [
        (file, name) for file, names in listed for name in names if (file, name) not in entered
    ]
    assert not wrong
    assert not [file for file, names in listed if not names and title == 'The life of a run']


def test_a_run_is_told_in_few_files() -> None:
    files = [ROOT / file for file, _ in life('The life of a run')]
    assert files[0].name == 'train.py' and files[-1].parent.name == 'nn'
    assert len(files) <= MOST_FILES
    assert sum(len(file.read_text().splitlines()) for file in files) <= MOST_LINES
