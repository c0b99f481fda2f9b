"""Folding of repeated blocks in a tree of parameters into one."""

from __future__ import annotations

import re
from collections.abc import Hashable, Iterator, Mapping, Sequence
from typing import Any

Row = dict[str, Any]


def fold(rows: Sequence[Row]) -> list[Row]:
    """Rows in which consecutive equal blocks such as block_0 ... block_11 are folded into one.

    Args:
      rows: each with its `path`, `shape`, `dtype` and `count`, in natural order.

    Returns:
      Rows with the number of repetitions as `times`; their path contains `block_{0..11}`, and
      `count` is the sum over repetitions.
    """
    tree: dict[str, Any] = {}
    for row in rows:
        node = tree
        *parents, leaf = row['path'].split('/')
        for name in parents:
            node = node.setdefault(name, {})
        node[leaf] = [row]
    return list(_rows(tree, (), 1))


def _rows(tree: Mapping[str, Any], path: tuple[str, ...], times: int) -> Iterator[Row]:
    for name, repeats, node in _runs(tree):
        place, total = (*path, name), times * repeats
        if isinstance(node, Mapping):
            yield from _rows(node, place, total)
        else:
            (row,) = node
            yield row | {'path': '/'.join(place), 'count': row['count'] * total, 'times': total}


def _runs(tree: Mapping[str, Any]) -> Iterator[tuple[str, int, Any]]:
    """The name, length and first node of each run of equal nodes with consecutive numbers."""
    entries = list(tree.items())
    while entries:
        name, node = entries.pop(0)
        stem, first = _numbered(name)
        length = 1
        if first is not None:
            while entries and _follows(entries[0], stem, first + length, node):
                entries.pop(0)
                length += 1
        last = (first or 0) + length - 1
        yield (name if length == 1 else f'{stem}{{{first}..{last}}}'), length, node


def _follows(entry: tuple[str, Any], stem: str, number: int, node: Any) -> bool:
    return _numbered(entry[0]) == (stem, number) and _form(entry[1]) == _form(node)


def _numbered(name: str) -> tuple[str, int | None]:
    """`block_11` -> ('block_', 11)."""
    match = re.fullmatch(r'(.*_)(\d+)', name)
    return (match[1], int(match[2])) if match else (name, None)


def _form(node: Any) -> Hashable:
    """Names, shapes and dtypes of a node, which are the same for equal nodes."""
    if isinstance(node, Mapping):
        return tuple((name, _form(inner)) for name, inner in node.items())
    return tuple(node[0]['shape']), node[0]['dtype']
