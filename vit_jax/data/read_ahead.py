"""Batches made ahead of time, in threads and worker processes of Grain."""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import math
import multiprocessing
import os
import queue
import re
import signal
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from multiprocessing import resource_tracker
from typing import Any, Generic, TypeVar

from vit_jax.data.splits import Subset
from vit_jax.errors import EXIT_FAILED, ExitByUserCode, UserError
from vit_jax.runtime import environment, watchdog
from vit_jax.runtime.watchdog import Interrupted, Stalled, Stopping, no_stop, stacks

T = TypeVar('T')
Ready = queue.Queue[tuple[Any, BaseException | None]]
_END = object()
STALL_SECONDS = 1800.0
CORES_A_WORKER = 4  # a thread holds Python's lock for up to 30 % of an example's time
MANY = 100_000
_NO_ROOM = (
    'data.workers: /dev/shm is too small for batches: enlarge it (docker run --shm-size=8g), or '
    'set workers to 0'
)
CLOSE_SECONDS = 10.0  # time limit for worker processes to end
_POLL_SECONDS = 0.2  # between two checks for a requested stop


@dataclasses.dataclass(frozen=True)
class Loading:
    """Options of making batches ahead of time; they do not change the batches.

    Attributes:
      workers: reading processes; 0 reads in threads of this process. By default 0, or one for every
        four CPU cores if there are more and the data are of at least `MANY` examples: threads of
        one process wait for each other, and processes take seconds to start.
      threads: batches made at the same time, in each process; as many are held ready. By default
        one a CPU core of this process's share, at most 16. 0 reads on demand only.
      stall_seconds: raises `Stalled` if a batch takes longer; 0 for no limit.

    Raises:
      UserError: if a number is negative.
    """

    workers: int | None = None
    threads: int | None = None
    stall_seconds: float = STALL_SECONDS

    def resolved(self, examples: int, cached: bool = False) -> Loading:
        """Choose the numbers that are not given, by the CPU cores that this process may use.

        Args:
          examples: number of examples to read.
          cached: whether they are kept in memory, which processes do not share.
        """
        found, workers, threads = environment.available_cores(), self.workers, self.threads
        if workers is None:
            many = found > CORES_A_WORKER and examples >= MANY and not cached
            workers = -(-found // CORES_A_WORKER) if many else 0
        if threads is None:
            threads = min(16, max(1, found // max(1, workers)))
        return dataclasses.replace(self, workers=workers, threads=threads)

    def __str__(self) -> str:
        threads = f'{self.threads} thread{"s" * (self.threads != 1)}'
        return f'{self.workers} processes of {threads}' if self.workers else threads

    def __post_init__(self) -> None:
        for name in ('workers', 'threads', 'stall_seconds'):
            if (value := getattr(self, name)) is not None and value < 0:
                raise UserError(f'{name}={value}: must be 0 or more')


def read_ahead(
    make: Callable[[int], T],
    start: int,
    stop: int,
    loading: Loading,
    source: Subset,
    stopping: Stopping = no_stop,
) -> Watched[T]:
    """Yield make(start), ..., make(stop - 1), making several at a time.

    Args:
      make: makes a batch by its number; for worker processes it must be picklable.
      start, stop: the first number, and the one after the last.
      loading: how far ahead, and in which threads or processes; `resolved`.
      source: read by `make`; counts the broken records that its copies in worker processes find.
      stopping: polled while no batch is ready; see `Watched`.
    """
    import grain
    from absl import flags

    threads = loading.threads
    options = grain.ReadOptions(num_threads=threads, prefetch_buffer_size=threads)
    maker: Any = _Staying(make)
    if loading.workers:
        maker = _Reporting(maker, source)
    batches = grain.MapDataset.range(start, stop).map(maker).to_iter_dataset(options)
    if loading.workers:
        _start_tracker()
        if not flags.FLAGS.is_parsed():  # Grain hands absl's flags on to its workers
            flags.FLAGS.mark_as_parsed()
        processes = grain.MultiprocessingOptions(num_workers=loading.workers)
        batches = batches.mp_prefetch(processes, worker_init_fn=_live_with_parent)
    made: Iterator = iter(batches)
    if loading.workers:
        made = _Counted(made, source)
    limit = loading.stall_seconds or math.inf
    return Watched(_block_signals(made) if loading.workers else made, limit, stopping)


@dataclasses.dataclass(frozen=True)
class _Staying(Generic[T]):
    """Makes a batch; an exception that would end a thread, process or loop silently is an error."""

    make: Callable[[int], T]

    def __call__(self, number: int) -> T:
        try:
            with watchdog.reading():
                return self.make(number)
        except StopIteration as error:
            raise RuntimeError(f'batch {number}: the data raised StopIteration') from error
        except SystemExit as error:
            raise ExitByUserCode.from_exit(error) from error


@dataclasses.dataclass(frozen=True)
class _Reporting(Generic[T]):
    """Makes a batch in a worker process, and returns it with the broken records that were found."""

    make: Callable[[int], T]
    source: Subset

    def __call__(self, number: int) -> tuple[T, dict[int, str]]:
        return self.make(number), self.source.pop_broken()


class _Counted(Iterator[T], Generic[T]):
    """The batches of `_Reporting`; counts the broken records of worker processes."""

    def __init__(self, iterator: Iterator[tuple[T, dict[int, str]]], source: Subset):
        self._iterator, self._source = iterator, source

    def __next__(self) -> T:
        with _explained():
            batch, found = next(self._iterator)
        self._source.record_broken(found)
        return batch

    def close(self) -> None:
        if hasattr(self._iterator, 'close'):
            self._iterator.close()


class WorkerDied(UserError):
    """A reading process was killed, through no known fault of the run."""

    exit_code = EXIT_FAILED


@contextlib.contextmanager
def _explained() -> Iterator[None]:
    """Turn failures of the processes themselves, not of the data, into one line.

    Raises:
      UserError: if shared memory is too small for semaphores, or for a batch, whose writer dies of
        SIGBUS.
      WorkerDied: if a process was killed.
    """
    try:
        yield
    except OSError as error:
        if error.errno != errno.ENOSPC:
            raise
        raise UserError(_NO_ROOM) from error
    except RuntimeError as error:
        if (
            died := re.search(r'terminated unexpectedly with exit code -(\d+)', str(error))
        ) is None:
            raise
        name = signal.Signals(int(died[1])).name
        if name == 'SIGBUS':
            raise UserError(_NO_ROOM) from error
        raise WorkerDied(
            f'a reading process of data.workers was ended by {name}, perhaps for lack of memory; '
            'the same command, started again, continues from the last checkpoint'
        ) from error


def _block_signals(iterator: Any) -> Iterator[Any]:
    """Yield the same items, and start their processes with Ctrl-C and SIGTERM blocked.

    Call it in a thread of its own, whose signals it blocks. `_live_with_parent` runs only seconds
    later, after a worker's imports; a worker that a signal ends earlier would be waited for.
    """
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT, signal.SIGTERM, signal.SIGHUP})
    try:
        yield from iterator
    finally:
        iterator.close()


def _start_tracker() -> None:
    """Start the process that removes shared memory if this one is killed or exits at once.

    Its warning is silenced, which would follow the error message. It is started here because its
    start unblocks signals.
    """
    before = sys.warnoptions[:]
    sys.warnoptions.append('ignore:resource_tracker:UserWarning')
    try:
        resource_tracker.ensure_running()
    finally:
        sys.warnoptions[:] = before


def _live_with_parent(worker: int, workers: int) -> None:
    """Make a worker process end when the training process does, and not before.

    A terminal and Slurm send their signals to every process of a job, but the training process
    still needs data to finish its step. If it is killed, it cannot end its workers itself.
    """
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    threading.Thread(target=_exit_after_parent, daemon=True).start()


def _exit_after_parent() -> None:
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)


