"""Predictions of a trained model for images, and for single examples."""

from __future__ import annotations

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
from vit_jax.viz.attention_pictures import matches_start

Example = Mapping[str, np.ndarray]  # the arrays of one example
Prediction = dict[str, np.ndarray]
ROWS = 64  # images that another model of an evaluator takes at once


@overload
def predict(
    path: Path, files: Image, *, image_size: Size | None = ..., seed: int = ..., **options: Any
) -> Prediction: ...
@overload
def predict(
    path: Path,
    files: Iterable[Image],
    *,
    image_size: Size | None = ...,
    seed: int = ...,
    **options: Any,
) -> list[Prediction]: ...
def predict(
    path: Path,
    files: Image | Iterable[Image],
    *,
    image_size: Size | None = None,
    seed: int = 0,
    **options: Any,
) -> Prediction | list[Prediction]:
    """Predict for images, read like the model's evaluation images.

    Args:
      path: A run folder, or a checkpoint as for `vit_jax.load`.
      files: One image or several: paths of JPEG, PNG or WebP files, Pillow's images, or arrays
        uint8 [H, W] or [H, W, C], all of any size.
      image_size: Crop and resize to this height and width instead of the model's own.
      seed: Seed of random draws, which depend only on it and the image.
      **options: Further keywords of `inference.load.open_model`, such as `step`.

    Returns:
      {name: array} as named by the task's `predict`: `probs` for a classifier; `scores`, `labels`
      and `boxes` for a DETR. A list of them for several images.

    Raises:
      UserError: if the model or an image cannot be read, the task has no predictions, or samples
        are not finite.
    """
    environment.keep_freed_memory_from_now()
    compile_cache.enable_for_python()
    trained = open_model(path, image_size, **options)
    reader, predict_one = photo_reader(trained), predictor(trained, seed)

    def predict_image(image: Image, name: str = 'image') -> Prediction:
        photo = reader.read(image, image_size, name)
        return predict_one(photo.fields, photo.number)

    if isinstance(files, str | os.PathLike | PIL.Image.Image | np.ndarray):
        return predict_image(files)
    return [predict_image(image, f'image {i}') for i, image in enumerate(files)]


def predictor(trained: TrainedModel, seed: int = 0) -> Callable[[Example, int], Prediction]:
    """Return a compiled function (example, number) -> {name: array} for this example.

    The task's random draws depend only on the seed and the number. The function raises UserError if
    samples are not finite.

    Raises:
      UserError: if the task has no predictions.
    """
    if not trained.task.predicts:
        raise UserError(f'task {trained.settings.task.name!r} has no predictions')
    compiled = mesh.compiled(make_predict_step(trained.model, trained.task, seed=seed))

    def predict_one(example: Example, index: int) -> Prediction:
        predictions, _ = compiled(trained.variables, batch_of_one(example, index))
        require_finite(trained, predictions.get('finite', True))
        return {name: np.asarray(value[0]) for name, value in predictions.items()}

    return predict_one


def require_finite(trained: TrainedModel, finite: Any) -> None:
    """Raise UserError unless all samples are `finite`, an array of truth values."""
    if not np.all(finite):
        raise UserError(
            f'{trained.path}: samples hold NaN or infinite numbers, as of a model that has '
            'diverged: take an earlier checkpoint by --step'
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
    compiled = mesh.compiled(make_predict_step(trained.model, trained.task))

    def batch_of(images: np.ndarray) -> dict[str, np.ndarray]:
        read = np.stack([reader.read(image).image for image in images])
        padded = np.resize(read, (ROWS, *read.shape[1:]))
        index, mask = np.arange(ROWS, dtype=np.int32), np.ones(ROWS, np.float32)
        return {'image': padded, 'index': index, 'mask': mask}

    def predict(images: np.ndarray) -> Prediction:
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
      UserError: if the vocabulary ends texts otherwise than the model expects.
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
    """Return the model's outputs for a batch, and the attention maps of all its layers.

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
    chosen = [p for p in pictures if matches_start(pattern, p.name)]
    if not chosen:
        raise UserError(nearest('parameter', pattern, {p.name for p in pictures}))
    return chosen
