"""Rows of a table: reading of CSV files and of numbers in cells, order and names of groups."""

from __future__ import annotations

import csv
import io
import pathlib
import re
from collections.abc import Callable, Iterable, Mapping, Sequence

from vit_jax.errors import UserError, nearest
from vit_jax.storage import paths

_RAISED = str.maketrans('-0123456789', '⁻⁰¹²³⁴⁵⁶⁷⁸⁹')
Row = dict[str, str]
Numbered = tuple[int, Row]  # line in the file, row


def label(by: Mapping[str, str]) -> str:
    """Format values, numbers with their columns: `width 64`, `vit 305k parameters`."""
    return ' '.join(_format_value(column, value) for column, value in by.items()) or 'all'


def _format_value(column: str, text: str) -> str:
    if not re.fullmatch(r'[+-]?[\d.]+(e[+-]?\d+)?', text):
        return text
    formatted = short(int(text)) if text.isdecimal() and int(text) >= 10_000 else text
    noun = column.rpartition('.')[2]
    return f'{formatted} {noun}' if noun.endswith('s') else f'{noun} {formatted}'


def join_labels(lines: Iterable[tuple[str, str]]) -> list[str]:
    """Write lines `LABEL: TEXT`, each text once with all its labels."""
    labels: dict[str, list[str]] = {}
    for name, text in lines:
        labels.setdefault(text, []).append(name)
    return [f'{", ".join(dict.fromkeys(names))}: {text}' for text, names in labels.items()]


def short(value: float) -> str:
    """Abbreviate a number: 1234567 -> 1.23M; 4e18 -> 4e+18; 0.25 -> 0.25."""
    for factor, unit in ((1e9, 'G'), (1e6, 'M'), (1e3, 'k')):
        if factor <= value < 1e12:
            return f'{value / factor:.3g}{unit}'
    return f'{value:.3g}'


def power(value: float) -> str:
    """Write a number with a power of ten: 4.6e11 -> 4.6·10¹¹, 1e20 -> 10²⁰."""
    mantissa, _, exponent = f'{value:.2e}'.partition('e')
    raised = str(int(exponent)).translate(_RAISED)
    digits = mantissa.rstrip('0').rstrip('.')
    return f'10{raised}' if digits == '1' else f'{digits}·10{raised}'


def number_format(largest: float) -> Callable[[float], str]:
    """Choose the notation of an axis: `short`, or powers of ten if it reaches 10¹²."""
    return short if largest < 1e12 else power


def read_csv(path: str | pathlib.Path, flag: str = '--csv') -> list[Row]:
    """Read the rows of a CSV file with a header; spaces after commas are ignored.

    Args:
      path: Path of the file.
      flag: Flag that named it, for messages.

    Raises:
      UserError: The file cannot be read, is empty, or a row has more cells than the header.
    """
    try:
        # Spreadsheets begin a file with a byte order mark.
        text = io.StringIO(paths.read_bytes(path).decode('utf-8-sig'), newline='')
        reader = csv.DictReader(text, skipinitialspace=True, strict=True)
        rows, header = list(reader), reader.fieldnames or []
    except (OSError, UnicodeDecodeError, csv.Error) as e:
        reason = e.strerror if isinstance(e, OSError) else e
        raise UserError(f'{flag} {str(path)!r} cannot be read: {reason}') from e
    if problem := _find_defect(rows, header):
        raise UserError(f'{flag} {str(path)!r} {problem}')
    return rows


def _find_defect(rows: Sequence[Row], header: Sequence[str]) -> str:
    """Find what is wrong with a table; empty if it is well-formed."""
    if len(header) == 1 and (other := re.search(r'[;\t]', header[0])):
        return f'has {other[0]!r} between its columns: separate them by commas'
    if repeated := [name for name in header if name and header.count(name) > 1]:
        return f'has two columns {repeated[0]!r}: rename one'
    for line, row in enumerate(rows, start=2):
        if None in row:
            return f'has more cells in line {line} than columns: quote a comma in a cell'
    return '' if rows else 'has no rows below its header'


def drop_copies(
    group: Sequence[Numbered], x: Sequence[str], y: str
) -> tuple[list[Numbered], tuple[str, ...]]:
    """Drop exact copies of rows; return the rows, and lines about copies and unfinished runs.

    Args:
      group: Rows that can be fitted.
      x, y: Columns of the curve.

    Raises:
      UserError: A run, named in the column `run`, has two values of y at the same x.
    """
    unique: list[Numbered] = []
    contents: set[tuple[tuple[str, str], ...]] = set()
    first_lines: dict[tuple[str, ...], int] = {}
    for line, row in group:
        content = tuple(sorted((str(name), str(value)) for name, value in row.items()))
        if content in contents:
            continue
        contents.add(content)
        x_values = tuple(read_cell(row, column, '--x') for column in x)
        if (run := row.get('run')) and first_lines.setdefault((run, *x_values), line) != line:
            first_line = first_lines[run, *x_values]
            values = ', '.join(f'{name}={value}' for name, value in zip(x, x_values, strict=True))
            raise UserError(
                f'lines {first_line} and {line}: the run {run!r} has two values of {y} at '
                f'{values}: '
                'remove one'
            )
        unique.append((line, row))
    counts = {
        'are copies of another and count once': len(group) - len(unique),
        'are of unfinished runs, which may not have cooled down': sum(
            is_unfinished(row) for _, row in unique
        ),
    }
    return unique, tuple(f'{count} row(s) {text}' for text, count in counts.items() if count)


def is_unfinished(row: Row) -> bool:
    """Return whether a row of `scaling collect` belongs to an unfinished run."""
    return row.get('finished') == '0'


def sort_keys(keys: Iterable[tuple[str, ...]]) -> list[tuple[str, ...]]:
    """Sort the keys by each column in turn."""
    keys = list(keys)
    ranks = [_ranks(column) for column in zip(*keys, strict=True)]
    return sorted(keys, key=lambda key: [rank[v] for rank, v in zip(ranks, key, strict=True)])


def _ranks(values: Sequence[str]) -> dict[str, float]:
    """Rank numbers by value, words in the order in which they first appear."""
    different = list(dict.fromkeys(values))
    try:
        return {value: float(value) for value in different}
    except ValueError:
        return {value: i for i, value in enumerate(different)}


def read_cell(row: Row, column: str, flag: str) -> str:
    """Read the text of a cell; empty if it is missing.

    Raises:
      UserError: The column is unknown; the message names the flag.
    """
    name = column.removeprefix('1-') if column not in row else column
    if name not in row:
        raise UserError(f'{flag}: {nearest("column", column, [c for c in row if c])}')
    return row[name] or ''


def number(numbered: Numbered, column: str, flag: str) -> float:
    """Read the number in a cell; `1-NAME` is one minus the number.

    Raises:
      UserError: The text is not a number; see also `read_cell`.
    """
    line, row = numbered
    text = read_cell(row, column, flag)
    try:
        value = float(text)
    except ValueError as e:
        raise UserError(f'{flag} {column}: line {line} has {text!r}, which is not a number') from e
    return value if column in row else 1 - value
