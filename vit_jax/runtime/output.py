"""Standard output and error: control characters in names, and readers that have gone away."""

from __future__ import annotations

import contextlib
import os
import sys
import traceback
from collections.abc import Iterator
from typing import Any

from vit_jax.errors import EXIT_FAILED, UserError, visible, without_secrets


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
