"""An iterator that says where it hangs."""

from __future__ import annotations

import queue
import sys
import threading
import traceback
from collections.abc import Iterator
from typing import TypeVar

T = TypeVar('T')
_END = object()


class Stalled(Exception):  # noqa: N818 - the field's word
    """The data loader has yielded nothing for too long; the message has all stacks.

    The thread that hangs cannot be ended: leave the process by `os._exit`.
    """


def watch(iterator: Iterator[T], timeout_s: float) -> Iterator[T]:
    """Yields what `iterator` yields, which runs in a thread of its own.

    Raises:
      Stalled: if the next item takes longer than `timeout_s` seconds.
    """
    ready: queue.Queue = queue.Queue(maxsize=1)
    closed = threading.Event()
    reader = threading.Thread(
        target=_pump, args=(iterator, ready, closed), name='data-reader', daemon=True
    )
    reader.start()
    try:
        while (got := _get(ready, timeout_s))[0] is not _END:
            yield got[0]
        if got[1] is not None:
            raise got[1]
    finally:
        closed.set()
        while not ready.empty():  # lets a reader that waits for room see that it is closed
            ready.get_nowait()


def _pump(iterator: Iterator, ready: queue.Queue, closed: threading.Event) -> None:
    try:
        for item in iterator:
            ready.put((item, None))
            if closed.is_set():
                return
        ready.put((_END, None))
    except BaseException as error:
        ready.put((_END, error))


def _get(ready: queue.Queue, timeout_s: float) -> tuple:
    try:
        return ready.get(timeout=timeout_s)
    except queue.Empty:
        raise Stalled(f'no batch in {timeout_s:g} s; every thread:\n{_stacks()}') from None


def _stacks() -> str:
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    return '\n'.join(
        f'-- {names.get(ident, ident)}\n{"".join(traceback.format_stack(frame))}'
        for ident, frame in sys._current_frames().items()
    )
