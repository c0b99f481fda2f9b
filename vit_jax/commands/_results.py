"""Flags of commands that fit a table: columns, numbers in range, and results as text or JSON."""

from __future__ import annotations

import argparse
import json
import pathlib
from collections.abc import Callable, Mapping
from typing import Any

from vit_jax.commands._parser import writing
from vit_jax.errors import UserError


def add_bootstrap_flag(parser: argparse.ArgumentParser) -> None:
    """Add `--bootstrap`."""
    words = 'for the bands (default: %(default)s)'
    parser.add_argument('--bootstrap', type=int, default=100, metavar='N', help=words)


def add_json_flag(parser: argparse.ArgumentParser) -> None:
    """Add `--json` for `show`."""
    words = 'print JSON, or write it besides'
    parser.add_argument('--json', nargs='?', const='-', metavar='FILE', help=words)


def check(args: argparse.Namespace) -> None:
    """Raise UserError if `--target` or `--bootstrap` is out of range."""
    require_positive(args.target, '--target')
    require_count(args.bootstrap, '--bootstrap')


def require_positive(value: float | None, flag: str) -> None:
    """Raise UserError unless the value is positive and finite, or None."""
    if value is not None and not 0 < value < float('inf'):
        raise UserError(f'{flag} {value:g}: must be positive')


def require_count(value: int, flag: str) -> None:
    """Raise UserError for a negative number."""
    if value < 0:
        raise UserError(f'{flag} {value}: must be at least 0')


def names(text: str) -> tuple[str, ...]:
    """'a,b' -> ('a', 'b')."""
    return tuple(name.strip() for name in text.split(',') if name.strip())


def show(summary: Mapping[str, Any], where: str | None, table: Callable[[], None]) -> None:
    """Print the table, or the summary as JSON if `where` is '-'; write that to any other path.

    Raises:
      UserError: if it cannot be written.
    """
    text = json.dumps(summary, indent=2, allow_nan=False) + '\n'
    if where == '-':
        print(text, end='')
        return
    if where:
        write(where, text, '--json')
    table()


def write(path: str | pathlib.Path, text: str, flag: str) -> None:
    """Write a file, and make its folder.

    Raises:
      UserError: if it cannot be written.
    """
    from vit_jax.storage.paths import write_text_atomic

    path = pathlib.Path(path)
    with writing(path, flag):
        write_text_atomic(path, text)
