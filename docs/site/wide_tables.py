"""Tables of many columns reach into the margin, where the contents of the page give way to them."""

from __future__ import annotations

from typing import Any

from docutils import nodes

COLUMNS = 5


def setup(app: Any) -> dict[str, bool]:
    """Register the extension."""
    app.connect('doctree-read', widen)
    return {'parallel_read_safe': True}


def widen(app: Any, doctree: nodes.document) -> None:
    """Mark the tables for the theme."""
    for group in doctree.findall(nodes.tgroup):
        if group['cols'] >= COLUMNS:
            group.parent['classes'].append('full-width')
