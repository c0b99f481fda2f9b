"""Tables, progress bars and styled text that show names literally, and safe standard streams."""

from __future__ import annotations

import contextlib
import logging
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

_MAX_WIDTH = 10_000  # characters of a row


class Console(rich.console.Console):
    """Console that escapes text by `visible`; only styles become escape sequences.

    Brackets and colons stay text, since names may contain them.
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
        """Yield a renderable's segments, including texts that bypassed `render_str`."""
        for segment in super().render(renderable, options):
            text = segment.text if segment.control else visible(segment.text)
            yield segment if text == segment.text else segment._replace(text=text)


class Progress(rich.progress.Progress):
    """A progress bar; text printed above it is made `visible` before rich parses it for styles."""

    def start(self) -> None:
        super().start()
        for name in ('stdout', 'stderr'):
            if isinstance(stream := getattr(sys, name), FileProxy):  # until `stop`
                setattr(sys, name, _Stream(stream, visible))


def status(text: str) -> Any:
    """Return a spinner with text during long work, if standard error is a terminal."""
    return Console(stderr=True).status(text)


@contextlib.contextmanager
def progress(
    label: str, total: int | None, *, quiet: bool = False, is_bytes: bool = False
) -> Iterator[Callable[..., None]]:
    """Show a progress bar if standard error is a terminal; yield a function to advance it."""
    console = Console(stderr=True)
    description = TextColumn('{task.description}', markup=False)
    count = DownloadColumn(binary_units=True) if is_bytes else MofNCompleteColumn()
    columns = (description, count, BarColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, disable=quiet or not console.is_terminal) as bar:
        task = bar.add_task(label, total=total)
        yield lambda count=1: bar.advance(task, count)


class Table(rich.table.Table):
    """A table without rules; every row is one line, even if a name in it contains newlines.

    No cell is truncated on a console with soft wrap, however wide the row is.

    Args:
      headings: Headings of the columns.
      left: Number of left-aligned columns, before right-aligned ones; None for all.
      options: Options of each column.
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
            options = options.update(max_width=_MAX_WIDTH)
        return super().__rich_console__(console, options)

    def add_column(self, header: RenderableType = '', *rest: Any, **options: Any) -> None:
        super().add_column(_flat(header), *rest, **options)

    def add_row(self, *cells: RenderableType | None, **options: Any) -> None:
        super().add_row(*map(_flat, cells), **options)


def _flat(cell: Any) -> Any:
    return one_line(cell) if isinstance(cell, str) else cell


class OutputError(UserError):
    """Standard output cannot be written, for example to a full disk."""


class ReaderLeft(OutputError):
    """Reader of standard output has exited, like `head` after some lines."""

    exit_code = EXIT_FAILED


@contextlib.contextmanager
def escape_output() -> Iterator[None]:
    """Escape all output in this context by `visible`.

    Secrets are removed from errors and logs, which may quote libraries. A failed write to standard
    output raises `OutputError`; to standard error, it is ignored.
    """
    streams = sys.stdout, sys.stderr
    sys.stdout = _Stream(_Stream(sys.stdout, failure='report'), visible)
    sys.stderr = _Stream(_Stream(sys.stderr, failure='drop'), _visible_without_secrets)
    try:
        yield
    finally:
        sys.stdout, sys.stderr = streams


@contextlib.contextmanager
def drop_lost_output() -> Iterator[None]:
    """Continue without output in this context when it can no longer be written.

    Output is dropped if the reader of a pipe exits (`| head`), a terminal is closed, or the disk of
    redirected output is full: the run's numbers are in its folder, and other processes wait for it.
    """
    original = sys.stdout, sys.stderr
    sys.stdout, sys.stderr = (_Stream(s, failure='drop') for s in original)
    try:
        yield
    finally:
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        sys.stdout, sys.stderr = original


def prepare() -> None:
    """Make the standard streams of this process usable, however it was started.

    Closed streams (`>&-`) are connected to the null device: otherwise the next opened file would
    get their number, and with it the output of libraries. Characters that the locale lacks are
    escaped, and so are control characters in a traceback. Warnings of the log are printed without
    the level and the module's name, which Orbax would put before them.
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
    if logging.lastResort and not logging.getLogger().handlers:
        logging.getLogger().addHandler(logging.lastResort)


def _print_traceback(*error: Any) -> None:
    text = without_secrets(''.join(traceback.format_exception(*error)))
    print(visible(text), end='', file=sys.stderr)


class _Stream:
    """A text stream that writes through another one.

    Args:
      stream: Output stream.
      edit: Applied to every text, for example `visible`.
      failure: None to raise what a failed write raises, 'drop' to drop all further output instead,
        'report' to raise `OutputError`.
    """

    def __init__(
        self, stream: Any, edit: Callable[[str], str] | None = None, failure: str | None = None
    ):
        self._stream, self._edit, self._failure = stream, edit, failure

    @property
    def exact(self) -> Any:
        """Same stream without edits, for writers that escape names themselves."""
        inner = getattr(self._stream, 'exact', self._stream)
        return inner if self._failure is None else _Stream(inner, failure=self._failure)

    def write(self, text: str) -> int:
        self._guard(self._stream.write, self._edit(text) if self._edit else text)
        return len(text)

    def flush(self) -> None:
        self._guard(self._stream.flush)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def _guard(self, act: Callable, *args: str) -> None:
        try:
            act(*args)
        except (OSError, OutputError) as error:
            if self._failure is None:
                raise
            # Drop what is still buffered, and what C++ writes.
            null = os.open(os.devnull, os.O_WRONLY)
            os.dup2(null, self._stream.fileno())
            os.close(null)
            if self._failure == 'drop':
                return
            if isinstance(error, BrokenPipeError):
                raise ReaderLeft('standard output has no reader') from error
            reason = getattr(error, 'strerror', None) or str(error)
            raise OutputError(f'standard output cannot be written: {reason}') from error


def _visible_without_secrets(text: str) -> str:
    return visible(without_secrets(text))
