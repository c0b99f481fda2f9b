"""Tables, progress bars and styled text, in which names stand exactly as they are."""

from __future__ import annotations

import contextlib
import os
import sys
import traceback
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

from vit_jax.errors import EXIT_FAILED, UserError, one_line, visible, without_secrets

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


class Lost(UserError):
    """Standard output cannot be written, as on a full disk."""


class Unread(Lost):
    """The reader of standard output has left, as `head` does when it has read enough."""

    exit_code = EXIT_FAILED


@contextlib.contextmanager
def escaped() -> Iterator[None]:
    """Make everything that is written to standard output and error inside `visible`.

    Errors and logs, which quote what libraries say, are written without secrets.
    A failed write to standard output raises `Lost`; one to standard error is ignored.
    """
    before = sys.stdout, sys.stderr
    sys.stdout = Escaped(Checked(sys.stdout))
    sys.stderr = Secretive(Unheard(sys.stderr))
    try:
        yield
    finally:
        sys.stdout, sys.stderr = before


@contextlib.contextmanager
def unheard() -> Iterator[None]:
    """Let the code inside continue when its output can no longer be written.

    If the reader of a pipe ends (`| head`), a terminal is closed, or the disk of a redirected
    output is full, further output is dropped. A run keeps its numbers in its folder, and the other
    processes of its job wait for it.
    """
    before = sys.stdout, sys.stderr
    sys.stdout, sys.stderr = Unheard(sys.stdout), Unheard(sys.stderr)
    try:
        yield
    finally:
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        sys.stdout, sys.stderr = before


def prepare() -> None:
    """Make the standard streams of this process usable, however it was started.

    Closed ones (`>&-`) lead to the null device: otherwise the next opened file would take their
    number, and receive what libraries write there. Characters that the locale lacks are escaped,
    and so are the control characters of a traceback.
    """
    for number, name in enumerate(('stdin', 'stdout', 'stderr')):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # takes the lowest free number, which is this one
        if getattr(sys, name) is None:
            setattr(sys, name, os.fdopen(number, 'w' if number else 'r', closefd=False))
        stream = getattr(sys, name)
        if number and stream.encoding.lower() != 'utf-8':
            stream.reconfigure(errors='backslashreplace')
    sys.excepthook = _print_traceback


def _print_traceback(*error: Any) -> None:
    text = without_secrets(''.join(traceback.format_exception(*error)))
    print(visible(text), end='', file=sys.stderr)


class _Stream:
    """A stream that writes through another one.

    Attributes:
      exact: the same stream without escaping, for writers that escape names themselves.
    """

    def __init__(self, stream: Any):
        self._stream = stream

    @property
    def exact(self) -> Any:
        return type(self)(getattr(self._stream, 'exact', self._stream))

    def write(self, text: str) -> int:
        with self._guarded():
            self._stream.write(text)
        return len(text)

    def flush(self) -> None:
        with self._guarded():
            self._stream.flush()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    @contextlib.contextmanager
    def _guarded(self) -> Iterator[None]:
        yield

    def _lead_nowhere(self) -> None:
        """Drop what is still buffered, and what C++ writes."""
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, self._stream.fileno())
        os.close(nowhere)


class Escaped(_Stream):
    """A stream on which control characters are visible."""

    @property
    def exact(self) -> Any:
        return self._stream.exact

    def write(self, text: str) -> int:
        return self._stream.write(visible(text))


class Secretive(Escaped):
    """A stream of messages, on which URLs have no passwords."""

    def write(self, text: str) -> int:
        return super().write(without_secrets(text))


class Unheard(_Stream):
    """A stream whose errors are swallowed."""

    @contextlib.contextmanager
    def _guarded(self) -> Iterator[None]:
        try:
            yield
        except (OSError, Lost):
            self._lead_nowhere()


class Checked(_Stream):
    """A stream whose errors become `UserError`."""

    @contextlib.contextmanager
    def _guarded(self) -> Iterator[None]:
        try:
            yield
        except BrokenPipeError as error:
            self._lead_nowhere()
            raise Unread('nobody reads standard output any more') from error
        except OSError as error:
            self._lead_nowhere()
            raise Lost(f'standard output cannot be written: {error.strerror}') from error
