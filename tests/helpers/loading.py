"""Batches of a source by keywords."""

from __future__ import annotations

import math

from vit_jax.data import plans
from vit_jax.data.batches import Process
from vit_jax.data.dataset import Dataset
from vit_jax.data.examples import Examples
from vit_jax.data.read_ahead import STALL_SECONDS, Loading


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
    plan='fixed',
    **options,
):
    """A data set of these examples by a plan and its options."""
    made = plans.make(
        plan,
        Examples(source, transforms, cache),
        batch_size=batch_size,
        seed=seed,
        multiple=math.lcm(multiple, process_count),
        **options,
    )
    process = Process(process_index, process_count)
    return Dataset(made, process, Loading(workers, threads, stall_seconds))


def train_batches(source, transforms, *, start_step=0, **options):
    """Batches of training from a step on."""
    return open_as_dataset(source, transforms, **options).train_batches(start_step)


def eval_batches(source, transforms, *, batch_size, **options):
    """Batches of evaluation, by default all of them of `batch_size` rows."""
    options = {'multiple': batch_size} | options
    return open_as_dataset(source, transforms, batch_size=batch_size, **options).eval_batches()
