"""Predictions of a trained model for images, and for single examples."""

from __future__ import annotations

import argparse
import dataclasses
import os
from collections.abc import Callable, Iterable, Mapping
from typing import Any, overload

import jax
import numpy as np
import PIL.Image

from vit_jax.data import batches, vocabulary
from vit_jax.data.records import example_rng
from vit_jax.data.transforms import only_text_transforms, parse_transforms
from vit_jax.errors import UserError, nearest
from vit_jax.evaluators.base import OtherModel
from vit_jax.inference.images import Image, photo_reader
from vit_jax.inference.load import Path, open_model
from vit_jax.interop.trained import Size, TrainedModel
from vit_jax.nn.maps import AttentionMap, ParameterPictures
from vit_jax.runtime import compile_cache, environment, mesh
from vit_jax.step import make_attention_step, make_predict_step
from vit_jax.tree_paths import weights_digest
from vit_jax.viz import predictions
from vit_jax.viz.attention_pictures import matches_start
from vit_jax.viz.base import Viz
from vit_jax.viz.photo import Context

Example = Mapping[str, np.ndarray]  # the arrays of one example
Arrays = dict[str, np.ndarray]
Rows = list[dict[str, Any]]
ROWS = 64  # images that another model of an evaluator takes at once


class Prediction(Arrays):
    """Arrays {name: array} of one image, as named by the task's `predict`.

    Attributes:
      image: Path of the file, or name of the pixels.
    """

    def __init__(self, arrays: Arrays, image: str, rows: Rows | UserError):
        super().__init__(arrays)
        self.image = image
        self._rows = rows

    @property
    def rows(self) -> Rows:
        """Rows of the table that the command `predict` writes, {column: value}.

        A row is a class, a box or a segment, with the image, its rank from 1, the name of its class
        and its probability or score. Boxes have the columns x, y, width and height, in pixels of
        the file. An image without predictions has one row, with only the image.

        Raises:
          UserError: if the model has no classes.
        """
        if isinstance(self._rows, UserError):
            raise self._rows
        return self._rows


@overload
def predict(
    path: Path,
    files: Image,
    *,
    image_size: Size | None = ...,
    seed: int = ...,
    flags: Mapping[str, Any] | None = ...,
    **options: Any,
) -> Prediction: ...
@overload
def predict(
    path: Path,
    files: Iterable[Image],
    *,
    image_size: Size | None = ...,
    seed: int = ...,
    flags: Mapping[str, Any] | None = ...,
    **options: Any,
) -> list[Prediction]: ...
def predict(
    path: Path,
    files: Image | Iterable[Image],
    *,
    image_size: Size | None = None,
    seed: int = 0,
    flags: Mapping[str, Any] | None = None,
    **options: Any,
) -> Prediction | list[Prediction]:
    """Predict for images, read like the model's evaluation images.

    Args:
      path: A run folder, or a checkpoint as for `vit_jax.load`.
      files: One image or several: paths of JPEG, PNG or WebP files, Pillow's images, or arrays
        uint8 [H, W] or [H, W, C], all of any size.
      image_size: Height and width to crop and resize to, instead of the model's.
      seed: Seed of random draws, which depend only on it and the image.
      flags: Values of the task's flags of the command `predict`, such as {'threshold': 0.3}, or
        {'texts': 'a cat; a dog'} for a CLIP.
      **options: Further keywords of `inference.load.open_model`, such as `step`.

    Returns:
      {name: array} as named by the task's `predict`: `probs` for a classifier; `scores`, `labels`
      and `boxes` for a DETR. Its attribute `rows` has the class names. A list of them for several
      images.

    Raises:
      UserError: if the model or an image cannot be read, the task has no predictions or no such
        flag, or samples are not finite.
    """
    environment.keep_freed_memory_from_now()
    compile_cache.enable_for_python()
    trained = open_model(path, image_size, **options)
    viz = predictions.find_viz(trained.settings.task.name)
    if flags:
        trained, context = adapt_run(trained, viz, _task_flags(viz, flags))
    else:
        context = _context(trained, _task_flags(viz, {}))
    reader, predict_one = photo_reader(trained), predictor(trained, seed)

    def predict_image(image: Image, name: str = 'image') -> Prediction:
        photo = reader.read(image, image_size, name)
        arrays = predict_one(photo.fields, photo.number)
        rows: Rows | UserError
        try:
            rows = predictions.table_rows(str(photo.path), viz.rows(arrays, photo, context))
        except UserError as error:
            rows = error
        return Prediction(arrays, str(photo.path), rows)

    if isinstance(files, str | os.PathLike | PIL.Image.Image | np.ndarray):
        return predict_image(files)
    return [predict_image(image, f'image {i}') for i, image in enumerate(files)]


def adapt_run(
    run: TrainedModel, viz: Viz, flags: argparse.Namespace
) -> tuple[TrainedModel, Context]:
    """Adapt a run's model and task to the flags of `viz`; return the run and its context."""
    context = dataclasses.replace(_context(run, flags), encode=text_encoder(run))
    model, task = viz.adapt_model(run.model, context), viz.adapt_task(run.task, context)
    return run.adapted(model=model, task=task), context


def _context(run: TrainedModel, flags: argparse.Namespace) -> Context:
    return Context(
        class_names=run.class_names,
        class_ids=run.class_ids,
        flags=flags,
        vocab=run.vocab,
        model=run.settings.model.name or '',
    )


