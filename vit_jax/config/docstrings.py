"""Descriptions of parameters in docstrings, from the sections `Args` and `Attributes`."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterator

SECTIONS = ('Args:', 'Attributes:')
_ENTRY = re.compile(r'([*\w, ]+?)(?: \([^)]*\))?:(?:\s+(.*))?')


def of_parameters(constructor: Callable) -> dict[str, str]:
    """The description of each parameter of a function or class, as one paragraph.

    A class inherits the descriptions of its bases.

    Args:
      constructor: its docstring describes them as `name: text` or `one, two: text`.
    """
    classes = inspect.getmro(constructor) if inspect.isclass(constructor) else (constructor,)
    found: dict[str, str] = {}
    for one in reversed(classes):
        own = one.__dict__.get('__doc__') if inspect.isclass(one) else one.__doc__
        for names, text in _entries(inspect.cleandoc(own or '')):
            found |= dict.fromkeys(re.findall(r'\w+', names), text)
    return found


def sentence(text: str) -> str:
    """The first sentence of a paragraph, without its full stop."""
    return re.split(r'\.(?:\s+(?=[A-Z\'`(])|$)', text, maxsplit=1)[0]


def _entries(doc: str) -> Iterator[tuple[str, str]]:
    """The names and the text of each entry."""
    for lines in _sections(doc.splitlines()):
        indent = min((_indent(line) for line in lines if line.strip()), default=0)
        names, text = '', ''
        for line in lines:
            match = _ENTRY.fullmatch(line.strip()) if _indent(line) == indent else None
            if match is None:
                text = f'{text} {line.strip()}'.strip()
                continue
            if names:
                yield names, text
            names, text = match[1], match[2] or ''
        if names:
            yield names, text


def _sections(lines: list[str]) -> Iterator[list[str]]:
    """The indented lines below each heading."""
    for i, line in enumerate(lines):
        if line in SECTIONS:
            below = lines[i + 1 :]
            end = (k for k, text in enumerate(below) if text.strip() and not _indent(text))
            yield below[: next(end, len(below))]


def _indent(line: str) -> int:
    return len(line) - len(line.lstrip())
