"""A page of headings, texts, lists, tables and pictures, as Markdown or as one HTML file."""

from __future__ import annotations

import base64
import dataclasses
import html
import re
from collections.abc import Mapping, Sequence

STYLE = (
    'body{font:15px/1.5 system-ui,sans-serif;max-width:70em;margin:2em auto;padding:0 1em;'
    'color:#1f2430}h1{font-size:1.5em}h2{font-size:1.15em;margin-top:2em}img{max-width:100%}'
    'table{border-collapse:collapse;font-size:.85em;display:block;overflow-x:auto}'
    'td,th{padding:.25em .7em;text-align:right;border-bottom:1px solid #e4e6eb;white-space:nowrap}'
    'td:first-child,th:first-child{text-align:left}code{background:#f3f4f7;padding:0 .25em}'
)


@dataclasses.dataclass(frozen=True)
class Heading:
    """A heading; level 1 is the title."""

    text: str
    level: int = 2


@dataclasses.dataclass(frozen=True)
class Text:
    """A paragraph; `code` stands in backquotes."""

    text: str


@dataclasses.dataclass(frozen=True)
class Lines:
    """A list of lines."""

    lines: Sequence[str]


@dataclasses.dataclass(frozen=True)
class Table:
    """Rows of cells; the first is the header."""

    rows: Sequence[Sequence[str]]


@dataclasses.dataclass(frozen=True)
class Picture:
    """A PNG file beside the page."""

    name: str
    words: str


Block = Heading | Text | Lines | Table | Picture


def markdown(blocks: Sequence[Block]) -> str:
    """The page as Markdown."""
    return '\n\n'.join(map(_markdown, blocks)) + '\n'


def _markdown(block: Block) -> str:
    match block:
        case Heading(text, level):
            return f'{"#" * level} {text}'
        case Text(text):
            return text
        case Lines(lines):
            return '\n'.join(f'- {line}' for line in lines)
        case Table(rows):
            cells = [[cell.replace('|', r'\|') for cell in row] for row in rows]
            cells.insert(1, ['---'] * len(rows[0]))
            return '\n'.join(f'| {" | ".join(row)} |' for row in cells)
        case Picture(name, words):
            return f'![{words}]({name})'


def one_file(blocks: Sequence[Block], pictures: Mapping[str, bytes]) -> str:
    """The page as HTML that needs no other file.

    Args:
      blocks: of the page, the title first.
      pictures: PNGs by name.
    """
    title = next(block.text for block in blocks if isinstance(block, Heading))
    body = '\n'.join(_html(block, pictures) for block in blocks)
    return (
        f'<!doctype html>\n<html lang="en"><meta charset="utf-8"><title>{html.escape(title)}'
        f'</title>\n<style>{STYLE}</style>\n{body}\n</html>\n'
    )


def _html(block: Block, pictures: Mapping[str, bytes]) -> str:
    match block:
        case Heading(text, level):
            return f'<h{level}>{_inline(text)}</h{level}>'
        case Text(text):
            return f'<p>{_inline(text)}</p>'
        case Lines(lines):
            return '<ul>' + ''.join(f'<li>{_inline(line)}</li>' for line in lines) + '</ul>'
        case Table(rows):
            head, *rest = rows
            return f'<table>{_row(head, "th")}{"".join(_row(row, "td") for row in rest)}</table>'
        case Picture(name, words):
            data = base64.b64encode(pictures[name]).decode()
            return f'<img alt="{html.escape(words)}" src="data:image/png;base64,{data}">'


def _row(cells: Sequence[str], tag: str) -> str:
    return '<tr>' + ''.join(f'<{tag}>{_inline(cell)}</{tag}>' for cell in cells) + '</tr>'


def _inline(text: str) -> str:
    return re.sub(r'`([^`]+)`', r'<code>\1</code>', html.escape(text))
