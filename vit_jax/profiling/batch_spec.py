"""Shapes and dtypes of a row of a batch, from its data or from a given image size."""

from __future__ import annotations

import dataclasses
import re
from typing import Any, NamedTuple

from ml_collections import ConfigDict

from vit_jax.config import defaults, schema
from vit_jax.config.load import to_run
from vit_jax.config.run import Data, Run
from vit_jax.data import census, vocabulary
from vit_jax.data.batches import index_and_mask
from vit_jax.data.dataset import Dataset, make_plan, open_dataset
from vit_jax.data.plans import Plan, buckets
from vit_jax.data.plans.base import Examples
from vit_jax.data.records import SourceInfo
from vit_jax.data.splits import Subset
from vit_jax.data.transforms import parse_transforms
from vit_jax.errors import UserError
from vit_jax.profiling import benchmark

Spec = dict[str, Any]  # shape and dtype of a row's arrays
CLASSES = 1000  # of ImageNet, without data


class Row(NamedTuple):
    """A row of a batch: one example, unless the plan puts several into it.

    Attributes:
      config: Config with all sizes set.
      spec: Shapes and dtypes of the row's arrays, including `index` and `mask`.
      examples: Mean number of examples per row.
    """

    config: ConfigDict
    spec: Spec
    examples: float = 1

    @property
    def example(self) -> Spec:
        """Arrays except `index` and `mask`."""
        return {name: s for name, s in self.spec.items() if name not in index_and_mask()}


def row_of(config: ConfigDict, image_size: int | None = None, channels: int | None = None) -> Row:
    """Make a row of a config's largest batches, or of images with a given size.

    A known data set that is missing is replaced by black images, see `census.open_source`. A model
    without `num_classes` gets the data's, or ImageNet's 1,000 if an image size replaces the data.

    Args:
      config: Config, which is not changed.
      image_size: Side of square images in pixels, 224 if only `channels` is given.
      channels: Channels of these images, 3 if only `image_size` is given.

    Raises:
      UserError: if no size is given and the data cannot be opened.
    """
    if image_size is None and channels is None:
        schema.make_section(Data, config.get('data', {}), 'config.data', strict=True)
        run = to_run(config)
        plan = _open_text(run).plan if run.data.buckets else _open_images(run)
        completed = defaults.fill_sizes(config, plan.info)
        return Row(completed, {**plan.spec, **index_and_mask(plan.slots)}, plan.examples_per_row)
    if to_run(config).data.buckets:
        raise UserError('--image-size and --channels apply to images, and this config to text')
    size, channels = image_size or 224, channels or 3
    for flag, value in (('--image-size', size), ('--channels', channels)):
        if value < 1:
            raise UserError(f'{flag} {value}: must be at least 1')
    if to_run(config).model.options.get('num_classes', CLASSES) is None:
        config = defaults.fill_sizes(config, SourceInfo(CLASSES, ()))
    return Row(config, {**benchmark.image_spec(size, channels), **index_and_mask()})


def _open_text(run: Run) -> Dataset:
    """Open only the first pair of a text config's training data.

    The buckets determine the lengths, so the other pairs need not be read and tokenized.
    """
    base = re.split(r'[\[+]', str(run.data.split))[0]
    return open_dataset(dataclasses.replace(run.data, split=f'{base}[:1]'), run.batch_size)


def _open_images(run: Run) -> Plan:
    try:
        return plan_of(run.data, run.batch_size, open_source(run.data))
    except UserError as e:
        raise UserError(f'{e}; or give --image-size to run without data') from e


def plan_of(data: Data, batch_size: int, source: Subset) -> Plan:
    """Make the plan of a data section, for its source or black images in its place."""
    vocab = vocabulary.load_vocabulary(data.vocab) if data.vocab else None
    examples = Examples(source, parse_transforms(data.transforms, vocab))
    return make_plan(data, examples, batch_size=batch_size)


def open_source(data: Data) -> Subset:
    """Open the source of a data section, or black images in its place.

    Raises:
      UserError: if it is missing and unknown.
    """
    source = census.open_source(data.source, str(data.split))
    return source if data.classes is None else source.only_classes(data.classes)


def batch_rows(run: Run) -> int:
    """Return the examples of a batch; of the longest bucket if `batch_size` counts tokens."""
    if not (bounds := run.data.buckets):
        return run.batch_size
    return buckets.train_rows(bounds, run.batch_size)[-1]
