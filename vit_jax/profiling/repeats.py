"""Blocks that a tree of parameters has several times over, folded into one."""

from __future__ import annotations

import re
from collections.abc import Hashable, Iterator, Mapping, Sequence
from typing import Any

Row = dict[str, Any]


def fold(rows: Sequence[Row]) -> list[Row]:
    """Rows in which neighbours such as block_0 ... block_11 are one, if they are alike.

    Args:
      rows: each with its `path`, `shape`, `dtype` and `count`, in natural order.

    Returns:
      Rows that have `times` too, how often what they show is there; `block_{0..11}` stands in the
      path, and `count` is of all of them together.
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
    """The name, length and first node of each run of alike nodes with consecutive numbers."""
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
    """What two nodes have in common if they are alike: names, shapes and dtypes."""
    if isinstance(node, Mapping):
        return tuple((name, _form(inner)) for name, inner in node.items())
    return tuple(node[0]['shape']), node[0]['dtype']
