"""Batches of examples, the same whatever reads them.

Example g of training is row g % batch_size of batch g // batch_size. It is example
shuffled(g % N) of epoch g // N, and its transforms draw from a generator keyed by
(seed, g). Sequences are in batches of like lengths instead, see `vit_jax.data.buckets`.
So batch k is a pure function of (seed, k): resuming is `start_step=k`, and any number of
processes, workers and threads sees the same examples in the same order.
Grain supplies what is left: reading ahead in threads and worker processes.
"""

from __future__ import annotations

import contextlib
import dataclasses
import multiprocessing
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from vit_jax.data import buckets, order
from vit_jax.data.buckets import Bucketed
from vit_jax.data.records import BrokenRecord, Record
from vit_jax.data.splits import Cached, Subset
from vit_jax.data.transforms import Transforms
from vit_jax.data.watchdog import Watched
from vit_jax.errors import UserError

Batch = dict[str, np.ndarray]
STALL_SECONDS = 1800.0


@dataclasses.dataclass(frozen=True)
class ArraySpec:
    """Shape and dtype of one example's array."""

    shape: tuple[int, ...]
    dtype: np.dtype


@dataclasses.dataclass(frozen=True)
class Epoch:
    """The batches of training data.

    Attributes:
      examples: of an epoch.
      batch_size: examples of a global batch, on average where there are buckets.
      rows: of each kind of batch; None stands for `batch_size`.
      shapes: of one example of each kind of batch, and how many of them a batch has on the
        average of all batches.
    """

    examples: int
    batch_size: float
    rows: tuple[int | None, ...]
    shapes: tuple[tuple[float, dict[str, ArraySpec]], ...]


def epoch(source: Subset | Bucketed, transforms: Transforms, batch_size: int) -> Epoch:
    """What an epoch of `train_batches` is made of."""
    if not isinstance(source, Bucketed):
        shapes = ((batch_size, element_spec(source, transforms)),)
        return Epoch(len(source), batch_size, (None,), shapes)
    plan = source.train_plan(batch_size)
    kinds = zip(plan.counts, plan.rows, plan.bounds, strict=True)
    return Epoch(
        plan.examples,
        plan.examples / plan.steps,
        plan.rows,
        tuple((n * rows / plan.steps, _sequences(source, bound)) for n, rows, bound in kinds),
    )


def train_batches(
    source: Subset | Bucketed,
    transforms: Transforms,
    *,
    batch_size: int,
    seed: int,
    start_step: int = 0,
    process_index: int = 0,
    process_count: int = 1,
    workers: int = 0,
    threads: int | None = None,
    cache: bool = False,
    stall_seconds: float = STALL_SECONDS,
) -> Iterator[Batch]:
    """Shuffled batches without end.

    A broken record is replaced by the next one that can be read.

    Args:
      source: what `open_source` returns, or that in buckets.
      transforms: applied to each example; to those in buckets they have been.
      batch_size: examples of a global batch, over all processes; of sequences in buckets
        their padded length counts.
      seed: of order and transforms, 0 or more.
      start_step: the first batch to yield.
      process_index: yields rows [p * b, (p + 1) * b) of each global batch, where
        b = batch_size / process_count.
      process_count: number of processes that share a global batch.
      workers: reading processes; 0 reads in threads of this process.
      threads: batches made at the same time, by default one a CPU core and at most 16;
        as many are held ready. 0 reads only when asked.
      cache: keeps decoded images in memory, so that each is decoded once.
      stall_seconds: raises `watchdog.Stalled` if a batch takes longer; 0 never does.

    Yields:
      {name: array [b, ...]}: `image` uint8 [b, H, W, C], `label` int32 [b]. Of sequences in
      buckets int32 [b, length of the bucket], filled up with 0, `index` int32 [b], the number
      in the source, and `mask` float32 [b], which is 0 in the rows that fill the last batch.

    Raises:
      UserError: if there are fewer examples than `batch_size`, if it does not divide
        among the processes, or if examples differ in shape.
    """
    if seed < 0:
        raise UserError(f'seed={seed}: must be 0 or more')
    if isinstance(source, Bucketed):
        plan = source.train_plan(batch_size)
        local = tuple(_local_rows(rows, process_index, process_count) for rows in plan.rows)
        make = buckets.Loader(source, plan, local, seed).train_batch
        return _read_ahead(make, start_step, sys.maxsize, workers, threads, stall_seconds)
    if batch_size > len(source):
        raise UserError(
            f'{source.title}: {len(source)} examples are fewer than batch_size={batch_size}; '
            'lower it or take a larger split'
        )
    rows = _local_rows(batch_size, process_index, process_count)
    spec = element_spec(source, transforms)
    loader = _Loader(_view(source, cache, workers), transforms, spec, batch_size, rows, seed)
    return _read_ahead(loader.train_batch, start_step, sys.maxsize, workers, threads, stall_seconds)


