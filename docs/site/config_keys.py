"""Every key of docs/config.md is an object that the site's search finds by its name."""

from __future__ import annotations

from typing import Any

from docutils import nodes

PAGE = 'config'


def setup(app: Any) -> dict[str, bool]:
    """Register the extension."""
    app.connect('doctree-read', note_keys)
    return {'parallel_read_safe': True}


def note_keys(app: Any, doctree: nodes.document) -> None:
    """Give each row of the tables of keys a target."""
    if app.env.docname != PAGE:
        return
    standard = app.env.get_domain('std')
    for body in doctree.findall(nodes.tbody):
        section = body
        while not isinstance(section, nodes.section):
            section = section.parent
        group = section.next_node(nodes.title).astext().replace(', ', ':')
        for row in body.findall(nodes.row):
            name = f'{group}.{row.next_node(nodes.entry).astext()}'
            target = nodes.make_id(f'key-{name}')
            row['ids'].append(target)
            standard.note_object('confval', name, target, location=row)
