"""Lets tables with many columns extend into the margin, over the page's contents."""

from __future__ import annotations

from typing import Any

from docutils import nodes

COLUMNS = 5


def setup(app: Any) -> dict[str, bool]:
    """Register the extension."""
    app.connect('doctree-read', widen)
    return {'parallel_read_safe': True}


def widen(app: Any, doctree: nodes.document) -> None:
    """Mark wide tables for the theme."""
    for group in doctree.findall(nodes.tgroup):
        if group['cols'] >= COLUMNS:
            group.parent['classes'].append('full-width')
