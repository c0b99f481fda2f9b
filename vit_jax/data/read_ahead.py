"""Making batches ahead of time, in Grain's threads and worker processes."""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import math
import multiprocessing
import os
import pickle
import queue
import re
import signal
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from multiprocessing import resource_tracker, spawn
from typing import Any, Generic, TypeVar

from vit_jax.data.splits import Subset
from vit_jax.errors import EXIT_FAILED, ExitByUserCode, UserError
from vit_jax.runtime import environment, watchdog
from vit_jax.runtime.watchdog import Interrupted, Stalled, Stopping, no_stop, stacks

T = TypeVar('T')
Ready = queue.Queue[tuple[Any, BaseException | None]]
_END = object()
STALL_SECONDS = 1800.0
MIN_CORES = 4  # with fewer, worker processes compete with the training loop
MAX_THREADS = 8  # per process: more wait for Python's lock, which the loop also needs
CHEAP = 1e-4  # CPU seconds per example, below which threads are fast enough
WORTHWHILE = 10.0  # CPU seconds for all examples, above which starting processes pays off
WORKER_MEMORY = 200e6  # bytes per process, plus its batches and its copy of the data's listing
HELD, SHARED = 6, 3  # batches per process in memory, and those among them in shared memory
HELD_BY_LOOP = 4
MEMORY_SHARE = 0.5  # share of the available memory that worker processes may use
_NO_ROOM = (
    'data.workers: /dev/shm is too small for batches; enlarge it (docker run --shm-size=8g), or '
    'set workers to 0'
)
_LITTLE_MEMORY = 'not enough memory for more processes'
_LITTLE_SHARED = '/dev/shm is too small for more processes: enlarge it (docker run --shm-size=8g)'
CLOSE_SECONDS = 10.0  # time limit for worker processes to end
_GRAIN_PREFIX = 'grain-process-prefetch'  # prefix of the names of Grain's processes
_POLL_SECONDS = 0.2  # between two checks for a requested stop


