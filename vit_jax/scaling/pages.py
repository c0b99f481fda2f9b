"""Pages of blocks, written as Markdown or as HTML that needs no other file."""

from __future__ import annotations

import base64
import dataclasses
import html
import mimetypes
import re
from collections.abc import Mapping, Sequence

STYLE = (
    ':root{color-scheme:light dark;--ink:#1f2430;--back:#fff;--line:#e4e6eb;--code:#f3f4f7}'
    '@media(prefers-color-scheme:dark){:root{--ink:#dfe3ea;--back:#14161b;--line:#343945;'
    '--code:#22262f}.drawing img{filter:invert(1) hue-rotate(180deg)}}'
    'body{font:15px/1.5 system-ui,sans-serif;max-width:70em;margin:2em auto;padding:0 1em;'
    'color:var(--ink);background:var(--back);overflow-wrap:anywhere}'
    'h1{font-size:1.5em}h2{font-size:1.15em;margin-top:2em}img{max-width:100%}'
    'table,pre{font-size:.85em;overflow-x:auto}table{border-collapse:collapse;display:block}'
    'td,th{padding:.25em .7em;text-align:right;border-bottom:1px solid var(--line);'
    'white-space:nowrap}td:first-child,th:first-child{text-align:left}'
    'code,pre{background:var(--code);padding:0 .25em}pre{padding:.7em;overflow-wrap:normal}'
    'summary{cursor:pointer}.drawing{display:inline-block;position:relative;vertical-align:top;'
    'width:min(100%,33em);overflow-x:auto;cursor:zoom-in}.drawing img{width:100%}'
    '.drawing input{position:absolute;opacity:0}'
    '.drawing:focus-within{outline:1px solid var(--line)}'
    '.drawing:has(:checked){width:100%;cursor:zoom-out}'
    '.drawing :checked+img{width:max(100%,60em);max-width:none}'
)
# The page is self-contained: it may neither load nor run anything.
POLICY = "default-src 'none'; img-src data:; style-src 'unsafe-inline'"


@dataclasses.dataclass(frozen=True)
class Heading:
    """Heading; level 1 is the title."""

    text: str
    level: int = 2


@dataclasses.dataclass(frozen=True)
class Text:
    """Paragraph; `code` is in backquotes."""

    text: str


@dataclasses.dataclass(frozen=True)
class Lines:
    """List of lines."""

    lines: Sequence[str]


@dataclasses.dataclass(frozen=True)
class TableBlock:
    """Rows of cells; the first is the header."""

    rows: Sequence[Sequence[str]]


@dataclasses.dataclass(frozen=True)
class Picture:
    """Picture; a click enlarges an SVG."""

    name: str
    caption: str


@dataclasses.dataclass(frozen=True)
class Folded:
    """Preformatted text, folded below a title."""

    title: str
    text: str


Block = Heading | Text | Lines | TableBlock | Picture | Folded


def markdown(blocks: Sequence[Block]) -> str:
    """Write a page as Markdown."""
    return '\n\n'.join(map(_markdown, blocks)) + '\n'


def _markdown(block: Block) -> str:
    match block:
        case Heading(text, level):
            return f'{"#" * level} {text}'
        case Text(text):
            return text
        case Lines(lines):
            return '\n'.join(f'- {line}' for line in lines)
        case TableBlock(rows):
            cells = [[cell.replace('|', r'\|') for cell in row] for row in rows]
            cells.insert(1, ['---'] * len(rows[0]))
            return '\n'.join(f'| {" | ".join(row)} |' for row in cells)
        case Picture(name, caption):
            return f'![{caption}]({name})'
        case Folded(title, text):
            return '\n'.join([f'{title}:', '', *(f'    {line}' for line in text.split('\n'))])


def html_page(blocks: Sequence[Block], pictures: Mapping[str, bytes]) -> str:
    """Write a page as HTML that needs no other file.

    Args:
      blocks: Blocks of the page, the title first.
      pictures: Contents of the files by name.
    """
    title = next(block.text for block in blocks if isinstance(block, Heading))
    body = '\n'.join(_html(block, pictures) for block in blocks)
    return (
        '<!doctype html>\n<html lang="en"><meta charset="utf-8">'
        f'<meta http-equiv="Content-Security-Policy" content="{POLICY}">'
        '<meta name="viewport" content="width=device-width">'
        f'<title>{html.escape(title)}</title>\n<style>{STYLE}</style>\n{body}\n</html>\n'
    )


def _html(block: Block, pictures: Mapping[str, bytes]) -> str:
    match block:
        case Heading(text, level):
            return f'<h{level}>{_inline(text)}</h{level}>'
        case Text(text):
            return f'<p>{_inline(text)}</p>'
        case Lines(lines):
            return '<ul>' + ''.join(f'<li>{_inline(line)}</li>' for line in lines) + '</ul>'
        case TableBlock(rows):
            header, *body_rows = rows
            body = ''.join(_format_row(row, 'td') for row in body_rows)
            return f'<table tabindex="0">{_format_row(header, "th")}{body}</table>'
        case Picture(name, caption):
            return _embed_picture(name, html.escape(caption), pictures[name])
        case Folded(title, text):
            return (
                f'<details><summary>{_inline(title)}</summary>'
                f'<pre tabindex="0">{html.escape(text)}</pre></details>'
            )


def _embed_picture(name: str, caption: str, content: bytes) -> str:
    data, kind = base64.b64encode(content).decode(), mimetypes.guess_type(name)[0]
    image = f'<img alt="{caption}" src="data:{kind};base64,{data}">'
    if not name.endswith('.svg'):
        return image
    toggle = f'<input type="checkbox" aria-label="enlarge: {caption}">'
    return f'<label class="drawing">{toggle}{image}</label>'


def _format_row(cells: Sequence[str], tag: str) -> str:
    return '<tr>' + ''.join(f'<{tag}>{_inline(cell)}</{tag}>' for cell in cells) + '</tr>'


def _inline(text: str) -> str:
    return re.sub(r'`([^`]+)`', r'<code>\1</code>', html.escape(text))