def eval_batches(
    source: Subset | Bucketed,
    transforms: Transforms,
    *,
    batch_size: int,
    process_index: int = 0,
    process_count: int = 1,
    workers: int = 0,
    threads: int | None = None,
    cache: bool = False,
    stall_seconds: float = STALL_SECONDS,
    multiple: int = 1,
) -> Iterator[Batch]:
    """Every example once, in the order of the source, or bucket after bucket.

    Arguments and errors are those of `train_batches`; of sequences in buckets, a batch has a
    multiple of `multiple` rows.

    Yields:
      ceil(N / batch_size) batches on every process, with a further `mask`, float32 [b]:
      1 for an example, 0 for the padding of the last batch and for broken records.
    """
    if isinstance(source, Bucketed):
        plan = source.eval_plan(batch_size, multiple)
        local = tuple(_local_rows(rows, process_index, process_count) for rows in plan.rows)
        make = buckets.Loader(source, plan, local).eval_batch
        return _read_ahead(make, 0, plan.steps, workers, threads, stall_seconds)
    rows = _local_rows(batch_size, process_index, process_count)
    spec = element_spec(source, transforms)
    loader = _Loader(_view(source, cache, workers), transforms, spec, batch_size, rows)
    stop = -(-len(source) // batch_size)
    return _read_ahead(loader.eval_batch, 0, stop, workers, threads, stall_seconds)


def element_spec(source: Subset | Bucketed, transforms: Transforms) -> dict[str, ArraySpec]:
    """Shapes and dtypes of one transformed example: integers are int32, floats float32.

    Sequences in buckets have the length of the longest bucket.
    """
    if isinstance(source, Bucketed):
        return _sequences(source, source.bounds[-1])
    index, record = _first_readable(source, 0)
    try:
        record = transforms(record, example_rng(0, 0))
    except UserError as error:
        raise _named(error, source, index) from error
    if texts := [key for key, value in record.items() if isinstance(value, str)]:
        raise UserError(
            f'{source.title}: {texts[0]!r} is text; make ids of it with config.data.vocab and '
            "transforms='tokenize', and batches with config.data.buckets=(16, 32, 64)"
        )
    return {key: _array_spec(value) for key, value in record.items()}


def _sequences(source: Bucketed, length: int) -> dict[str, ArraySpec]:
    return {name: ArraySpec((length,), np.dtype(np.int32)) for name in source.names}


_local = threading.local()


def example_rng(seed: int, example: int) -> np.random.Generator:
    """The generator of one example, valid until the thread asks for the next.

    Philox is keyed, not seeded, so that a new key costs a microsecond.
    """
    if not hasattr(_local, 'rng'):
        _local.rng = np.random.Generator(np.random.Philox(key=0))
        _local.state = _local.rng.bit_generator.state
    _local.state['state']['key'][:] = seed, example
    _local.rng.bit_generator.state = _local.state
    return _local.rng


@dataclasses.dataclass(frozen=True)
class _Loader:
    """Makes one process's rows of batch k."""

    source: Subset | Cached
    transforms: Transforms
    spec: dict[str, ArraySpec]
    batch_size: int
    rows: range
    seed: int = 0

    def train_batch(self, k: int) -> Batch:
        examples = k * self.batch_size + np.arange(self.rows.start, self.rows.stop)
        batch = _zeros(self.spec, len(self.rows))
        indices = _train_indices(examples, len(self.source), self.seed)
        for row, (g, index) in enumerate(zip(examples.tolist(), indices, strict=True)):
            self._put(batch, row, *_first_readable(self.source, index), g)
        return batch

    def eval_batch(self, k: int) -> Batch:
        batch = _zeros(self.spec, len(self.rows))
        mask = np.zeros(len(self.rows), np.float32)
        first = k * self.batch_size + self.rows.start
        for row, index in enumerate(range(first, min(first + len(mask), len(self.source)))):
            with contextlib.suppress(BrokenRecord):
                self._put(batch, row, index, self.source[index], index)
                mask[row] = 1
        return {**batch, 'mask': mask}

    def _put(self, batch: Batch, row: int, index: int, record: Record, example: int) -> None:
        try:
            record = self.transforms(record, example_rng(self.seed, example))
            for key, array in batch.items():
                array[row] = _checked(key, record[key], array.shape[1:])
        except UserError as error:
            raise _named(error, self.source, index) from error


def _train_indices(examples: np.ndarray, size: int, seed: int) -> list[int]:
    """The index in the source of each training example; a batch may span epochs."""
    epochs, positions = np.divmod(examples, size)
    indices = np.empty_like(examples)
    for epoch in np.unique(epochs):
        now = epochs == epoch
        indices[now] = order.shuffled(positions[now], size=size, seed=seed, epoch=int(epoch))
    return indices.tolist()


def _view(source: Subset, cache: bool, workers: int) -> Subset | Cached:
    if cache and workers:
        raise UserError(
            f'cache=True with workers={workers}: processes do not share a cache; set one of them '
            'to 0'
        )
    return source.cached if cache else source


def _local_rows(batch_size: int, process_index: int, process_count: int) -> range:
    if batch_size < 1 or batch_size % process_count:
        raise UserError(
            f'batch_size={batch_size}: must be positive and divide among the {process_count} '
            'processes'
        )
    each = batch_size // process_count
    return range(process_index * each, (process_index + 1) * each)


def _first_readable(source: Subset | Cached, index: int) -> tuple[int, Record]:
    """The first record from `index` on that is not broken, and its index."""
    while True:  # the source raises UserError once too many are broken
        try:
            return index, source[index]
        except BrokenRecord:
            index = (index + 1) % len(source)


def _named(error: UserError, source: Subset | Cached, index: int) -> UserError:
    return UserError(f'{source.record_name(index)}: {error}')


def _array_spec(value: Any) -> ArraySpec:
    array = np.asarray(value)
    narrow = {'i': np.dtype(np.int32), 'f': np.dtype(np.float32)}
    return ArraySpec(array.shape, narrow.get(array.dtype.kind, array.dtype))


def _zeros(spec: dict[str, ArraySpec], rows: int) -> Batch:
    return {key: np.zeros((rows, *s.shape), s.dtype) for key, s in spec.items()}


def _checked(key: str, value: Any, shape: tuple[int, ...]) -> Any:
    # Assignment would broadcast one channel to three.
    if np.shape(value) != shape:
        how = "with 'resize(224)'" if len(shape) > 1 else 'set config.data.buckets=(16, 32, 64)'
        raise UserError(
            f'{key} of shape {np.shape(value)} among others of {shape}; bring all to one size, '
            f'for example {how}'
        )
    return value


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


def _read_ahead(
    make: Callable[[int], Batch],
    start: int,
    stop: int,
    workers: int,
    threads: int | None,
    stall_seconds: float,
) -> Iterator[Batch]:
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
