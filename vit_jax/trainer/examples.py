"""Examples of an evaluation with what the model makes of them, for the writers of a run.

They are drawn as the command `predict` draws files. Nothing that trains is touched: no random
number of training is drawn, and whatever fails here is said in a line.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import functools
import math
import pathlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from ml_collections import ConfigDict

from vit_jax.config import schema
from vit_jax.data import sources
from vit_jax.data.batches import Batch, Process, zeros
from vit_jax.data.buckets import Buckets
from vit_jax.data.dataset import Dataset
from vit_jax.data.fixed import fitted
from vit_jax.data.records import Record, first_readable
from vit_jax.data.rng import example_rng
from vit_jax.data.transforms import Transforms, parse_transforms, without_annotations
from vit_jax.data.vocabulary import Tokenizer
from vit_jax.inference.images import photo_of
from vit_jax.runtime import processes
from vit_jax.trainer.evaluate import EvalSteps, PyTree
from vit_jax.trainer.evaluations import Evaluation
from vit_jax.trainer.writer import Writer, in_a_line
from vit_jax.viz import figures, predictions
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


@dataclasses.dataclass(frozen=True)
class Texts:
    """Pairs of sequences of an evaluation, whose task predicts `tokens`.

    Attributes:
      data: of the evaluation.
      vocab: what its ids stand for.
    """

    data: Buckets
    vocab: Tokenizer

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


@dataclasses.dataclass(frozen=True)
class Examples:
    """What is shown of the first evaluation of a run.

    Attributes:
      entry: of `config.evals`.
      shown: its examples.
    """

    entry: str
    shown: Images | Texts

    def show(self, steps: EvalSteps, variables: PyTree, step: int, writer: Writer) -> None:
        """Predict and draw; every process takes part in the former, process 0 draws.

        Args:
          steps: of the evaluations.
          variables: of the model, after `step`.
          step: the number of updates made.
          writer: of the run.
        """
        read: Mapping[int, Record] = {}
        trouble = ''
        try:
            read = self.shown.read()
        except Exception as error:
            trouble = in_a_line(error)
        # Where one process has no examples, none may wait for it in the prediction.
        if troubles := processes.gather(trouble):
            writer.say(f'{self.entry}: no examples are shown: {troubles[0]}')
            return
        try:
            rows = self._predict(steps, variables, read)
            if writer.enabled:
                self.shown.show(writer, step, f'{self.entry}/examples', rows)
        except Exception as error:
            writer.say(f'{self.entry}: no examples are shown: {in_a_line(error)}')

    def _predict(
        self, steps: EvalSteps, variables: PyTree, read: Mapping[int, Record]
    ) -> list[Batch]:
        assert steps.predict is not None
        process = Process(jax.process_index(), jax.process_count())
        unit = math.lcm(steps.layout.num_shards, process.count)
        whole = batch_of(self.shown.data, read, -(-len(read) // unit) * unit)
        mine = process.rows(len(whole['mask']))
        batch = {name: array[mine.start : mine.stop] for name, array in whole.items()}
        found, small = jax.device_get(steps.predict(variables, steps.layout.put_batch(batch)))
        real = np.flatnonzero(small['mask'] > 0)
        rows = dict(zip(small['index'][real].tolist(), real.tolist(), strict=True))
        return [{name: array[rows[i]] for name, array in found.items()} for i in read]


def of_run(
    config: ConfigDict, evaluations: Mapping[str, Evaluation], steps: EvalSteps
) -> Examples | None:
    """The examples of the first evaluation of the model's own classes; None if nobody shows them.

    Args:
      config: of the run.
      evaluations: its own.
      steps: of them.
    """
    classes = map(schema.writer_class, config.get('writers', schema.Config.writers))
    takes = {method for cls in classes for method in ('image', 'texts') if hasattr(cls, method)}
    if steps.predict is None or not takes:
        return None
    own = (n for n, e in evaluations.items() if e.evaluator is None or not e.evaluator.learns)
    if (entry := next(own, None)) is None:
        return None
    data, section = evaluations[entry].data, config.evals[entry]
    if data.image_size is not None:
        viz = None
        # What a module of the user's own cannot import, `predict` tells.
        with contextlib.suppress(ImportError):
            viz = predictions.find(config.task.name)
        if 'image' not in takes or not hasattr(viz, 'draw'):
            return None
        padded = tuple(section.sizes[-1]) if section.get('sizes') else None
        spec = section.get('transforms', '')
        bare = parse_transforms(without_annotations(spec))
        return Examples(entry, Images(data, parse_transforms(spec), bare, padded, viz))
    vocab = data.vocab or sources.own_vocab(section.source)
    if vocab is None or not isinstance(data, Buckets) or 'texts' not in takes:
        return None
    return Examples(entry, Texts(data, vocab))


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
