"""An iterator that reads ahead, and says where it hangs."""

from __future__ import annotations

import queue
import threading
import weakref
from collections.abc import Iterator
from typing import Any, Generic, TypeVar

from vit_jax.stacks import stacks

T = TypeVar('T')
Ready = queue.Queue[tuple[Any, BaseException | None]]
_END = object()
CLOSE_SECONDS = 10.0  # what worker processes may take to end


class Stalled(Exception):
    """The data loader has yielded nothing for too long; the message has all stacks.

    The thread that hangs cannot be ended: leave the process by `os._exit`.
    """


class Watched(Iterator[T], Generic[T]):
    """Yields what another iterator yields, which runs in a thread of its own from now on.

    `close()`, or dropping the last reference, ends the thread and closes the iterator.
    `next` raises `Stalled` if an item takes longer than `timeout_s` seconds.
    """

    def __init__(self, iterator: Iterator[T], timeout_s: float):
        self._timeout_s = timeout_s
        self._ready: Ready = queue.Queue(maxsize=1)
        closed = threading.Event()
        # The thread has no reference to `self`, which would keep it alive.
        reader = threading.Thread(
            target=_read, args=(iterator, self._ready, closed), name='data-reader', daemon=True
        )
        reader.start()
        self.close = weakref.finalize(self, _stop, self._ready, closed, reader)

    def __next__(self) -> T:
        try:
            item, error = self._ready.get(timeout=self._timeout_s)
        except queue.Empty:
            self.close.detach()
            message = f'no batch in {self._timeout_s:g} s; every thread:\n{stacks()}'
            raise Stalled(message) from None
        if item is not _END:
            return item
        self._ready.put((_END, None))  # whoever asks once more gets the end
        raise StopIteration if error is None else error


def _read(iterator: Iterator, ready: Ready, closed: threading.Event) -> None:
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


def _stop(ready: Ready, closed: threading.Event, reader: threading.Thread) -> None:
    closed.set()
    while not ready.empty():  # makes room for a reader that waits for it
        ready.get_nowait()
    reader.join(CLOSE_SECONDS)