class Watched(Iterator[T], Generic[T]):
    """Run another iterator in a thread of its own, and yield its items.

    `close()`, or dropping the last reference, ends the thread and closes the iterator.
    `next` raises `Stalled` if an item takes longer than `timeout_s` seconds, and `Interrupted` if
    `stopping(waiting=True)` requests a stop before an item is ready. Both leave the thread behind,
    as it may hang.
    """

    def __init__(self, iterator: Iterator[T], timeout_s: float, stopping: Stopping = no_stop):
        self._timeout_s, self._stopping = timeout_s, stopping
        self._ready: Ready = queue.Queue(maxsize=1)
        closed = threading.Event()
        # The thread has no reference to `self`, which would keep it alive.
        reader = threading.Thread(
            target=_read, args=(iterator, self._ready, closed), name='data-reader', daemon=True
        )
        reader.start()
        self.close = weakref.finalize(self, _stop, self._ready, closed, reader)

    def __next__(self) -> T:
        item, error = self._wait()
        if item is not _END:
            return item
        self._ready.put((_END, None))  # further calls get the end, too
        raise StopIteration if error is None else error

    def _wait(self) -> tuple[Any, BaseException | None]:
        deadline = time.monotonic() + self._timeout_s
        while True:
            left = deadline - time.monotonic()
            with contextlib.suppress(queue.Empty):
                return self._ready.get(timeout=max(0.0, min(left, _POLL_SECONDS)))
            if self._stopping(waiting=True):
                self._abandon()
                raise Interrupted('a stop was requested, and no batch was ready')
            if left <= _POLL_SECONDS:
                self._abandon()
                raise Stalled(f'no batch in {self._timeout_s:g} s; every thread:\n{stacks()}')

    def _abandon(self) -> None:
        self.close.detach()
        watchdog.abandon()


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
    while not ready.empty():  # makes room for a reader that is blocked
        ready.get_nowait()
    reader.join(_POLL_SECONDS if watchdog.abandoned() else CLOSE_SECONDS)
