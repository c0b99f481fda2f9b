"""Trained models as ONNX files, by jax2onnx; checked by onnxruntime."""

from __future__ import annotations

import contextlib
import importlib.util
import logging
import pathlib
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np

from vit_jax.errors import UserError
from vit_jax.inference import export
from vit_jax.inference.images import photo_reader
from vit_jax.inference.load import backbone, open_model, read
from vit_jax.interop.trained import TrainedModel, fields
from vit_jax.runtime import mesh
from vit_jax.step import make_predict_step
from vit_jax.storage import paths
from vit_jax.storage.paths import Path

PROGRAM = 'model.onnx'
# jax2onnx 0.17 requires an older Orbax than this package, which only its examples use.
INSTALL = 'pip install --no-deps jax2onnx onnx onnx-ir onnxruntime'
TOLERANCE = 1e-4  # largest difference from JAX, relative to the largest output
_ROWS = 2  # images that the file is checked with


def export_onnx(
    path: Path, folder: Path, image_size: tuple[int, int] | None = None, **options: Any
) -> dict[str, Any]:
    """Write a model as model.onnx and model.json, and return the contents of the latter.

    Args:
      path, folder, image_size: See `export.export`.
      **options: Further keywords of `inference.load.open_model`, such as `step`.

    Raises:
      UserError: as `export.export`; also if jax2onnx is missing or cannot convert the model, or
        onnxruntime computes something else.
    """
    target = pathlib.Path(paths.absolute(folder))
    _require_packages()
    if target.exists():
        raise UserError(f'{folder} already exists: choose another name or remove it')
    mesh.usable_devices()
    stored = backbone(read(path, image_size=image_size, **options))  # of an autoencoder the encoder
    trained = open_model(path, image_size, stored=stored)
    task = trained.settings.task.name
    if not trained.task.predicts:
        raise UserError(f'task {task!r} has no predictions to export')
    reader, example = photo_reader(trained), export.example_of(trained, image_size)
    if set(example) != {'image'}:
        raise UserError(f'ONNX files take only images, but {task!r} takes {", ".join(example)}')
    content, names = convert(trained, example['image'])
    difference = check(content, trained, names, example['image'])
    about = export.describe_source(trained, reader) | {
        'image_size': image_size,
        'inputs': {'image': [['batch', *example['image'].shape], 'uint8']},
        'outputs': names,
        'largest_difference': difference,
    }
    try:
        export.write_files(target, about, {PROGRAM: content})
    except OSError as error:
        raise UserError(f'{folder}: cannot be written: {error.strerror or error}') from None
    return about


def convert(trained: TrainedModel, image: np.ndarray) -> tuple[bytes, list[str]]:
    """Convert predictions for any number of images [B H W C] of bytes.

    Returns:
      The file, and the names of its outputs.

    Raises:
      UserError: if jax2onnx cannot convert the model.
    """
    import jax2onnx

    predict = _predict(trained)
    names = sorted(jax.eval_shape(predict, np.stack([image] * _ROWS)))
    with _quiet(), _only_default_platform():
        try:
            program = jax2onnx.to_onnx(
                lambda images: tuple(predict(images)[name] for name in names),
                inputs=[jax.ShapeDtypeStruct(('batch', *image.shape), image.dtype)],
                model_name=trained.settings.model.name,
            )
        except Exception as error:  # it raises any kind for what it lacks
            reason = str(error).strip().partition('\n')[0] or type(error).__name__
            raise UserError(
                f'jax2onnx cannot convert a {trained.settings.model.name!r}: {reason}; export '
                'without --format onnx writes StableHLO'
            ) from None
    return program.SerializeToString(), names


def check(content: bytes, trained: TrainedModel, names: list[str], image: np.ndarray) -> float:
    """Compare onnxruntime with JAX on random images.

    Returns:
      The largest difference, relative to the largest output.

    Raises:
      UserError: if it exceeds TOLERANCE.
    """
    import onnxruntime

    rng = np.random.default_rng(0)
    images = rng.integers(0, 256, (_ROWS, *image.shape)).astype(np.uint8)
    session = onnxruntime.InferenceSession(content, providers=['CPUExecutionProvider'])
    outputs = session.run(None, {session.get_inputs()[0].name: images})
    expected = jax.jit(_predict(trained))(images)
    differences = {
        name: float(
            np.abs(output - np.asarray(expected[name])).max()
            / max(np.abs(expected[name]).max(), 1e-9)
        )
        for name, output in zip(names, outputs, strict=True)
    }
    worst = max(differences, key=differences.__getitem__)
    if not differences[worst] <= TOLERANCE:
        raise UserError(
            f'onnxruntime differs from JAX by {differences[worst]:.1e} of the largest {worst}: '
            'nothing is written; export without --format onnx writes StableHLO'
        )
    return differences[worst]


def _predict(trained: TrainedModel) -> Callable[[Any], dict[str, jax.Array]]:
    """Return the function from images [B H W C] to predictions."""
    model = trained.model
    model = model.clone(attention='xla') if 'attention' in fields(model) else model
    step = make_predict_step(model, trained.task)
    variables = jax.tree.map(jnp.asarray, trained.variables)

    def predict(images: jax.Array) -> dict[str, jax.Array]:
        rows = images.shape[0]
        batch = {'image': images, 'index': jnp.zeros(rows, jnp.int32), 'mask': jnp.ones(rows)}
        outputs: dict[str, jax.Array] = step(variables, batch)[0]
        return outputs

    return predict


@contextlib.contextmanager
def _only_default_platform() -> Iterator[None]:
    """Trace the code of CPUs: ONNX has no operation that depends on the platform."""

    def choose(*args: Any, default: Any = None, **by_platform: Any) -> Any:
        return by_platform.get('cpu', default)(*args)

    with mock.patch.object(jax.lax, 'platform_dependent', choose):
        yield


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Silence the tracebacks that jax2onnx logs for examples whose packages are missing."""
    previous = logging.root.manager.disable
    logging.disable(logging.ERROR)
    try:
        yield
    finally:
        logging.disable(previous)


def _require_packages() -> None:
    missing = [
        name for name in ('jax2onnx', 'onnxruntime') if importlib.util.find_spec(name) is None
    ]
    if missing:
        raise UserError(f'--format onnx needs {" and ".join(missing)}: {INSTALL}')
