"""An iterator that says where it hangs."""

from __future__ import annotations

import queue
import sys
import threading
import traceback
from collections.abc import Iterator
from typing import Any, TypeVar

T = TypeVar('T')
_END = object()
CLOSE_SECONDS = 10.0  # what worker processes may take to end


class Stalled(Exception):
    """The data loader has yielded nothing for too long; the message has all stacks.

    The thread that hangs cannot be ended: leave the process by `os._exit`.
    """


def watch(iterator: Iterator[T], timeout_s: float) -> Iterator[T]:
    """Yields what `iterator` yields, which runs in a thread of its own, one item ahead.

    Raises:
      Stalled: if the next item takes longer than `timeout_s` seconds.
    """
    ready: queue.Queue[tuple[Any, BaseException | None]] = queue.Queue(maxsize=1)
    closed = threading.Event()
    reader = threading.Thread(
        target=_pump, args=(iterator, ready, closed), name='data-reader', daemon=True
    )
    reader.start()
    patience = CLOSE_SECONDS
    try:
        while True:
            item, error = ready.get(timeout=timeout_s)
            if error is not None:
                raise error
            if item is _END:
                return
            yield item
    except queue.Empty:
        patience = 0
        raise Stalled(f'no batch in {timeout_s:g} s; every thread:\n{_stacks()}') from None
    finally:
        closed.set()
        _drain(ready)
        reader.join(patience)


def _pump(iterator: Iterator, ready: queue.Queue, closed: threading.Event) -> None:
    try:
        for item in iterator:
            ready.put((item, None))
            if closed.is_set():
                break
        else:
            ready.put((_END, None))
    except BaseException as error:
        ready.put((_END, error))
    if hasattr(iterator, 'close'):  # ends Grain's threads and worker processes
        iterator.close()


def _drain(ready: queue.Queue) -> None:
    # Makes room for a reader that waits for it, so that it sees that it is closed.
    while not ready.empty():
        ready.get_nowait()


def _stacks() -> str:
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    return '\n'.join(
        f'-- {names.get(ident, ident)}\n{"".join(traceback.format_stack(frame))}'
        for ident, frame in sys._current_frames().items()
    )
