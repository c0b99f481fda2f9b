"""Samples of a trained model of the task `generate`, in one program for all steps.

An image depends only on the model, the seed, its class and its number in the class; other devices
or batch sizes change it only by rounding.
"""

from __future__ import annotations

import os
import zipfile
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from vit_jax import step
from vit_jax.array_types import Int, UInt8
from vit_jax.data.batches import Batch
from vit_jax.errors import UserError
from vit_jax.inference.predict import require_finite
from vit_jax.interop import files
from vit_jax.interop.trained import TrainedModel
from vit_jax.runtime import mesh, sharding
from vit_jax.storage import paths
from vit_jax.tasks import image_to_image
from vit_jax.tasks.generate import NO_CLASS, Task

BATCH_SIZE = 64
MOST = 2**16  # images of a class, each with a separate index


class Samples(NamedTuple):
    """Images of a batch.

    Attributes:
      images: Images of B samples.
      frames: Intermediate predictions of each image.
      labels: Classes; -1 for none.
      numbers: Numbers of the images in their class.
    """

    images: UInt8[np.ndarray, 'B H W C']
    frames: UInt8[np.ndarray, 'B K H W C']
    labels: Int[np.ndarray, ' B']
    numbers: Int[np.ndarray, ' B']


def sample(
    trained: TrainedModel,
    classes: Sequence[int] = (),
    count: int = 1,
    *,
    seed: int = 0,
    frames: int = 0,
    batch_size: int = BATCH_SIZE,
    devices: Sequence[jax.Device] | None = None,
) -> Iterator[Samples]:
    """Yield `count` images of each class, one class after the other, in batches.

    The task has the options of sampling; `trained.adapted(task=...)` changes them.

    Args:
      trained: Run of the task `generate`, from `inference.load.open_run`.
      classes: Numbers of classes; all of the model by default. -1 is for images of no class.
      count: Number of images of each class.
      seed: Seed of the noise.
      frames: K, number of intermediate predictions to return.
      batch_size: Rounded up to a multiple of the number of devices.
      devices: All by default.

    Raises:
      UserError: for a run of a different task, a class that the model does not have, too many
        images or frames, or devices that cannot be used; later, if images are not finite.
    """
    check_task(trained)
    classes = check_classes(classes, trained)
    check_guidance(classes, trained)
    if not 1 <= count <= MOST:
        raise UserError(f'{count:,} images of a class: must be from 1 to {MOST:,}')
    if frames >= trained.task.steps:
        raise UserError(f'{frames} intermediate images need more than {trained.task.steps} steps')
    layout = sharding.make_layout(mesh.usable_devices() if devices is None else devices)
    labels = np.repeat(np.array(classes, np.int32), count)
    numbers = np.tile(np.arange(count, dtype=np.int32), len(classes))
    rows = min(batch_size, len(labels))
    rows += -rows % layout.num_shards
    return _batches(trained, layout, labels, numbers, rows, seed, frames)


def check_task(trained: TrainedModel) -> None:
    """Raise UserError for a run of a different task."""
    if not isinstance(trained.task, Task):
        raise UserError(
            f'{trained.path} is a run of the task {trained.settings.task.name!r}, which does not '
            "make images: give a run of 'generate'"
        )
    if isinstance(trained.task, image_to_image.Task):
        raise UserError(f'{trained.path} makes images from input images: use predict on files')


def check_classes(classes: Sequence[int], trained: TrainedModel) -> Sequence[int]:
    """Return the classes, by default all; raise UserError for one that the model lacks."""
    num_classes = trained.model.num_classes or 0
    if not classes:
        return range(num_classes) if num_classes else (NO_CLASS,)
    for label in classes:
        if not NO_CLASS <= label < num_classes:
            has = f'classes 0 to {num_classes - 1}' if num_classes else 'no classes'
            raise UserError(f'there is no class {label}: the model has {has}')
    return classes


def check_guidance(classes: Sequence[int], trained: TrainedModel) -> None:
    """Raise UserError if samples need the missing class and training never used it."""
    task = trained.task
    if (
        task.class_dropout
        or not trained.model.num_classes
        or trained.config.get('init', {}).get('from')
    ):
        return
    if task.guidance != 1 or NO_CLASS in classes:
        option = f'guidance={task.guidance:g}' if task.guidance != 1 else 'an image of no class'
        raise UserError(
            f'{trained.path}: {option} needs samples without a class, which the model did not '
            'learn (config.task.class_dropout=0): sample its classes with guidance 1'
        )


def _batches(
    trained: TrainedModel,
    layout: sharding.Layout,
    labels: np.ndarray,
    numbers: np.ndarray,
    rows: int,
    seed: int,
    frames: int,
) -> Iterator[Samples]:
    """Yield the images in batches of `rows`, of which the last is padded."""
    task, size = trained.task, (*_image_size(trained), trained.channels)

    def generate(variables: Any, batch: Batch) -> tuple[jax.Array, jax.Array, jax.Array]:
        apply = step.bind(trained.model, task, variables, batch, seed=seed)
        noise = task.noise(apply, rows, size)
        images = task.generate(apply, noise, batch['label'], frames)
        steps_shown = task.to_bytes(images.frames.reshape(-1, *size)).reshape(-1, rows, *size)
        finite = jnp.isfinite(images.images).all((1, 2, 3))
        return task.to_bytes(images.images), jnp.moveaxis(steps_shown, 0, 1), finite

    compiled = layout.compile_eval(generate)
    variables = layout.create(lambda given: given, trained.variables)
    for start in range(0, len(labels), rows):
        chosen = slice(start, start + rows)
        real = len(labels[chosen])
        padded = {
            'label': np.resize(labels[chosen], rows),
            'index': np.resize((labels[chosen] + 1) * MOST + numbers[chosen], rows),
        }
        images, steps_shown, finite = jax.device_get(compiled(variables, layout.put_batch(padded)))
        require_finite(trained, finite)
        yield Samples(images[:real], steps_shown[:real], labels[chosen], numbers[chosen])


def _image_size(trained: TrainedModel) -> tuple[int, int]:
    if trained.image_size is None:
        raise UserError(f'{trained.path}: the size of its images is unknown')
    return trained.image_size


def write_npz(path: str | os.PathLike[str], batches: Iterable[Samples], count: int) -> None:
    """Write images for tools that compute Frechet inception distances, batch by batch.

    `arr_0` has the images, bytes [N H W 3], gray ones with three equal channels; `arr_1` their
    classes [N].

    Args:
      path: The file.
      batches: Batches of `sample`.
      count: N, the number of images of all batches.

    Raises:
      OSError: if the file cannot be written; leaves no partial file.
    """
    labels: list[np.ndarray] = []

    def images() -> Iterator[np.ndarray]:
        for batch in batches:
            labels.append(batch.labels)
            yield np.broadcast_to(batch.images, (*batch.images.shape[:3], 3))

    with paths.atomic_file(path) as file, zipfile.ZipFile(file, 'w') as archive:
        files.write_rows(archive, 'arr_0', count, images())
        files.write_rows(archive, 'arr_1', count, labels)
