"""Batches made ahead of time, in threads and worker processes of Grain."""

from __future__ import annotations

import dataclasses
import multiprocessing
import os
import queue
import signal
import threading
import weakref
from collections.abc import Callable, Iterator
from typing import Any, Generic, TypeVar

from vit_jax.errors import UserError
from vit_jax.runtime.hangs import Stalled, stacks

T = TypeVar('T')
Ready = queue.Queue[tuple[Any, BaseException | None]]
_END = object()
STALL_SECONDS = 1800.0
CLOSE_SECONDS = 10.0  # what worker processes may take to end


@dataclasses.dataclass(frozen=True)
class Loading:
    """How batches are made ahead of time; nothing of it shows in the batches.

    Attributes:
      workers: reading processes; 0 reads in threads of this process.
      threads: batches made at the same time, by default one a CPU core and at most 16; as many are
        held ready. 0 reads only when asked.
      stall_seconds: raises `Stalled` if a batch takes longer; 0 never does.

    Raises:
      UserError: if a number is negative.
    """

    workers: int = 0
    threads: int | None = None
    stall_seconds: float = STALL_SECONDS

    def __post_init__(self) -> None:
        for name in ('workers', 'threads', 'stall_seconds'):
            if (value := getattr(self, name)) is not None and value < 0:
                raise UserError(f'{name}={value}: must be 0 or more')


def read_ahead(make: Callable[[int], T], start: int, stop: int, loading: Loading) -> Iterator[T]:
    """Yields make(start), ..., make(stop - 1), several of them being made at a time.

    Args:
      make: a batch by its number; for worker processes it has to pickle.
      start, stop: the first number, and that after the last.
      loading: how far ahead, and by whom.
    """
    import grain
    from absl import flags

    threads = min(16, os.cpu_count() or 1) if loading.threads is None else loading.threads
    options = grain.ReadOptions(num_threads=threads, prefetch_buffer_size=threads)
    batches = grain.MapDataset.range(start, stop).map(make).to_iter_dataset(options)
    if loading.workers:
        if not flags.FLAGS.is_parsed():  # Grain hands absl's flags on to its workers
            flags.FLAGS.mark_as_parsed()
        processes = grain.MultiprocessingOptions(num_workers=loading.workers)
        batches = batches.mp_prefetch(processes, worker_init_fn=_live_with_parent)
    seconds = loading.stall_seconds
    return Watched(iter(batches), seconds) if seconds else iter(batches)


def _live_with_parent(worker: int, workers: int) -> None:
    """In a worker process: ends when the training process does, and not before.

    A terminal and Slurm send their signals to every process of a job, but the training
    process still needs data to finish its step. Killed, it could not end its workers.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    threading.Thread(target=_exit_after_parent, daemon=True).start()


def _exit_after_parent() -> None:
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)


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
