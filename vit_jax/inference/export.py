"""Trained models as programs that need only JAX: StableHLO by `jax.export`, with their weights.

A folder holds model.stablehlo, the serialized program of a batch of any size for several kinds of
devices; weights.safetensors; and model.json, which lists inputs, outputs, the preparation of images
and the names of classes. Plain JAX runs it:

    program = jax.export.deserialize(open('out/model.stablehlo', 'rb').read())
    weights = safetensors.numpy.load_file('out/weights.safetensors')
    outputs = program.call(weights, {'image': images})  # uint8, see model.json
"""

from __future__ import annotations

import dataclasses
import functools
import json
import os
import pathlib
import shutil
import stat
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import jax
import jax.export
import jax.numpy as jnp
import numpy as np
from flax import traverse_util

from vit_jax import __version__, extras
from vit_jax.data.transforms import parse_transforms, without_annotations
from vit_jax.errors import UserError
from vit_jax.inference.images import Image, PhotoReader, photo_reader
from vit_jax.inference.load import Path, open_model
from vit_jax.interop.trained import Size, TrainedModel, fields
from vit_jax.optim.lora import is_kernel
from vit_jax.optim.muon import is_stacked, kernel_axes
from vit_jax.runtime import mesh
from vit_jax.step import make_predict_step
from vit_jax.storage import paths

PROGRAM, WEIGHTS, ABOUT = 'model.stablehlo', 'weights.safetensors', 'model.json'
PLATFORMS = ('cpu', 'cuda', 'tpu')
INDEX = 'index'  # the number of a row
SCALE = ':scale'  # after the name of a kernel of int8
Weights = dict[str, np.ndarray]


def export(
    path: Path,
    folder: Path,
    image_size: Size | None = None,
    *,
    int8: bool = False,
    platforms: Sequence[str] = PLATFORMS,
    **options: Any,
) -> dict[str, Any]:
    """Write a model as a program of its task's predictions, and return the contents of model.json.

    Args:
      path: A run folder, or a checkpoint as for `vit_jax.load`.
      folder: Output folder, which must not exist.
      image_size: Height and width of images instead of the model's own.
      int8: Whether to store kernels as int8 with a scale for each output; computation stays float.
      platforms: Platforms that the program runs on.
      **options: Further keywords of `inference.load.open_model`, such as `step`.

    Raises:
      UserError: if the model cannot be read, takes no images or predicts nothing, or the folder
        exists or cannot be written.
    """
    target = pathlib.Path(paths.absolute(folder))
    require_extra()
    if target.exists():
        raise UserError(f'{folder} already exists: choose another name or remove it')
    mesh.usable_devices()
    trained = open_model(path, image_size, **options)
    if not trained.task.predicts:
        raise UserError(f'task {trained.settings.task.name!r} has no predictions to export')
    reader, example = photo_reader(trained), example_of(trained, image_size)
    flat = traverse_util.flatten_dict(dict(trained.variables), sep='/')
    weights = {name: np.asarray(x) for name, x in flat.items()}
    weights = quantize(weights) if int8 else weights
    program = exported_program(trained, weights, example, platforms)
    about = describe_model(trained, reader, program) | {
        'image_size': image_size,
        'int8': int8,
    }
    try:
        write(target, program, weights, about)
    except OSError as error:
        raise UserError(f'{folder}: cannot be written: {error.strerror or error}') from None
    return about


def require_extra() -> None:
    """Raise UserError if the package that stores JAX programs is missing."""
    if not extras.is_installed('export'):
        raise extras.missing_error('the form of an exported program', 'export')


def example_of(trained: TrainedModel, image_size: Size | None = None) -> dict[str, np.ndarray]:
    """Return the arrays of one black image, as the model takes them.

    Raises:
      UserError: if the size of the images is unknown, or their shapes differ.
    """
    size = trained.image_size or trained.raw_images.get('size')
    if size is None:
        raise UserError(f'{trained.source}: its image size is unknown: give --image-size')
    reader, (height, width) = photo_reader(trained), size
    examples = [
        {
            name: np.asarray(value)
            for name, value in reader.read(np.zeros(shape, np.uint8), image_size).fields.items()
        }
        for shape in (
            (height, width, trained.channels),
            (height, 2 * width, trained.channels),
            (2 * height, width, trained.channels),
        )
    ]
    shapes = [{name: x.shape for name, x in example.items()} for example in examples]
    if shapes.count(shapes[0]) < len(shapes):
        raise UserError(
            f'{trained.source}: it takes images of any shape, but a program only one: give '
            '--image-size to crop and resize to'
        )
    return examples[0]


