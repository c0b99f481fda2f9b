"""Makes every key of docs/config/ findable by name in the site's search."""

from __future__ import annotations

from typing import Any

from docutils import nodes

PAGES = 'config/'


def setup(app: Any) -> dict[str, bool]:
    """Register the extension."""
    app.connect('doctree-read', note_keys)
    return {'parallel_read_safe': True}


def note_keys(app: Any, doctree: nodes.document) -> None:
    """Give each row of the key tables a target."""
    if not app.env.docname.startswith(PAGES):
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
