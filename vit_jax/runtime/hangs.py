"""Waits that are given up, and the diagnosis of threads that hang."""

from __future__ import annotations

import contextlib
import sys
import threading
import traceback
from collections.abc import Iterator
from typing import Protocol


class Stalled(Exception):
    """The data loader has yielded nothing for too long; the message contains all stacks.

    The hanging thread cannot be ended: leave the process by `os._exit`.
    """


class Interrupted(Exception):
    """A wait or an evaluation was given up because a stop is requested; it has no result."""


class Stopping(Protocol):
    """Whether a stop is requested; see `vit_jax.runtime.preemption.Preemption.reached`."""

    def __call__(self, *, waiting: bool = False) -> bool: ...


def never(*, waiting: bool = False) -> bool:
    """Return False: no stop is requested."""
    return False


_abandoned = False


def abandon() -> None:
    """Note that a thread is left behind that may hang, so that no exit may wait for threads."""
    global _abandoned
    _abandoned = True


def abandoned() -> bool:
    """Whether a thread was left behind that may hang."""
    return _abandoned


_reads = 0
_changed = threading.Condition()


@contextlib.contextmanager
def reading() -> Iterator[None]:
    """Count what is inside as a read of data, which may hang."""
    global _reads
    with _changed:
        _reads += 1
    try:
        yield
    finally:
        with _changed:
            _reads -= 1
            _changed.notify_all()


def reads_end(seconds: float) -> bool:
    """Whether all reads of data end within some seconds."""
    with _changed:
        return _changed.wait_for(lambda: _reads == 0, seconds)


def stacks() -> str:
    """The stack traces of all threads of this process."""
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    return '\n'.join(
        f'-- {names.get(ident, ident)}\n{"".join(traceback.format_stack(frame))}'
        for ident, frame in sys._current_frames().items()
    )