@dataclasses.dataclass(frozen=True)
class Work:
    """Cost of making the batches of a run.

    Attributes:
      seconds: CPU seconds per example.
      examples: Number of examples to make.
      batch_bytes: Bytes per batch.
      listing_bytes: Bytes of the data's listing, which each process copies; None if it cannot be
        pickled.
    """

    seconds: float
    examples: float
    batch_bytes: int
    listing_bytes: int | None

    def processes(self, requested: int) -> tuple[int, str]:
        """Return how many processes to start, 0 for threads, and why fewer than wanted."""
        if self.seconds < CHEAP or self.seconds * self.examples < WORTHWHILE:
            return 0, ''
        if self.listing_bytes is None:
            return 0, 'processes cannot make the batches because the data cannot be pickled'
        process_bytes = HELD * self.batch_bytes + WORKER_MEMORY + 3 * self.listing_bytes
        limits = [(requested, '')]
        if (memory := environment.available_memory()) is not None:
            limits.append((self._fit(memory * MEMORY_SHARE, process_bytes), _LITTLE_MEMORY))
        if (shared := environment.shared_memory()) is not None:
            limits.append((self._fit(shared, SHARED * self.batch_bytes), _LITTLE_SHARED))
        return min(limits)

    def _fit(self, free: float, process_bytes: float) -> int:
        """Return how many processes fit; 0 instead of 1, which gains nothing over threads."""
        count = int(max(0.0, free - HELD_BY_LOOP * self.batch_bytes) // max(process_bytes, 1))
        return count if count > 1 else 0


@dataclasses.dataclass(frozen=True)
class Loading:
    """Options for making batches ahead of time; they do not change the batches.

    Attributes:
      workers: Worker processes; 0 reads in threads of this process, which share Python's lock with
        the loop. By default 0, or one per CPU core except one if starting them pays off, see
        `resolve`.
      threads: Batches made at the same time in each process, which also holds as many ready. By
        default one per CPU core of the process's share, at most `MAX_THREADS`. 0 reads on demand.
      stall_seconds: Seconds per batch after which `Stalled` is raised; 0 for no limit.
      note: Reason for fewer processes than wanted.

    Raises:
      UserError: if a number is negative.
    """

    workers: int | None = None
    threads: int | None = None
    stall_seconds: float = STALL_SECONDS
    note: str = ''

    def resolve(self, measure: Callable[[], Work] | None = None) -> Loading:
        """Fill in missing numbers by the CPU cores available to this process.

        Args:
          measure: Function that estimates the work; None if processes cannot make the batches.
        """
        cores, note = environment.available_cores(), ''
        workers, threads = self.workers, self.threads
        if workers is None:
            workers, requested = 0, max(1, (cores - 1) // (threads or 1))
            # Daemons, such as workers of `multiprocessing.Pool`, may not have children.
            is_daemon = multiprocessing.current_process().daemon
            if measure is not None and cores >= MIN_CORES and not is_daemon:
                workers, note = measure().processes(requested)
            threads = 1 if workers and threads is None else threads
        if threads is None:
            threads = min(MAX_THREADS, max(1, cores // max(1, workers)))
        return dataclasses.replace(self, workers=workers, threads=threads, note=note)

    @property
    def round(self) -> int:
        """Batches made at the same time, after `resolve`."""
        return max(1, self.workers or 1) * max(1, self.threads or 1)

    @property
    def held(self) -> int:
        """Most batches that wait to be taken, after `resolve`."""
        return self.round + HELD * (self.workers or 1)

    def __str__(self) -> str:
        threads = f'{self.threads} thread{"s" * (self.threads != 1)}'
        description = threads
        if self.workers:
            description = f'{self.workers} process{"es" * (self.workers != 1)} of {threads}'
        return f'{description} ({self.note})' if self.note else description

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
      make: Function that makes a batch by its number; picklable for worker processes.
      start, stop: First number, and the number after the last.
      loading: Options, after `Loading.resolve`.
      source: Source that `make` reads; counts the broken records found by worker processes.
      stopping: Function polled while no batch is ready; see `Watched`.
    """
    import grain
    from absl import flags

    threads = loading.threads
    options = grain.ReadOptions(num_threads=threads, prefetch_buffer_size=threads)
    maker: Any = _KeepThreadAlive(make)
    if loading.workers:
        maker = _PickleOnce(_ReturnBroken(maker, source))
    batches = grain.MapDataset.range(start, stop).map(maker).to_iter_dataset(options)
    if loading.workers:
        _start_tracker()
        spawn.get_preparation_data = _prepare_without_main
        if not flags.FLAGS.is_parsed():  # Grain passes absl's flags to its workers
            flags.FLAGS.mark_as_parsed()
        processes = grain.MultiprocessingOptions(num_workers=loading.workers)
        batches = batches.mp_prefetch(processes, worker_init_fn=_outlive_signals)
    iterator: Iterator = iter(batches)
    if loading.workers:
        iterator = _CountBroken(iterator, source)
    limit = loading.stall_seconds or math.inf
    return Watched(_block_signals(iterator) if loading.workers else iterator, limit, stopping)


@dataclasses.dataclass(frozen=True)
class _KeepThreadAlive(Generic[T]):
    """Make a batch; turn StopIteration and SystemExit, which end a thread silently, into errors."""

    make: Callable[[int], T]

    def __call__(self, number: int) -> T:
        try:
            with watchdog.count_read():
                return self.make(number)
        except StopIteration as error:
            raise RuntimeError(f'batch {number}: the data raised StopIteration') from error
        except SystemExit as error:
            raise ExitByUserCode.from_exit(error) from error


@dataclasses.dataclass(frozen=True)
class _ReturnBroken(Generic[T]):
    """Make a batch in a worker process, and return it with newly found broken records."""

    make: Callable[[int], T]
    source: Subset

    def __call__(self, number: int) -> tuple[T, dict[int, str]]:
        return self.make(number), self.source.pop_broken()


class _PickleOnce(Generic[T]):
    """A function pickled only once for all processes: a million files take half a second.

    Raises:
      UserError: if the function cannot be pickled.
    """

    def __init__(self, function: Callable[[int], T]):
        import cloudpickle  # pickles code of the user's script by value

        self._function = function
        try:
            self._pickled = cloudpickle.dumps(function)
        except Exception as error:  # pickling raises any type
            raise UserError(
                f'data.workers: the data cannot be sent to another process ({error}); set workers '
                'to 0'
            ) from error

    def __call__(self, number: int) -> T:
        return self._function(number)

    def __reduce__(self) -> tuple[Callable[[bytes], Any], tuple[bytes]]:
        return pickle.loads, (self._pickled,)


class _CountBroken(Iterator[T], Generic[T]):
    """Batches of `_ReturnBroken`, whose broken records are counted."""

    def __init__(self, iterator: Iterator[tuple[T, dict[int, str]]], source: Subset):
        self._iterator, self._source = iterator, source

    def __next__(self) -> T:
        with _translate_failures():
            batch, broken = next(self._iterator)
        self._source.record_broken(broken)
        return batch

    def close(self) -> None:
        if hasattr(self._iterator, 'close'):
            self._iterator.close()


class WorkerDied(UserError):
    """A worker process was killed for no known fault of the run."""

    exit_code = EXIT_FAILED


@contextlib.contextmanager
def _translate_failures() -> Iterator[None]:
    """Translate failures of worker processes, not of the data, into one-line errors.

    Raises:
      UserError: if shared memory is too small for semaphores, or for a batch (then its writer dies
        of SIGBUS).
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
            match := re.search(r'terminated unexpectedly with exit code -(\d+)', str(error))
        ) is None:
            raise
        name = signal.Signals(int(match[1])).name
        if name == 'SIGBUS':
            raise UserError(_NO_ROOM) from error
        raise WorkerDied(
            f'a worker process (data.workers) was killed by {name}, perhaps for lack of memory; '
            'run the same command again to continue from the last checkpoint'
        ) from error


def _block_signals(iterator: Any) -> Iterator[Any]:
    """Yield the same items, but start their processes with Ctrl-C and SIGTERM blocked.

    Call it in a separate thread, whose signals it blocks. `_outlive_signals` runs only seconds
    later, after a worker's imports; a worker killed earlier would be waited for.
    """
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT, signal.SIGTERM, signal.SIGHUP})
    try:
        yield from iterator
    finally:
        iterator.close()


def _start_tracker() -> None:
    """Start the process that removes shared memory if this one is killed or exits immediately.

    Its warning would follow the error message, so it is silenced. It starts here because starting
    it unblocks signals.
    """
    before = sys.warnoptions[:]
    sys.warnoptions.append('ignore:resource_tracker:UserWarning')
    try:
        resource_tracker.ensure_running()
    finally:
        sys.warnoptions[:] = before


def _prepare_without_main(
    name: str, prepare: Callable = spawn.get_preparation_data
) -> dict[str, Any]:
    """Prepare a new process; keep Grain's processes from running the user's script.

    A script without `if __name__ == '__main__'` would repeat its work in every process. Its
    functions are pickled by value, so the processes do not need it.
    """
    data = prepare(name)
    if name.startswith(_GRAIN_PREFIX):
        for key in ('init_main_from_name', 'init_main_from_path'):
            data.pop(key, None)
    return data


def _outlive_signals(worker: int, workers: int) -> None:
    """Make a worker process end with the training process, and not before.

    A terminal and Slurm send signals to every process of a job, but the training process still
    needs data to finish its step. If it is killed, it cannot end its workers.
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
    """Run another iterator in a separate thread, and yield its items.

    `close()`, or dropping the last reference, ends the thread and closes the iterator.
    `next` raises `Stalled` if an item takes longer than `timeout_s` seconds, and `Interrupted` if
    `stopping(waiting=True)` requests a stop before an item is ready. Both abandon the thread
    because it may hang.
    """

    def __init__(self, iterator: Iterator[T], timeout_s: float, stopping: Stopping = no_stop):
        self._timeout_s, self._stopping = timeout_s, stopping
        self._ready: Ready = queue.Queue(maxsize=1)
        closed = threading.Event()
        # The thread holds no reference to `self`, which would keep `self` alive.
        reader = threading.Thread(
            target=_read, args=(iterator, self._ready, closed), name='data-reader', daemon=True
        )
        reader.start()
        self.close = weakref.finalize(self, _stop, self._ready, closed, reader)

    def __next__(self) -> T:
        item, error = self._wait()
        if item is not _END:
            return item
        self._ready.put((_END, None))  # further calls also end
        raise StopIteration if error is None else error

    def _wait(self) -> tuple[Any, BaseException | None]:
        deadline = time.monotonic() + self._timeout_s
        while True:
            seconds = deadline - time.monotonic()
            with contextlib.suppress(queue.Empty):
                return self._ready.get(timeout=max(0.0, min(seconds, _POLL_SECONDS)))
            if self._stopping(waiting=True):
                self._abandon()
                raise Interrupted('a stop was requested, and no batch was ready')
            if seconds <= _POLL_SECONDS:
                self._abandon()
                raise Stalled(f'no batch in {self._timeout_s:g} s; every thread:\n{stacks()}')

    def _abandon(self) -> None:
        self.close.detach()
        watchdog.abandon_thread()


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
    while not ready.empty():  # unblocks a waiting reader
        ready.get_nowait()
    reader.join(_POLL_SECONDS if watchdog.has_abandoned_thread() else CLOSE_SECONDS)
