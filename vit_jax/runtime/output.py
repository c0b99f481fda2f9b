"""Standard output and error that nobody may be reading any more."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator
from typing import Any, TextIO


@contextlib.contextmanager
def unheard() -> Iterator[None]:
    """Let what runs inside go on where its words are lost.

    The reader of a pipe ends (`| head`), a terminal is closed, the disk of a redirected output is
    full: from then on the words go nowhere. A run keeps its numbers in its folder, and the other
    processes of its job wait for it.
    """
    before = sys.stdout, sys.stderr
    sys.stdout, sys.stderr = _Unheard(sys.stdout), _Unheard(sys.stderr)
    try:
        yield
    finally:
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        sys.stdout, sys.stderr = before


class _Unheard:
    """A stream whose errors are swallowed."""

    def __init__(self, stream: TextIO):
        self._stream = stream

    def write(self, text: str) -> int:
        with self._swallowed():
            self._stream.write(text)
        return len(text)

    def flush(self) -> None:
        with self._swallowed():
            self._stream.flush()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    @contextlib.contextmanager
    def _swallowed(self) -> Iterator[None]:
        try:
            yield
        except OSError:
            # What is still buffered, and what C++ writes, goes to the same place.
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, self._stream.fileno())
            os.close(nowhere)
