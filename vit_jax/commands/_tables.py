"""Tables as CSV."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Mapping, Sequence
from typing import Any

from vit_jax.errors import visible

FORMULAS = ('=', '+', '-', '@', '\t', '\r')  # first characters of formulas in spreadsheets


def columns_of(rows: Sequence[Mapping[str, Any]], names: Sequence[str]) -> dict[str, list[Any]]:
    """Return the named columns of rows, with text that UTF-8 can encode."""
    return {name: [_make_storable(row.get(name)) for row in rows] for name in names}


def _make_storable(value: Any) -> Any:
    """Replace characters in text that UTF-8 cannot encode."""
    return visible(value) if isinstance(value, str) else value


def csv_bytes(cells: Mapping[str, list[Any]]) -> bytes:
    """Format columns as CSV; lists are JSON, and text that looks like a formula is escaped."""
    file = io.StringIO(newline='')
    writer = csv.writer(file, lineterminator='\n')
    writer.writerow(map(_escape_formula, cells))
    for row in zip(*cells.values(), strict=True):
        writer.writerow(map(_escape_formula, row))
    return file.getvalue().encode()


def _escape_formula(value: Any) -> Any:
    """Convert a value for CSV, with an apostrophe before text that looks like a formula."""
    if isinstance(value, str) and value.startswith(FORMULAS):
        return f"'{value}"
    return json.dumps(value) if isinstance(value, list | dict) else value
