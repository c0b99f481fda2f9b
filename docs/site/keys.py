"""Write docs/config.md and the pages of docs/config/, one for each section: `make docs`."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

from vit_jax.commands import _config_keys
from vit_jax.commands._config_keys import Key

DOCS = Path(__file__).resolve().parents[1]
INDEX, FOLDER = DOCS / 'config.md', DOCS / 'config'
TOP = 'run'
HEAD = f"""{_config_keys.HEAD}
One page for each section:

"""


def page_name(heading: str) -> str:
    """Name the page of a section: 'optim' for 'config.optim.schedule'."""
    return re.split(r'[.,]', heading + '.')[1] or TOP


def title(name: str) -> str:
    """The heading of a page."""
    return 'config' if name == TOP else f'config.{name}'


def lay_out(sections: Mapping[str, list[Key]]) -> dict[Path, str]:
    """Lay out the sections that `_config_keys.package_keys` returns as pages, {path: text}."""
    grouped: dict[str, dict[str, list[Key]]] = {}
    for heading, keys in sections.items():
        grouped.setdefault(page_name(heading), {})[heading] = keys
    entries = [f'- [{title(name)}](config/{name}.md)' for name in grouped]
    pages = {INDEX: HEAD + '\n'.join(entries) + '\n'}
    for name, group in grouped.items():
        head = f'# {title(name)}\n\n[All sections](../config.md)\n'
        pages[FOLDER / f'{name}.md'] = _config_keys.markdown(group, head)
    return pages


if __name__ == '__main__':
    pages = lay_out(_config_keys.package_keys())
    FOLDER.mkdir(exist_ok=True)
    for path in {*FOLDER.glob('*.md')} - pages.keys():
        path.unlink()
    for path, text in pages.items():
        path.write_text(text)