def exported_program(
    trained: TrainedModel,
    weights: Mapping[str, np.ndarray],
    example: Mapping[str, np.ndarray],
    platforms: Sequence[str] = PLATFORMS,
) -> jax.export.Exported:
    """Return the program (weights, batch) -> predictions, for a batch of any number of rows.

    Each row is computed separately, so that the model's code never sees the batch size. If a task
    draws random numbers, they depend on a number for each row, INDEX, as in `predict`.

    Args:
      trained: The model.
      weights: Arrays by name, some of them perhaps `quantize`.
      example: Arrays of one row.
      platforms: Platforms that the program runs on.
    """
    model_fields = fields(trained.model)
    model = trained.model.clone(attention='xla') if 'attention' in model_fields else trained.model
    step = make_predict_step(model, trained.task)

    def predict_one(weights: Mapping[str, jax.Array], row: Mapping[str, jax.Array]) -> Any:
        variables = traverse_util.unflatten_dict(dequantize(weights), sep='/')
        rows = {INDEX: jnp.zeros(1, jnp.int32), 'mask': jnp.ones(1, jnp.float32)}
        rows |= {name: x[None] for name, x in row.items()}
        return jax.tree.map(lambda x: x[0], step(variables, rows)[0])

    def predict(weights: Mapping[str, jax.Array], batch: Mapping[str, jax.Array]) -> Any:
        return jax.vmap(functools.partial(predict_one, weights))(dict(batch))

    (rows,) = jax.export.symbolic_shape('batch')
    shapes = {name: jax.ShapeDtypeStruct(x.shape, x.dtype) for name, x in weights.items()}
    row = {name: jax.ShapeDtypeStruct(x.shape, x.dtype) for name, x in example.items()}
    if _depends_on(INDEX, predict_one, shapes, row | {INDEX: jax.ShapeDtypeStruct((), jnp.int32)}):
        row[INDEX] = jax.ShapeDtypeStruct((), jnp.int32)
    batch = {name: jax.ShapeDtypeStruct((rows, *x.shape), x.dtype) for name, x in row.items()}
    return jax.export.export(jax.jit(predict), platforms=tuple(platforms))(shapes, batch)


def _depends_on(name: str, function: Callable[..., Any], weights: Any, row: Any) -> bool:
    """Return whether the outputs of a function (weights, row) depend on an array of the row."""
    probe = jax.export.export(jax.jit(function), platforms=['cpu'])(weights, row)
    leaves = jax.tree_util.tree_flatten_with_path((weights, row))[0]
    index = [path for path, _ in leaves].index(
        (jax.tree_util.SequenceKey(1), jax.tree_util.DictKey(name))
    )
    return index in probe.module_kept_var_idx


def quantize(weights: Mapping[str, np.ndarray]) -> Weights:
    """Quantize kernels to int8: round(W / s), with s = max |W| / 127 for each output."""
    arrays: Weights = {}
    for name, x in weights.items():
        if not (name.startswith('params/') and is_kernel(name, x)):
            arrays[name] = x
            continue
        stacked = is_stacked(name, x)
        inputs, _ = kernel_axes(name, x.ndim - stacked)
        axes = tuple(i + stacked for i in inputs)
        scale = np.abs(x).max(axis=axes, keepdims=True).astype(np.float32) / 127
        scale = np.where(scale > 0, scale, 1).astype(np.float32)
        arrays[name] = np.round(x / scale).astype(np.int8)
        arrays[f'{name}{SCALE}'] = scale
    return arrays


def dequantize(weights: Mapping[str, Any]) -> dict[str, Any]:
    """Invert `quantize`, up to rounding."""
    return {
        name: x if (scale := weights.get(f'{name}{SCALE}')) is None else x.astype('float32') * scale
        for name, x in weights.items()
        if not name.endswith(SCALE)
    }


def describe_model(
    trained: TrainedModel, reader: PhotoReader, program: jax.export.Exported
) -> dict[str, Any]:
    """Return the contents of model.json."""
    (_, inputs), _ = jax.tree.unflatten(program.in_tree, program.in_avals)
    outputs = jax.tree.unflatten(program.out_tree, program.out_avals)
    return describe_source(trained, reader) | {
        'platforms': list(program.platforms),
        'inputs': {k: [[str(x.shape[0]), *x.shape[1:]], x.dtype.name] for k, x in inputs.items()},
        'outputs': {k: [[str(n) for n in x.shape], x.dtype.name] for k, x in outputs.items()},
    }


