"""A few examples of an evaluation, for the `Viz` of the task."""

from __future__ import annotations

import argparse
import dataclasses
import functools
import pathlib
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from vit_jax.config.run import Data
from vit_jax.data import sources
from vit_jax.data.batches import Batch, empty_batch
from vit_jax.data.dataset import Dataset
from vit_jax.data.plans.sizes import pad_image
from vit_jax.data.records import Record, example_rng, first_readable
from vit_jax.data.transforms import Transforms, parse_transforms, without_annotations
from vit_jax.inference.images import make_photo
from vit_jax.inference.predict import batch_of_one
from vit_jax.ops.sequences import join_patches
from vit_jax.tasks.base import Task
from vit_jax.viz.base import Viz
from vit_jax.viz.photo import Context, Fields, Photo

COUNT = 4  # examples, spread evenly over the data


@dataclasses.dataclass(frozen=True)
class ExampleSet:
    """Examples of a data set.

    Attributes:
      data: The opened data.
      section: Their config section.
      viz: Pictures of the task.
      context: Context of the data, with default flags.
    """

    data: Dataset
    section: Data
    viz: Viz
    context: Context

    @functools.cached_property
    def examples(self) -> dict[int, Photo | Fields]:
        """Examples by their numbers in the data, as photos if they have images."""
        return dict(map(self._read, self._numbers()))

    def fields(self) -> dict[int, Fields]:
        """Return the batch arrays of each example, by the examples' numbers."""
        named = self.examples.items()
        return {i: e.fields if isinstance(e, Photo) else e for i, e in named}

    def batch(self, rows: int) -> Batch:
        """Return a batch that begins with the examples; the other rows are padding."""
        batch, index, mask = empty_batch(self.data.spec, rows, self.data.plan.slots)
        for row, (number, fields) in enumerate(self.fields().items()):
            for name in self.data.spec:
                region: tuple[Any, ...] = row, *map(slice, fields[name].shape)
                batch[name][region] = fields[name]
            index[row, 0], mask[row, 0] = number, 1
        return batch

    def batch_of_first(self) -> Batch:
        """Return a batch with only the first example, at its size."""
        index, fields = next(iter(self.fields().items()))
        example = {name: fields[name] for name in self.data.spec}
        return batch_of_one(example, index, self.data.plan.slots)

    def _numbers(self) -> list[int]:
        members = self.data.plan.members
        return members[spread_indices(len(members))].tolist()

    def _read(self, index: int) -> tuple[int, Photo | Fields]:
        index, record = first_readable(self.data.source, index)
        fields = self._fields(index)
        if 'image' not in fields:
            return index, fields
        # Transforms of annotations drop the points that map a photo's pixels to the original.
        image = {'image': record['image']}
        photo = make_photo(image, self._name(index, fields), self._transform(index))
        return index, dataclasses.replace(photo, fields=fields)

    def _fields(self, index: int) -> Fields:
        """Return the arrays of an example, without padding unless it is masked.

        An image that the plan packs into other arrays is also kept for drawing.
        """
        plan, record = self.data.plan, self.data.read(index)
        if plan.spec.keys() - record.keys():
            image = {name: record[name] for name in ('image',) if name in record}
            record = image | plan.join([record], plan.spec)
        return _arrays(record)

    @functools.cached_property
    def _bare(self) -> Transforms:
        """Transforms of the data for images without annotations."""
        return parse_transforms(without_annotations(self.section.transforms))

    def _transform(self, index: int) -> Callable[[Record], Record]:
        sizes = self.section.sizes
        padded = sizes[-1] if sizes else None
        return lambda record: pad_image(self._bare(record, example_rng(0, index)), padded)

    def _name(self, index: int, fields: Fields) -> pathlib.Path:
        """Return the caption of an example, in place of a file name."""
        caption = self.viz.caption(fields, self.context)
        name = f'{caption} (example {index})' if caption else f'example {index}'
        return pathlib.Path(name.replace('/', '\N{DIVISION SLASH}'))


def make_example_set(data: Dataset, section: Data, viz: Viz, model: str) -> ExampleSet:
    """Choose examples of opened data with the config `section`, for a model of this name."""
    parser = argparse.ArgumentParser()
    viz.add_flags(parser)
    context = make_context(data, section, flags=parser.parse_args([]), model=model)
    return ExampleSet(data, section, viz, context)


def make_context(data: Dataset, section: Data, **others: Any) -> Context:
    """Return the `Context` of opened data, with other attributes as given."""
    vocab = data.vocab or sources.own_vocab(section.source)
    return Context(data.info.class_names, vocab=vocab, **others)


def spread_indices(count: int) -> np.ndarray:
    """Return the indices of at most `COUNT` of `count` examples, evenly spread."""
    return np.unique(np.arange(COUNT) * count // COUNT)


def _arrays(record: Record) -> Fields:
    return {name: np.asarray(value) for name, value in record.items()}


def augment(task: Task, batch: Batch) -> Batch:
    """Apply the task's augmentation on the device, such as mixup, to a training batch."""
    return jax.device_get(jax.jit(task.augment)(jax.random.key(0), batch))


def model_images(task: Task, batch: Batch) -> np.ndarray | None:
    """Return the model's input images of a batch, uint8 [B H W C]; None if it has none.

    The task's normalization, measured on black and white images, is inverted. Images from patch
    sequences are padded with white.
    """
    if 'patches' in batch:
        return _pad_to_largest(list(map(join_patches, batch['patches'], batch['grid'])))
    if 'image' not in batch:
        return None
    pixels, first_image = batch['image'], jax.jit(lambda whole: task.inputs(whole)[0])
    model_input, low, high = (
        np.asarray(first_image({**batch, 'image': image}), np.float64)
        for image in (pixels, *(np.full(pixels.shape, byte, np.uint8) for byte in (0, 255)))
    )
    if model_input.shape != pixels.shape:  # the model takes no pixels
        return _to_bytes(pixels)
    scale = np.where(high == low, 1, high - low)
    return np.round(np.clip((model_input - low) / scale, 0, 1) * 255).astype(np.uint8)


def _pad_to_largest(images: list[np.ndarray]) -> np.ndarray:
    """Pad images of several sizes with white to the largest height and width."""
    shape = np.max([image.shape for image in images], axis=0)
    framed = np.full((len(images), *shape), 255, np.uint8)
    for frame, image in zip(framed, images, strict=True):
        frame[: image.shape[0], : image.shape[1]] = image
    return framed


def _to_bytes(pixels: np.ndarray) -> np.ndarray:
    if pixels.dtype == np.uint8:
        return pixels
    low, high = float(pixels.min()), float(pixels.max())
    return np.round((pixels - low) / max(high - low, 1e-12) * 255).astype(np.uint8)
