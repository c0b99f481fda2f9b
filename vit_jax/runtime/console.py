"""Tables, progress bars and styled text, in which names stand exactly as they are."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterable, Iterator
from typing import IO, Any

import rich.console
import rich.progress
import rich.table
from rich.console import ConsoleOptions, RenderableType, RenderResult
from rich.file_proxy import FileProxy
from rich.progress import (
    BarColumn,
    DownloadColumn,
    MofNCompleteColumn,
    TextColumn,
    TimeRemainingColumn,
)
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


def status(text: str) -> Any:
    """A spinner with text while work is under way, if standard error is a terminal."""
    return Console(stderr=True).status(text)


@contextlib.contextmanager
def progress(
    what: str, total: int | None, *, quiet: bool = False, is_bytes: bool = False
) -> Iterator[Callable[..., None]]:
    """A progress bar on standard error, if that is a terminal; yields a function to advance it."""
    console = Console(stderr=True)
    words = TextColumn('{task.description}', markup=False)
    count = DownloadColumn(binary_units=True) if is_bytes else MofNCompleteColumn()
    columns = (words, count, BarColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, disable=quiet or not console.is_terminal) as bar:
        task = bar.add_task(what, total=total)
        yield lambda count=1: bar.advance(task, count)


class Table(rich.table.Table):
    """A table without rules; every row is one line, even if a name in it contains newlines.

    No cell is cut where a console wraps lines softly, however wide the row is.

    Args:
      headings: of the columns.
      left: number of columns that are flush left, before others that are flush right; None for all.
      options: of each column.
    """

    def __init__(self, *headings: str, left: int | None = None, **options: Any):
        super().__init__(box=None, pad_edge=False)
        for i, heading in enumerate(headings):
            is_left = left is None or i < left
            self.add_column(heading, justify='left' if is_left else 'right', **options)

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