def describe_source(trained: TrainedModel, reader: PhotoReader) -> dict[str, Any]:
    """Return the part of model.json about the model and the preparation of its images."""
    transforms = without_annotations(trained.data.transforms)
    keys = ('channels', 'size', 'padded', 'squeezed', 'ready')
    return {
        'model': trained.model_config['name'],
        'task': trained.task_config['name'],
        'source': trained.source,
        'versions': {'vit_jax': __version__, 'jax': jax.__version__},
        'class_names': list(trained.class_names),
        'preparation': {
            'transforms': transforms,
            **{name: getattr(reader, name) for name in keys},
        },
    }


def write(
    folder: pathlib.Path,
    program: jax.export.Exported,
    weights: Mapping[str, np.ndarray],
    about: Mapping[str, Any],
) -> None:
    """Write the three files, all or none of them."""
    from safetensors.numpy import save

    arrays = {k: np.asarray(x, order='C') for k, x in weights.items()}
    write_files(folder, about, {PROGRAM: program.serialize(), WEIGHTS: save(arrays)})


def write_files(
    folder: pathlib.Path, about: Mapping[str, Any], files: Mapping[str, bytes | bytearray]
) -> None:
    """Write model.json and files by name into a new folder, all or none of them."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    temporary = pathlib.Path(tempfile.mkdtemp(prefix=f'.{folder.name}-', dir=folder.parent))
    try:
        for name, content in files.items():
            (temporary / name).write_bytes(content)
        (temporary / ABOUT).write_text(json.dumps(about, indent=2) + '\n')
        # mkdtemp ignores the umask and leaves the folder to its owner.
        mode = stat.S_IMODE((temporary / ABOUT).stat().st_mode)
        temporary.chmod(mode | (mode & 0o444) >> 2)
        os.rename(temporary, folder)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


@dataclasses.dataclass(frozen=True)
class ExportedModel:
    """A program that was written by `export`.

    Attributes:
      about: Contents of model.json.
      program: Program of `jax.export`.
      weights: Arrays by name.
    """

    about: Mapping[str, Any]
    program: jax.export.Exported
    weights: Weights

    @property
    def class_names(self) -> tuple[str, ...]:
        """Return a name for each class; empty if unknown."""
        return tuple(self.about['class_names'])

    def __call__(self, **batch: Any) -> dict[str, jax.Array]:
        """Predict for arrays of any number of rows, with the shapes of `about['inputs']`.

        Rows are numbered from 0 where random draws depend on numbers and none are given.
        """
        if INDEX in self.about['inputs'] and INDEX not in batch:
            batch[INDEX] = np.arange(len(next(iter(batch.values()))), dtype=np.int32)
        return self.program.call(self.weights, {k: jnp.asarray(x) for k, x in batch.items()})

    def predict(self, images: Iterable[Image]) -> list[dict[str, np.ndarray]]:
        """Predict for images as `vit_jax.predict` does.

        Raises:
          UserError: if an image cannot be read.
        """
        options: dict[str, Any] = dict(self.about['preparation'])
        options = {k: tuple(v) if isinstance(v, list) else v for k, v in options.items()}
        options['transforms'] = parse_transforms(options['transforms'])
        reader = PhotoReader(**options)
        size = self.about['image_size'] and tuple(self.about['image_size'])
        photos = [reader.read(x, size, f'image {i}') for i, x in enumerate(images)]
        if not photos:
            return []
        rows = [{**photo.fields, INDEX: np.int32(photo.number)} for photo in photos]
        batch = {k: np.stack([np.asarray(row[k]) for row in rows]) for k in self.about['inputs']}
        outputs = jax.device_get(self(**batch))
        return [{k: x[i] for k, x in outputs.items()} for i in range(len(photos))]


def load_exported(folder: Path) -> ExportedModel:
    """Read what `export` wrote.

    Raises:
      UserError: if a file is missing or damaged.
    """
    from safetensors.numpy import load_file

    require_extra()
    path = pathlib.Path(paths.absolute(folder))
    if missing := [name for name in (PROGRAM, WEIGHTS, ABOUT) if not (path / name).is_file()]:
        raise UserError(f'{folder}: not an exported model: {missing[0]} is missing')
    try:
        about = json.loads((path / ABOUT).read_text())
        program = jax.export.deserialize(bytearray((path / PROGRAM).read_bytes()))
        return ExportedModel(about, program, load_file(path / WEIGHTS))
    except Exception as error:
        line = str(error).partition('\n')[0]
        raise UserError(f'{folder}: the exported model cannot be read: {line}') from error
