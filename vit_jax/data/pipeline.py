"""Batches of examples, the same whatever reads them.

Batch k is a pure function of (seed, k), see `vit_jax.data.loader`, and `vit_jax.data.buckets` for
sequences in batches of like lengths. So resuming is `start_step=k`, and any number of processes,
workers and threads sees the same examples in the same order.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator

from vit_jax.data import buckets
from vit_jax.data.buckets import Bucketed
from vit_jax.data.loader import Batch, Loader
from vit_jax.data.read_ahead import read_ahead
from vit_jax.data.specs import element_spec
from vit_jax.data.splits import Cached, Subset
from vit_jax.data.transforms import Transforms
from vit_jax.errors import UserError

STALL_SECONDS = 1800.0


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
        return read_ahead(make, start_step, sys.maxsize, workers, threads, stall_seconds)
    if batch_size > len(source):
        raise UserError(
            f'{source.title}: {len(source)} examples are fewer than batch_size={batch_size}; '
            'lower it or take a larger split'
        )
    rows = _local_rows(batch_size, process_index, process_count)
    spec = element_spec(source, transforms)
    loader = Loader(_view(source, cache, workers), transforms, spec, batch_size, rows, seed)
    return read_ahead(loader.train_batch, start_step, sys.maxsize, workers, threads, stall_seconds)


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
        return read_ahead(make, 0, plan.steps, workers, threads, stall_seconds)
    rows = _local_rows(batch_size, process_index, process_count)
    spec = element_spec(source, transforms)
    loader = Loader(_view(source, cache, workers), transforms, spec, batch_size, rows)
    stop = -(-len(source) // batch_size)
    return read_ahead(loader.eval_batch, 0, stop, workers, threads, stall_seconds)


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
