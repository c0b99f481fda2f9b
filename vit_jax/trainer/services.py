"""Services of `config.writers`, which get later what they missed while they were down."""

from __future__ import annotations

import collections
import functools
import time
from collections.abc import Callable, Mapping

from vit_jax.config import objects
from vit_jax.errors import UserError
from vit_jax.writers import base

FIRST_PAUSE, LONGEST_PAUSE = 60.0, 3600.0  # seconds between two attempts; each doubles the last
MOST_MISSED = 10_000  # lines of metrics that are kept for a service


class Service:
    """A writer of a run that may be away for a while, when the run starts or later.

    Args:
      name: Name of the writer.
      run: The run at its start.
      say: Prints a line for the user.

    Attributes:
      writer: None until the service has answered for the first time.
      failed: Whether the writer is left out for good.

    Raises:
      UserError: if the writer does not start for another reason than a silent service.
    """

    def __init__(self, name: str, run: base.RunStart, say: Callable[[str], None]):
        self.name, self.failed = name, False
        self.writer: base.Writer | None = None
        self._run, self._say, self._kind = run, say, objects.writer_class(name)
        self._missed: collections.deque[tuple[int, Mapping[str, float]]] = collections.deque(
            maxlen=MOST_MISSED
        )
        self._away, self._pause, self._next = False, FIRST_PAUSE, 0.0
        try:
            self.writer = self._kind(run)
        except Exception as error:
            if self._kind.may_pass(error):
                self._leave(error)
            elif isinstance(error, UserError | OSError):
                raise
            else:
                raise UserError(
                    f'config.writers: {name!r} does not start: {in_a_line(error)}'
                ) from error

    def scalars(self, step: int, values: Mapping[str, float]) -> None:
        """Send {name: number} of a step, after what the service has missed."""
        self._missed.append((step, values))
        if not self._away or time.monotonic() >= self._next:
            self._try(self._send)

    def show(self, call: Callable[[base.Writer], None]) -> None:
        """Send a picture or table; a service that is away never gets it."""
        if not self._away and self.writer is not None:
            self._try(functools.partial(call, self.writer))

    def close(self) -> None:
        """Send what the service has missed, and close the writer."""
        if self._away:
            self._try(self._send)
        if self._missed:
            self._say(f'writer {self.name!r}: {len(self._missed)} lines of metrics were not sent')
        if self.writer is not None:
            try:
                self.writer.close()
            except Exception as error:
                self._say(f'writer {self.name!r} could not be closed: {in_a_line(error)}')

    def _send(self) -> None:
        if self._away:
            self._kind.require_answer()
        if self.writer is None:
            self.writer = self._kind(self._run)
        while self._missed:
            self.writer.scalars(*self._missed[0])
            self._missed.popleft()

    def _try(self, act: Callable[[], None]) -> None:
        """Act; a failure does not end the run, unless it is of a disk.

        Raises:
          OSError: if a file cannot be written.
        """
        try:
            act()
        except Exception as error:
            if self._kind.may_pass(error):
                self._leave(error)
            elif isinstance(error, OSError):
                raise
            else:
                self.failed = True
                self._say(f'writer {self.name!r} is left out from now on: {in_a_line(error)}')
        else:
            if self._away:
                self._say(f'writer {self.name!r} answers again')
            self._away, self._pause = False, FIRST_PAUSE

    def _leave(self, error: Exception) -> None:
        if not self._away:
            self._say(
                f'writer {self.name!r} does not answer ({in_a_line(error)}): the run continues '
                'without it, and tries it again from time to time'
            )
        self._away, self._next = True, time.monotonic() + self._pause
        self._pause = min(2 * self._pause, LONGEST_PAUSE)


def in_a_line(error: Exception) -> str:
    """Return the type and message of an error, without line breaks."""
    return f'{type(error).__name__}: {" ".join(str(error).split())}'
