"""Batches of a source by keywords, whatever kind of data set it takes to make them."""

from __future__ import annotations

from vit_jax.data.batches import Process
from vit_jax.data.buckets import Buckets
from vit_jax.data.fixed import FixedShapes
from vit_jax.data.read_ahead import STALL_SECONDS, Loading
from vit_jax.data.sequences import SequenceSource


def open_as_dataset(
    source,
    transforms,
    *,
    batch_size,
    seed=0,
    multiple=1,
    process_index=0,
    process_count=1,
    workers=0,
    threads=None,
    cache=False,
    stall_seconds=STALL_SECONDS,
    sizes=(),
):
    """A data set of fixed shapes, or in buckets for a source of sequences."""
    common = {
        'seed': seed,
        'multiple': multiple,
        'process': Process(process_index, process_count),
        'loading': Loading(workers, threads, stall_seconds),
    }
    if isinstance(source, SequenceSource):
        return Buckets(source, batch_size, **common)
    return FixedShapes(source, transforms, batch_size, cache=cache, sizes=sizes, **common)


def train_batches(source, transforms, *, start_step=0, **options):
    """Batches of training from a step on."""
    return open_as_dataset(source, transforms, **options).train_batches(start_step)


def eval_batches(source, transforms, *, batch_size, **options):
    """Batches of evaluation, all of them of `batch_size` rows where shapes are fixed."""
    if not isinstance(source, SequenceSource):
        options = {'multiple': batch_size} | options
    return open_as_dataset(source, transforms, batch_size=batch_size, **options).eval_batches()
