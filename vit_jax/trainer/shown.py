"""What of an evaluation's data is shown: a few images or pairs of sentences, and how."""

from __future__ import annotations

import argparse
import dataclasses
import functools
import pathlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib.figure import Figure

from vit_jax.data.batches import Batch, zeros
from vit_jax.data.buckets import Buckets
from vit_jax.data.dataset import Dataset
from vit_jax.data.fixed import fitted
from vit_jax.data.records import Record, first_readable
from vit_jax.data.rng import example_rng
from vit_jax.data.transforms import Transforms
from vit_jax.data.vocabulary import Tokenizer
from vit_jax.inference import attention_pictures
from vit_jax.inference.images import photo_of
from vit_jax.inference.predict import batch_of_one
from vit_jax.nn.attention_maps import AttentionMap
from vit_jax.trainer.writer import Writer
from vit_jax.viz import figures
from vit_jax.viz.predictions import Context, Photo

COUNT = 4  # examples, evenly spread over the data


@dataclasses.dataclass(frozen=True)
class Images:
    """Images of an evaluation, drawn by the module of the task in `vit_jax.viz`.

    Attributes:
      data: of the evaluation.
      transforms: of it.
      bare: those of them that images without annotations get.
      padded: (height, width) that images are padded to; None for no padding.
      viz: the module.
    """

    data: Dataset
    transforms: Transforms
    bare: Transforms
    padded: tuple[int, int] | None
    viz: Any

    @functools.cached_property
    def photos(self) -> dict[int, Photo]:
        """The images by their numbers in the data, each named by what it shows."""
        source, found = self.data.examples, {}
        for index in spread(len(source)):
            index, record = first_readable(source, index)
            # Transforms of annotations drop the points by which a photo knows its pixels' places.
            image = {'image': record['image']}
            photo = photo_of(image, pathlib.Path('image'), self._by(self.bare, index))
            made = self._by(self.transforms, index)(record)
            fields = {name: np.asarray(value) for name, value in made.items()}
            found[index] = dataclasses.replace(photo, fields=fields)
        return {i: dataclasses.replace(p, path=self._name(i, p)) for i, p in found.items()}

    def _by(self, transforms: Transforms, index: int) -> Callable[[Record], Record]:
        return lambda record: fitted(transforms(record, example_rng(0, index)), self.padded)

    def _name(self, index: int, photo: Photo) -> pathlib.Path:
        caption = getattr(self.viz, 'caption', lambda example, class_names: '')
        shown = caption(photo.fields, self.data.info.class_names)
        name = f'{shown} (example {index})' if shown else f'example {index}'
        return pathlib.Path(name.replace('/', '\N{DIVISION SLASH}'))

    def read(self) -> dict[int, Record]:
        """What a batch has of each, by their numbers."""
        return {index: photo.fields for index, photo in self.photos.items()}

    def show(self, writer: Writer, step: int, name: str, rows: Sequence[Batch]) -> None:
        """Give the picture of their predictions to the writers."""
        parser = argparse.ArgumentParser()
        getattr(self.viz, 'add_flags', lambda parser: None)(parser)
        context = Context(self.data.info.class_names, parser.parse_args([]))
        figure = self.viz.draw(rows, list(self.photos.values()), context)
        writer.image(step, name, figures.pixels(figure))

    def alone(self, index: int, record: Record) -> Batch:
        """A batch of one of them."""
        return batch_of(self.data, {index: record}, 1)

    def draw_attention(
        self, index: int, outputs: Mapping[str, Any], maps: Sequence[AttentionMap]
    ) -> Figure:
        """Where the model has looked in one of them, from what it made of it alone."""
        photo, names = self.photos[index], self.data.info.class_names
        figure, _ = attention_pictures.of_photo(photo, outputs, maps, self.viz, names)
        return figure


@dataclasses.dataclass(frozen=True)
class Texts:
    """Pairs of sequences of an evaluation, whose task predicts `tokens`.

    Attributes:
      data: of the evaluation.
      vocab: what its ids stand for.
      model: its name.
    """

    data: Buckets
    vocab: Tokenizer
    model: str

    def read(self) -> dict[int, Record]:
        """The ids of each side, by the numbers of the examples; of those that fit a bucket."""
        source = self.data.source
        fits = np.flatnonzero((source.lengths > 0) & (source.lengths <= source.bounds[-1]))
        return {index: source[index] for index in fits[spread(len(fits))].tolist()}

    def show(self, writer: Writer, step: int, name: str, rows: Sequence[Batch]) -> None:
        """Give their sides and predictions to the writers, as text."""
        sides = [{k: self.vocab.decode(ids) for k, ids in r.items()} for r in self.read().values()]
        predicted = [self.vocab.decode(row['tokens']) for row in rows]
        pairs = zip(sides, predicted, strict=True)
        writer.texts(step, name, [{**side, 'prediction': text} for side, text in pairs])

    def alone(self, index: int, record: Record) -> Batch:
        """A batch of one of them, as long as it is."""
        return batch_of_one(record, index)

    def draw_attention(
        self, index: int, outputs: Mapping[str, Any], maps: Sequence[AttentionMap]
    ) -> Figure:
        """Which words of one of them look at which, from the maps of it alone."""
        del outputs
        sides = self.data.source[index]
        source, target = (np.asarray(sides[side]) for side in ('source', 'target'))
        figure, _ = attention_pictures.of_sentences(source, target, maps, self.vocab, self.model)
        return figure


def spread(count: int) -> np.ndarray:
    """The numbers of at most `COUNT` of so many examples, evenly spread."""
    return np.unique(np.arange(COUNT) * count // COUNT)


def batch_of(data: Dataset, examples: Mapping[int, Record], rows: int) -> Batch:
    """A batch of evaluation that begins with these examples; the other rows are padding.

    Args:
      data: that they are of.
      examples: arrays no larger than those of `data.spec`, by their numbers in the data.
      rows: of the batch.
    """
    batch = zeros(data.spec, rows)
    index, mask = np.zeros(rows, np.int32), np.zeros(rows, np.float32)
    for row, (number, example) in enumerate(examples.items()):
        for name, array in batch.items():
            value = np.asarray(example[name])
            place: tuple[Any, ...] = row, *map(slice, value.shape)
            array[place] = value
        index[row], mask[row] = number, 1
    return {**batch, 'index': index, 'mask': mask}
