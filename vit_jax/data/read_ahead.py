"""Batches made ahead of time, in threads and worker processes of Grain."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
from collections.abc import Callable, Iterator
from typing import TypeVar

from vit_jax.data.watchdog import Watched
from vit_jax.errors import UserError

T = TypeVar('T')


def read_ahead(
    make: Callable[[int], T],
    start: int,
    stop: int,
    workers: int,
    threads: int | None,
    stall_seconds: float,
) -> Iterator[T]:
    """Yields make(start), ..., make(stop - 1), several of them being made at a time.

    Args:
      make: a batch by its number; for worker processes it has to pickle.
      start, stop: the first number, and that after the last.
      workers, threads, stall_seconds: as of `pipeline.train_batches`.

    Raises:
      UserError: if `workers` or `threads` is negative.
    """
    import grain
    from absl import flags

    if threads is None:
        threads = min(16, os.cpu_count() or 1)
    for name, value in {'workers': workers, 'threads': threads}.items():
        if value < 0:
            raise UserError(f'{name}={value}: must be 0 or more')
    options = grain.ReadOptions(num_threads=threads, prefetch_buffer_size=threads)
    batches = grain.MapDataset.range(start, stop).map(make).to_iter_dataset(options)
    if workers:
        if not flags.FLAGS.is_parsed():  # Grain hands absl's flags on to its workers
            flags.FLAGS.mark_as_parsed()
        processes = grain.MultiprocessingOptions(num_workers=workers)
        batches = batches.mp_prefetch(processes, worker_init_fn=_live_with_parent)
    return Watched(iter(batches), stall_seconds) if stall_seconds else iter(batches)


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
