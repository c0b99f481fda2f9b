"""Tables, progress bars and styled text, in which names stand exactly as they are."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from typing import IO, Any

import rich.console
import rich.progress
import rich.table
from rich.console import ConsoleOptions, RenderableType, RenderResult
from rich.file_proxy import FileProxy
from rich.segment import Segment
from rich.text import Text

from vit_jax.errors import one_line, visible
from vit_jax.runtime.output import Escaped

_WIDEST = 10_000  # characters of a row


class Console(rich.console.Console):
    """A console whose text is `visible`: only the styles are escape sequences.

    Brackets and colons are text, neither markup nor emoji, for they may be part of a name.
    """

    def __init__(self, **options: Any):
        super().__init__(markup=False, emoji=False, highlight=False, **options)

    @property
    def file(self) -> IO[str]:
        stream = super().file
        return getattr(stream, 'exact', stream)

    @file.setter
    def file(self, stream: IO[str]) -> None:
        self._file = stream

    def render_str(self, text: str, **options: Any) -> Text:
        return super().render_str(visible(text), **options)

    def render(
        self, renderable: RenderableType, options: ConsoleOptions | None = None
    ) -> Iterable[Segment]:
        """Segments of a renderable, including texts that did not pass through `render_str`."""
        for segment in super().render(renderable, options):
            text = segment.text if segment.control else visible(segment.text)
            yield segment if text == segment.text else segment._replace(text=text)


class Progress(rich.progress.Progress):
    """A progress bar; text printed above it is made `visible` before rich parses it for styles."""

    def start(self) -> None:
        super().start()
        for name in ('stdout', 'stderr'):
            if isinstance(stream := getattr(sys, name), FileProxy):  # until `stop`
                setattr(sys, name, Escaped(stream))


class Table(rich.table.Table):
    """A table without rules; every row is one line, even if a name in it contains newlines.

    No cell is cut where a console wraps lines softly, however wide the row is.
    """

    def __init__(self, *headings: str, **options: Any):
        super().__init__(*headings, box=None, pad_edge=False, **options)

    def __rich_console__(
        self, console: rich.console.Console, options: ConsoleOptions
    ) -> RenderResult:
        if options.overflow == 'ignore':  # soft wrap
            options = options.update(max_width=_WIDEST)
        return super().__rich_console__(console, options)

    def add_column(self, header: RenderableType = '', *rest: Any, **options: Any) -> None:
        super().add_column(_flat(header), *rest, **options)

    def add_row(self, *cells: RenderableType | None, **options: Any) -> None:
        super().add_row(*map(_flat, cells), **options)


def _flat(cell: Any) -> Any:
    return one_line(cell) if isinstance(cell, str) else cell
