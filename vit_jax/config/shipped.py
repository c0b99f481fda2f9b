"""The package's experiments by name: `vit/digits` is experiments/vit/digits.py."""

from __future__ import annotations

import difflib
import pathlib

# In a clone a link to its folder; a wheel has the files.
FOLDER = pathlib.Path(__file__).parents[1] / 'experiments'


def file_of(name: str) -> pathlib.Path | None:
    """The file of a name such as `vit/digits`, also written `experiments/vit/digits.py`."""
    path = FOLDER / name_of(name)
    path = path.with_name(f'{path.name}.py')
    inside = '..' not in path.parts and path.is_relative_to(FOLDER)
    return path if inside and path.is_file() else None


def name_of(path: str) -> str:
    """The name of an experiment, given its path in the repository."""
    return path.removeprefix('experiments/').removesuffix('.py')


def missing(name: str) -> str:
    """The message for a name that is neither a file nor an experiment; suggests the nearest."""
    known = [file.relative_to(FOLDER).with_suffix('').as_posix() for file in FOLDER.glob('*/*.py')]
    close = difflib.get_close_matches(name_of(name), known, n=1)
    hint = f'; did you mean {close[0]!r}?' if close else ''
    return f'no file {name!r}{hint} (`list experiments` shows those of the package)'
