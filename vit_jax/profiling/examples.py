"""Shapes and dtypes of a row of a batch, from its data or from a given image size."""

from __future__ import annotations

import re
from typing import Any, NamedTuple

from ml_collections import ConfigDict

from vit_jax.config import defaults, schema
from vit_jax.data import census, vocabulary
from vit_jax.data.batches import index_and_mask
from vit_jax.data.dataset import DataConfig, Dataset, open_dataset
from vit_jax.data.plans import Plan, buckets
from vit_jax.data.plans.base import Examples
from vit_jax.data.records import SourceInfo
from vit_jax.data.splits import Subset
from vit_jax.data.transforms import parse_transforms
from vit_jax.errors import UserError
from vit_jax.profiling import benchmark

Spec = dict[str, Any]  # shape and dtype of a row's arrays
CLASSES = 1000  # those of ImageNet, if no data are given


class Row(NamedTuple):
    """A row of a batch: one example, unless the plan puts several into it.

    Attributes:
      config: with no size left open.
      spec: shapes and dtypes of the row's arrays, `index` and `mask` among them.
      examples: average number in a row.
    """

    config: ConfigDict
    spec: Spec
    examples: float = 1

    @property
    def example(self) -> Spec:
        """The arrays without `index` and `mask`."""
        return {name: s for name, s in self.spec.items() if name not in index_and_mask()}


def row_of(config: ConfigDict, image_size: int | None = None, channels: int | None = None) -> Row:
    """A row of the largest batches of a config's data, or of images of a given size.

    Black images stand in for a known data set that is not there, see `census.open_source`. A model
    without `num_classes` gets those of the data, or the 1,000 of ImageNet if an image size is given
    instead of data.

    Args:
      config: not changed.
      image_size: side in pixels of square images, 224 if only `channels` is given.
      channels: of these images, 3 if only `image_size` is given.

    Raises:
      UserError: if no size is given and the data are neither known nor can be opened.
    """
    if image_size is None and channels is None:
        plan = _open_text(config).plan if config.data.get('buckets') else _open_images(config)
        completed = defaults.complete(config, plan.info)
        return Row(completed, {**plan.spec, **index_and_mask(plan.slots)}, plan.examples_per_row)
    if config.data.get('buckets'):
        raise UserError('--image-size and --channels apply to images, and this config to text')
    size, channels = image_size or 224, channels or 3
    for flag, value in (('--image-size', size), ('--channels', channels)):
        if value < 1:
            raise UserError(f'{flag} {value}: must be at least 1')
    if 'num_classes' in config.model and config.model.num_classes is None:
        config = defaults.complete(config, SourceInfo(CLASSES, ()))
    return Row(config, {**benchmark.image_spec(size, channels), **index_and_mask()})


def _open_text(config: ConfigDict) -> Dataset:
    """The training data of a config for text, but only its first pair.

    Otherwise all pairs would be read and tokenized, although the buckets determine the lengths.
    """
    _check(config)
    base = re.split(r'[\[+]', config.data.split)[0]
    return open_dataset(
        config.batch_size, **defaults.keywords(config.data) | {'split': f'{base}[:1]'}
    )


def _open_images(config: ConfigDict) -> Plan:
    _check(config)
    try:
        return plan_of(config.data, config.batch_size, open_source(config.data))
    except UserError as e:
        raise UserError(f'{e}; or give --image-size to run without data') from e


def _check(config: ConfigDict) -> None:
    schema.check(config.data, schema.parameters(config, 'data'), 'config.data')


def plan_of(section: ConfigDict, batch_size: int, source: Subset) -> Plan:
    """The plan of batches that a data section describes, for its source or one that stands in."""
    keys = DataConfig(**defaults.keywords(section))
    vocab = vocabulary.load(keys.vocab) if keys.vocab else None
    examples = Examples(source, parse_transforms(keys.transforms, vocab))
    return keys.make_plan(examples, batch_size=batch_size)


def open_source(section: ConfigDict) -> Subset:
    """The source of a data section, or black images that stand in for a known one.

    Raises:
      UserError: if it is neither there nor known.
    """
    source = census.open_source(section.source, section.split)
    return source.only_classes(section.classes) if 'classes' in section else source


def batch_rows(config: ConfigDict) -> int:
    """Examples of a batch; of the longest bucket if `batch_size` counts tokens."""
    if not (bounds := config.data.get('buckets')):
        return int(config.batch_size)
    return buckets.train_rows(bounds, config.batch_size)[-1]
