"""Lets wide tables extend into the margin, and stacks their cells on a phone."""

from __future__ import annotations

from typing import Any

from docutils import nodes

COLUMNS = 5
# On a phone, a row with as much text or as many columns becomes a list of its cells.
CHARACTERS, MANY = 250, 9


def setup(app: Any) -> dict[str, bool]:
    """Register the extension."""
    app.connect('doctree-read', widen)
    return {'parallel_read_safe': True}


def widen(app: Any, doctree: nodes.document) -> None:
    """Mark wide tables for the theme."""
    for group in doctree.findall(nodes.tgroup):
        if group['cols'] >= COLUMNS:
            group.parent['classes'].append('full-width')
        head, *rows = group.findall(nodes.row)
        if group['cols'] >= MANY or any(len(row.astext()) > CHARACTERS for row in rows):
            group.parent['classes'].append('stacked')
            for row in rows:
                label(row, [cell.astext() for cell in head])


def label(row: nodes.row, headings: list[str]) -> None:
    """Begin each cell but the first with its column's heading, which only phones show."""
    for cell, heading in list(zip(row, headings, strict=False))[1:]:
        paragraph = next(iter(cell.findall(nodes.paragraph)), None)
        if heading and paragraph is not None:
            paragraph.insert(0, nodes.inline(text=f'{heading}: ', classes=['cell-label']))
