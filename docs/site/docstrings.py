"""Docstrings for Sphinx: single backticks are code, stars and bars are literal."""

from __future__ import annotations

import re
from typing import Any

from docutils import core, nodes, utils

_CODE = re.compile(r'(``[^`]+``|`[^`\n]+`)')
_OUTPUT = re.compile(r'^  ([a-z]\w*(?:, [a-z]\w*)*): ')
_ARRAY = 'jaxlib._jax.Array'  # in the shapes of jaxtyping
# Flax adds these fields to every Linen module.
_OF_FLAX = re.compile(r',?\s*parent: [^=]*=\s*<[^>]*>,\s*name: str \| None = None')


def setup(app: Any) -> dict[str, bool]:
    """Register the extension."""
    app.connect('autodoc-skip-member', skip_foreign)
    app.connect('autodoc-process-docstring', convert, priority=400)  # before Napoleon at 500
    app.connect('autodoc-process-docstring', check, priority=900)
    app.connect('autodoc-process-signature', shorten)
    app.connect('doctree-read', name_attributes)
    return {'parallel_read_safe': True}


def skip_foreign(app: Any, what: str, name: str, obj: Any, skip: bool, options: Any) -> bool | None:
    """Leave out functions of other packages: the default of a field, with JAX's own docstring."""
    package = str(getattr(obj, '__module__', '')).partition('.')[0]
    return True if callable(obj) and package in ('jax', 'flax') else None


def convert(app: Any, what: str, name: str, obj: Any, options: Any, lines: list[str]) -> None:
    """Convert a docstring to reStructuredText, in place."""
    lines[:] = _listed(_literal_blocks([_escape(line) for line in lines]))


def _escape(line: str) -> str:
    parts = _CODE.split(line)
    for i, part in enumerate(parts):
        if i % 2:
            # Code must end before punctuation, not before a letter.
            end = '\\ ' if re.match(r'\w', parts[i + 1]) else ''
            parts[i] = (part if part.startswith('``') else f'`{part}`') + end
        else:
            part = re.sub(r'(?<!^)[*|]', r'\\\g<0>', part)
            parts[i] = re.sub(r'(\w)_(?=\W|$)', r'\1\\_', part)
    return ''.join(parts)


def _literal_blocks(lines: list[str]) -> list[str]:
    """Mark text indented by four after a paragraph as code, as in Markdown."""
    found: list[str] = []
    for i, line in enumerate(lines):
        starts = line.startswith('    ') and i > 1 and not lines[i - 1].strip()
        if starts and lines[i - 2].strip() and not lines[i - 2].startswith(' '):
            found += ['::', '']
        found.append(line)
    return found


def _listed(lines: list[str]) -> list[str]:
    """Turn the section Returns into a field, and several named outputs into a list."""
    if 'Returns:' not in lines:
        return lines
    start = lines.index('Returns:') + 1
    length = next((i for i, line in enumerate(lines[start:]) if line and line[0] != ' '), None)
    end = len(lines) if length is None else start + length
    body = lines[start:end]
    named = [line for line in body if _OUTPUT.match(line)]
    if len(named) > 1:
        body = [_OUTPUT.sub(r'  - ``\1``: ', line) for line in body]
    return [*lines[: start - 1], ':Returns:', '', *body, '', *lines[end:]]


def check(app: Any, what: str, name: str, obj: Any, options: Any, lines: list[str]) -> None:
    """Show text that is not valid reStructuredText verbatim."""
    settings = {'report_level': 5, 'halt_level': 2, 'warning_stream': ''}
    try:
        core.publish_doctree('\n'.join(lines), settings_overrides=settings)
    except (utils.SystemMessage, AttributeError):  # or a directive that needs Sphinx
        lines[:] = ['::', '', *(f'    {line}' for line in lines), '']


def shorten(
    app: Any,
    what: str,
    name: str,
    obj: Any,
    options: Any,
    signature: str | None,
    returns: str | None,
) -> tuple[str | None, str | None]:
    """Drop the fields that Flax adds to every module, and shorten the name of arrays."""
    texts = (signature and _OF_FLAX.sub('', signature), returns)
    shown, result = (text and text.replace(_ARRAY, 'Array') for text in texts)
    return shown, result


def name_attributes(app: Any, doctree: nodes.document) -> None:
    """Rename Sphinx's field Variables to Attributes, as in the docstrings."""
    for name in doctree.findall(nodes.field_name):
        if name.astext() == 'Variables':
            name[:] = [nodes.Text('Attributes')]