def _task_flags(viz: Viz, values: Mapping[str, Any]) -> argparse.Namespace:
    """Return the flags of a task with their defaults, and these values.

    Raises:
      UserError: if the task does not have a flag.
    """
    parser = argparse.ArgumentParser()
    viz.add_flags(parser)
    flags = parser.parse_args([])
    for name in values.keys() - vars(flags):
        raise UserError(nearest('flag', name, vars(flags)))
    vars(flags).update(values)
    return flags


def predictor(trained: TrainedModel, seed: int = 0) -> Callable[[Example, int], Arrays]:
    """Compile a function (example, number) -> {name: array} of predictions.

    The task's random draws depend only on the seed and the number. The function raises UserError if
    samples are not finite.

    Raises:
      UserError: if the task has no predictions.
    """
    if not trained.task.predicts:
        raise UserError(f'task {trained.settings.task.name!r} has no predictions')
    compiled = mesh.compile_on_default_device(
        make_predict_step(trained.model, trained.task, seed=seed)
    )

    def predict_one(example: Example, index: int) -> Arrays:
        predictions, _ = compiled(trained.variables, batch_of_one(example, index))
        require_finite(trained, predictions.get('finite', True))
        return {name: np.asarray(value[0]) for name, value in predictions.items()}

    return predict_one


def require_finite(trained: TrainedModel, finite: Any) -> None:
    """Raise UserError unless all samples are `finite`, an array of truth values."""
    if not np.all(finite):
        raise UserError(
            f'{trained.path}: samples contain NaN or infinite numbers, probably since the model '
            'diverged: choose an earlier checkpoint by --step'
        )


def other_model(path: Path) -> OtherModel:
    """Open a second model for an evaluator; it reads images like `predict`.

    Raises:
      UserError: if it cannot be read, takes no images, or has no predictions.
    """
    trained = open_model(path)
    reader, name = photo_reader(trained), trained.settings.task.name
    if not trained.task.predicts:
        raise UserError(f'task {name!r} has no predictions')
    compiled = mesh.compile_on_default_device(make_predict_step(trained.model, trained.task))

    def batch_of(images: np.ndarray) -> dict[str, np.ndarray]:
        read = np.stack([reader.read(image).image for image in images])
        padded = np.resize(read, (ROWS, *read.shape[1:]))
        index, mask = np.arange(ROWS, dtype=np.int32), np.ones(ROWS, np.float32)
        return {'image': padded, 'index': index, 'mask': mask}

    def predict(images: np.ndarray) -> Arrays:
        parts = [images[first : first + ROWS] for first in range(0, len(images), ROWS)]
        outputs = [(compiled(trained.variables, batch_of(part))[0], len(part)) for part in parts]
        return {
            key: np.concatenate(
                [np.asarray(predictions[key])[:count] for predictions, count in outputs]
            )
            for key in outputs[0][0]
        }

    black = np.zeros((1, *(trained.image_size or (32, 32)), trained.channels), np.uint8)
    shapes, _ = jax.eval_shape(compiled, trained.variables, batch_of(black))
    digest = weights_digest(trained.variables)
    return OtherModel(predict, tuple(shapes), name, digest, trained.class_names)


def batch_of_one(
    example: Example, index: int = 0, slots: tuple[int, ...] = ()
) -> dict[str, np.ndarray]:
    """Return a batch with only this example, in the first of a row's `slots`; see `Plan.slots`."""
    batch = {name: np.asarray(value)[None] for name, value in example.items()}
    padding, indices, mask = batches.empty_batch({}, 1, slots)
    indices[0, 0], mask[0, 0] = index, 1
    return batch | padding


def text_encoder(trained: TrainedModel) -> Callable[[str, str], np.ndarray] | None:
    """Return a function (field, text) -> ids by the model's evaluation transforms.

    It raises UserError for an empty text, or ids outside of the model's vocabulary. None if the
    model has no vocabulary.

    Raises:
      UserError: if the vocabulary ends texts differently than the model expects.
    """
    if trained.vocab is None:
        return None
    vocabulary.require_ids(trained.vocab, trained.model, str(trained.path))
    steps = parse_transforms(only_text_transforms(trained.transforms), trained.vocab)
    size = trained.settings.model.options.get('vocab_size')

    def encode(field: str, text: str) -> np.ndarray:
        ids = steps({field: text}, example_rng(0, 0))[field]
        if size and ids.max() >= size:
            raise UserError(
                f'{trained.path}: {text!r} has the id {ids.max()}, but the model has {size} ids: '
                'use its own vocabulary'
            )
        return ids

    return encode


def predict_with_attention(
    run: TrainedModel, batch: Mapping[str, np.ndarray]
) -> tuple[dict[str, Any], list[AttentionMap]]:
    """Compute the model's outputs for a batch, and the attention maps of all layers.

    Raises:
      UserError: if the model has no attention.
    """
    if not run.model.attends:
        raise UserError(f'model {run.settings.model.name!r} has no attention to draw')

    compiled = jax.jit(make_attention_step(run.model, run.task))
    outputs, intermediates, inputs = compiled(run.variables, dict(batch))
    return outputs, run.model.attention_maps(intermediates, *inputs)


def parameter_pictures(run: TrainedModel, pattern: str) -> list[ParameterPictures]:
    """Pictures of a model's parameters.

    Args:
      run: The model.
      pattern: A regular expression for the start of the names.

    Raises:
      UserError: if the model has no pictures, or none with a matching name.
    """
    pictures = run.model.parameter_pictures(run.params, run.image_size)
    if not pictures:
        raise UserError(f'model {run.settings.model.name!r} has no parameters to draw')
    matching = [p for p in pictures if matches_start(pattern, p.name)]
    if not matching:
        raise UserError(nearest('parameter', pattern, {p.name for p in pictures}))
    return matching
