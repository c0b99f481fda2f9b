"""Batches of a source by keywords."""

from __future__ import annotations

import math

import numpy as np

from vit_jax.data import plans
from vit_jax.data.batches import Process
from vit_jax.data.dataset import Dataset
from vit_jax.data.plans.base import Examples
from vit_jax.data.read_ahead import STALL_SECONDS, Loading
from vit_jax.data.sources import open_source
from vit_jax.data.transforms import parse_transforms


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
    made = plans.make_plan(
        plan,
        Examples(source, transforms, cache),
        batch_size=batch_size,
        seed=seed,
        multiple=math.lcm(multiple, process_count),
        **options,
    )
    process = Process((process_index,), process_count)
    return Dataset(made, process, Loading(workers, threads, stall_seconds))


def train_batches(source, transforms, *, start_step=0, **options):
    """Batches of training from a step on."""
    return open_as_dataset(source, transforms, **options).train_batches(start_step)


def eval_batches(source, transforms, *, batch_size, **options):
    """Batches of evaluation, by default all of them of `batch_size` rows."""
    options = {'multiple': batch_size} | options
    return open_as_dataset(source, transforms, batch_size=batch_size, **options).eval_batches()


def assert_read_alike(name, size):
    """Threads and worker processes make the same batches of the split `train` as a plain loop.

    Args:
      name: of the source.
      size: in pixels, to which its images are cropped.
    """
    transforms = parse_transforms(f"keep('image', 'label')|inception_crop({size})|flip")

    def batches(**options):
        source = open_source(name, 'train')
        coming = train_batches(source, transforms, batch_size=4, seed=1, **options)
        return [next(coming)['image'] for _ in range(3)]

    expected = batches(threads=0)
    for options in ({'threads': 2}, {'workers': 1}):
        np.testing.assert_array_equal(batches(**options), expected)
