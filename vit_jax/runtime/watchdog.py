"""Detect hanging steps and reads, so that a launcher can restart the job."""

from __future__ import annotations

import contextlib
import os
import sys
import threading
import time
import traceback
from collections.abc import Iterator
from typing import Protocol

from vit_jax.errors import EXIT_FAILED


class Watchdog:
    """End the process with all stacks if nothing is finished for `seconds`; a context manager.

    One hanging process keeps all others of the job waiting in a collective, forever and without
    an error. A wait inside XLA cannot be interrupted, so the process ends by `os._exit`, with
    code 1.

    Args:
      seconds: Time limit, longer than any step, compilation, evaluation or save; None for none.
    """

    def __init__(self, seconds: float | None):
        self._seconds = seconds
        self._last, self._done = time.monotonic(), 'nothing'
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch, name='step-watchdog', daemon=True)

    def __enter__(self) -> Watchdog:
        self.beat(self._done)
        if self._seconds is not None:
            self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()

    def beat(self, event: str) -> None:
        """Record that `event` was just finished."""
        self._last, self._done = time.monotonic(), event

    def _watch(self) -> None:
        assert self._seconds is not None
        while not self._stop.wait(max(0.0, self._last + self._seconds - time.monotonic())):
            if time.monotonic() - self._last >= self._seconds:
                self._end()

    def _end(self) -> None:
        import jax  # here, so that commands without numerics start at once

        print(
            f'error: process {jax.process_index()} of {jax.process_count()}: {self._done} was '
            f'finished, and nothing else in {self._seconds:g} s: it hangs, or waits for a process '
            'that does; the same command, started again on all processes, continues from the last '
            f'checkpoint. Every thread:\n{stacks()}',
            file=sys.stderr,
            flush=True,
        )
        os._exit(EXIT_FAILED)


class Stalled(Exception):
    """Data loader has yielded nothing for too long; the message contains all stacks.

    The hanging thread cannot be ended: leave the process by `os._exit`.
    """


class Interrupted(Exception):
    """A wait or evaluation was given up because a stop was requested."""


class Stopping(Protocol):
    """Function that returns whether a stop was requested; see `Preemption.should_stop`."""

    def __call__(self, *, waiting: bool = False) -> bool: ...


def no_stop(*, waiting: bool = False) -> bool:
    """Return False: no stop was requested."""
    return False


_abandoned = False


def abandon_thread() -> None:
    """Record that a thread may hang, so that the exit does not wait for threads."""
    global _abandoned
    _abandoned = True


def has_abandoned_thread() -> bool:
    """Return whether an abandoned thread may hang."""
    return _abandoned


_reads = 0
_changed = threading.Condition()


@contextlib.contextmanager
def count_read() -> Iterator[None]:
    """Count this context as a read of data, which may hang."""
    global _reads
    with _changed:
        _reads += 1
    try:
        yield
    finally:
        with _changed:
            _reads -= 1
            _changed.notify_all()


def wait_for_reads(seconds: float) -> bool:
    """Wait for all reads of data; return whether they end within `seconds`."""
    with _changed:
        return _changed.wait_for(lambda: _reads == 0, seconds)


def stacks() -> str:
    """Return the stack traces of all threads of this process."""
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    return '\n'.join(
        f'-- {names.get(ident, ident)}\n{"".join(traceback.format_stack(frame))}'
        for ident, frame in sys._current_frames().items()
    )
