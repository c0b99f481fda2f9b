"""Tables of documents that scripts write, row by row, between a pair of comments."""

from __future__ import annotations

import os
import pathlib
import platform
from collections.abc import Sequence
from importlib import metadata

ROOT = pathlib.Path(__file__).resolve().parents[2]
END = '<!-- end -->\n'

Row = Sequence[str]


def write(
    page: pathlib.Path,
    script: str,
    table: str,
    headings: Row,
    rows: Sequence[Row],
    packages: Sequence[str] = ('jax', 'libtpu'),
) -> None:
    """Replaces a table, and says with what it was made.

    Args:
      page: that has the table between `<!-- TABLE, made by SCRIPT -->` and `<!-- end -->`.
      script: which makes it.
      table: its name.
      headings: of the columns.
      rows: one cell a column.
      packages: whose versions are told.
    """
    before, _, after = _parts(page, script, table)
    versions = ', '.join(f'{n} {metadata.version(n)}' for n in packages)
    here = f'{platform.machine()}, {os.cpu_count()} cores'
    lines = ''.join(map(_line, (headings, ['---'] * len(headings), *rows)))
    made_by = f'Made by `python {script}`; latest rows with {versions} on {here}.'
    page.write_text(f'{before}{lines}\n{made_by}\n{after}')


def read(page: pathlib.Path, script: str, table: str) -> list[list[str]]:
    """Cells of the rows that are there."""
    lines = _parts(page, script, table)[1].splitlines()
    cells = [[cell.strip() for cell in line[1:-1].split('|')] for line in lines if line[:1] == '|']
    return cells[2:]


def _parts(page: pathlib.Path, script: str, table: str) -> tuple[str, str, str]:
    """What comes before the table, the table, and what comes after it."""
    begin = f'<!-- {table}, made by {script} -->\n'
    before, rest = page.read_text().split(begin)
    inside, after = rest.split(END, 1)
    return before + begin, inside, END + after


def _line(cells: Row) -> str:
    return f'| {" | ".join(cells)} |\n'
