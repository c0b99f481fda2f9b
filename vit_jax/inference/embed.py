"""Features of images and of texts by a trained model."""

from __future__ import annotations

import collections
import dataclasses
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent import futures
from typing import Any, NamedTuple

import jax
import numpy as np
import PIL.Image

from vit_jax import step
from vit_jax.data import batches, listing
from vit_jax.data.batches import ArraySpec
from vit_jax.errors import UserError, check_choice
from vit_jax.inference.images import Image, ImageInputs
from vit_jax.inference.load import Path, backbone, open_model
from vit_jax.inference.predict import text_encoder
from vit_jax.interop.trained import Size, TrainedModel
from vit_jax.nn.maps import HiddenState, choose_layers
from vit_jax.runtime import compile_cache, environment, mesh, sharding
from vit_jax.viz.photo import Fields

EMBEDDING, CLASS, MEAN, PATCHES = KINDS = ('embedding', 'class', 'mean', 'patches')
OF_LAYERS: Mapping[str, Callable[[HiddenState], jax.Array]] = {
    CLASS: lambda state: state.class_token,
    MEAN: lambda state: state.mean,
    PATCHES: lambda state: state.patches,
}
LAST = (-1,)
AHEAD = 2  # batches that are read while one is computed
Features = dict[str, np.ndarray]


def embed(
    path: Path,
    images: Image | Iterable[Image] | None = None,
    *,
    texts: str | Iterable[str] | None = None,
    features: str | Sequence[str] = EMBEDDING,
    layers: int | Sequence[int] = LAST,
    normalized: bool = True,
    image_size: Size | None = None,
    batch_size: int = 32,
    **options: Any,
) -> Features:
    """Compute features of images, read like the model's evaluation images, or of texts.

        features = vit_jax.embed('hf://facebook/dinov2-small', files, features=['class', 'patches'])
        features['patches'].shape  # [images, patches, width]

    Args:
      path: Run folder or checkpoint, see `vit_jax.load`. Of a masked autoencoder or similar model,
        only the encoder is used.
      images: One image or several, see `vit_jax.predict`.
      texts: One text or several instead of images, for CLIP or SigLIP.
      features: 'embedding', the head's input, or the vector that a CLIP or SigLIP compares;
        'class', the class token; 'mean', the mean of the patches; 'patches', each of them; or
        several.
      layers: Layers of 'class', 'mean' and 'patches': 0 for the embedded patches, 1 for the first
        block's output, -1 for the last block's.
      normalized: Whether tokens go through the model's final norm.
      image_size: Height and width to crop and resize to, instead of the model's.
      batch_size: Number of images per batch, over all devices.
      **options: Further keywords of `inference.load.open_model`, such as `step`.

    Returns:
      {name: float32 array} with a row for each image or text; without that axis for a single one.
      'embedding', 'class' and 'mean' are [N D], 'patches' [N n D] with the patches row by row. The
      number of a layer is appended, as in 'class_9', unless only the last one is asked for.

    Raises:
      UserError: if the model or an image cannot be read, or the model lacks these features.
    """
    if (images is None) == (texts is None):
        raise UserError('give either images or texts')
    environment.keep_freed_memory_from_now()
    compile_cache.enable_for_python()
    trained = open_for_features(path, image_size, **options)
    content: Any = images if texts is None else texts
    is_single = isinstance(content, str | os.PathLike | PIL.Image.Image | np.ndarray)
    entries = [content] if is_single else list(content)
    inputs = (
        TextInputs(trained, entries)
        if texts is not None
        else ImageInputs.from_images(trained, entries, image_size)
    )
    requested = Wanted(
        (features,) if isinstance(features, str) else tuple(features),
        (layers,) if isinstance(layers, int) else tuple(layers),
        normalized,
    )
    rows = Embedder(trained, inputs, requested, batch_size).rows(range(len(inputs)))
    if rows.left_out:
        raise next(iter(rows.left_out.values()))
    return {name: x[0] for name, x in rows.features.items()} if is_single else rows.features


def open_for_features(path: Path, image_size: Size | None = None, **options: Any) -> TrainedModel:
    """Open a model, or only its encoder if it has one; see `inference.load.open_model`."""
    return backbone(open_model(path, image_size, **options))


@dataclasses.dataclass(frozen=True)
class Wanted:
    """Features to compute.

    Attributes:
      kinds: Some of KINDS, see `embed`.
      layers, normalized: See `embed`.

    Raises:
      UserError: for an unknown kind, or layers of only the kind 'embedding'.
    """

    kinds: tuple[str, ...] = (EMBEDDING,)
    layers: tuple[int, ...] = LAST
    normalized: bool = True

    def __post_init__(self) -> None:
        for kind in self.kinds:
            check_choice('feature', kind, KINDS)
        if not self.kinds or (self.kinds == (EMBEDDING,) and self.layers != LAST):
            raise UserError(f'layers have the features {", ".join(OF_LAYERS)}: name one or more')


class TextInputs:
    """Texts as inputs of a CLIP or SigLIP.

    Raises:
      UserError: if the model embeds no texts, its vocabulary is missing, or a text is empty.
    """

    column, predicted = 'text', 'text'
    labels, contents = None, ()

    def __init__(self, trained: TrainedModel, texts: Sequence[str]):
        if 'text' not in {field.name for field in dataclasses.fields(trained.task)}:
            raise UserError(
                f'{trained.path}: model {trained.settings.model.name!r} embeds no texts; CLIP and '
                'SigLIP do'
            )
        if (encode := text_encoder(trained)) is None:
            raise UserError(
                f'{trained.path}: the checkpoint has no vocabulary for texts: put the tokenizer of '
                'its authors beside it, spiece.model or tokenizer.json'
            )
        self._field, self._encode, self.names = trained.task.text, encode, list(texts)

    def __len__(self) -> int:
        return len(self.names)

    def read(self, number: int) -> tuple[int, Fields]:
        """Return the number and ids of a text; raise UserError if it is empty."""
        return number, {self._field: self._encode(self._field, self.names[number])}


Inputs = ImageInputs | TextInputs


class Rows(NamedTuple):
    """Features of some inputs.

    Attributes:
      numbers: Numbers of the inputs that could be read.
      features: {name: [numbers ...]}.
      left_out: The errors of the others.
    """

    numbers: list[int]
    features: Features
    left_out: dict[int, UserError]


class Embedder:
    """Features of inputs by number, computed in batches on all devices.

    Attributes:
      batch_size: A multiple of the number of devices.
    """

    def __init__(
        self,
        trained: TrainedModel,
        inputs: ImageInputs | TextInputs,
        wanted: Wanted,
        batch_size: int,
    ):
        if not len(inputs):
            raise UserError('no images or texts to embed')
        if jax.process_count() > 1:
            raise UserError(
                'embed runs in a single process, on all of its devices: give each process of a job '
                'separate images and --out'
            )
        if isinstance(inputs, TextInputs) and wanted.kinds != (EMBEDDING,):
            raise UserError("texts have only the feature 'embedding'")
        self.inputs, self._trained, self._wanted = inputs, trained, wanted
        self._layout = sharding.make_layout(mesh.usable_devices())
        shards = self._layout.num_shards
        self.batch_size = -(-min(batch_size, len(inputs)) // shards) * shards
        self._variables = self._layout.create(lambda loaded: loaded, trained.variables)
        self._step = self._layout.compile_eval(self._compute)

    def describe(self) -> dict[str, Any]:
        """Describe what determines the features, as JSON values."""
        leaves = map(np.asarray, jax.tree.leaves(self._trained.variables))
        return {
            'model': listing.digest_of(*leaves),
            'inputs': listing.digest_of(self.inputs.names, self.inputs.contents),
            'image size': list(self._trained.image_size or ()),
            'transforms': self._trained.transforms,
            'features': list(self._wanted.kinds),
            'layers': list(self._wanted.layers),
            'normalization': self._wanted.normalized,
            'batch size': self.batch_size,
        }

    def rows(
        self, numbers: Sequence[int], advance: Callable[[int], object] = lambda count: None
    ) -> Rows:
        """Return the features of the inputs with these numbers.

        Args:
          numbers: Numbers of the inputs.
          advance: Called after each batch with the number of its inputs.

        Raises:
          UserError: if none can be read, or they are of several sizes and patches are wanted.
        """
        read_rows: list[int] = []
        chunks: list[Features] = []
        errors: dict[int, UserError] = {}
        for chunk in self._read_ahead(numbers):
            examples = {i: x for i, x in chunk.items() if not isinstance(x, UserError)}
            errors |= {i: x for i, x in chunk.items() if isinstance(x, UserError)}
            if examples:
                read_rows += examples
                chunks.append(self._embed(list(examples.values())))
            advance(len(chunk))
        return Rows(read_rows, _concatenate(chunks), errors)

    def row_bytes(self) -> int:
        """Return the bytes of one input's features; UserError if no input can be read."""
        count = len(self.inputs)
        example = next(
            (x for x in map(self._read, range(count)) if not isinstance(x, UserError)), None
        )
        if example is None and count == 1:
            self.inputs.read(0)
        if example is None:
            raise UserError(f'none of the {count} {self.inputs.column}s can be read')
        shapes = jax.eval_shape(self._compute, self._variables, self._batch([example]))
        return sum(x.size // self.batch_size * 4 for x in shapes.values())

    def _read(self, number: int) -> tuple[int, Fields] | UserError:
        try:
            return self.inputs.read(number)
        except UserError as error:
            return error

    def _read_ahead(self, numbers: Sequence[int]) -> Iterator[dict[int, Any]]:
        """Yield batches of {number: arrays or error}, while threads read the next ones."""
        with futures.ThreadPoolExecutor(environment.available_cores()) as pool:
            pending: collections.deque[dict[int, futures.Future[Any]]] = collections.deque()
            for start in range(0, len(numbers), self.batch_size):
                chunk = numbers[start : start + self.batch_size]
                pending.append({i: pool.submit(self._read, i) for i in chunk})
                if len(pending) > AHEAD:
                    yield {i: future.result() for i, future in pending.popleft().items()}
            while pending:
                yield {i: future.result() for i, future in pending.popleft().items()}

    def _embed(self, examples: Sequence[tuple[int, Fields]]) -> Features:
        """Compute features of up to `batch_size` examples, whose shapes may differ."""
        groups: dict[Any, list[int]] = {}
        for row, (_, fields) in enumerate(examples):
            shape = tuple((name, x.shape) for name, x in fields.items())
            groups.setdefault(shape, []).append(row)
        batches = []
        for rows in groups.values():
            batch = self._layout.put_batch(self._batch([examples[row] for row in rows]))
            outputs = jax.device_get(self._step(self._variables, batch))
            batches.append({name: x[: len(rows)] for name, x in outputs.items()})
        order = np.argsort(np.concatenate(list(groups.values())))
        return {name: x[order] for name, x in _concatenate(batches).items()}

    def _batch(self, examples: Sequence[tuple[int, Fields]]) -> dict[str, np.ndarray]:
        spec = {name: ArraySpec.from_value(x) for name, x in examples[0][1].items()}
        batch, index, mask = batches.empty_batch(spec, self.batch_size)
        for row, (number, fields) in enumerate(examples):
            index[row, 0], mask[row, 0] = number, 1
            for name, x in fields.items():
                batch[name][row] = x
        return batch

    def _compute(self, variables: Any, batch: dict[str, jax.Array]) -> dict[str, jax.Array]:
        """Return the wanted features of a batch, by the names of their columns."""
        model, task, requested = self._trained.model, self._trained.task, self._wanted
        features = {}
        if EMBEDDING in requested.kinds:
            apply = step.bind(model, task, variables, batch)
            predictions = task.predict(apply, batch) if task.predicts else {}
            output = predictions.get(self.inputs.predicted)
            if output is None or output.ndim != 2:
                raise UserError(
                    f'{self._trained.path}: the model has no embedding of a whole image: ask for '
                    f'{" or ".join(OF_LAYERS)}'
                )
            features[EMBEDDING] = output
        if kinds := [kind for kind in requested.kinds if kind != EMBEDDING]:
            _, states = model.hidden_states(variables, *task.inputs(batch))
            norm = model.final_norm_of(variables['params']) if requested.normalized else None
            for number in choose_layers(len(states), requested.layers):
                state = states[number]
                state = dataclasses.replace(state, tokens=norm(state.tokens)) if norm else state
                ending = '' if requested.layers == LAST else f'_{number}'
                features |= {f'{kind}{ending}': OF_LAYERS[kind](state) for kind in kinds}
        return {name: x.astype(np.float32) for name, x in features.items()}


def column_order(name: str) -> tuple[int, int]:
    """Return the sort key of a feature: its kind and layer number."""
    kind, _, layer = name.partition('_')
    return KINDS.index(kind), int(layer or 0)


def _concatenate(chunks: Sequence[Features]) -> Features:
    if not chunks:
        return {}
    for name, first in chunks[0].items():
        if any(chunk[name].shape[1:] != first.shape[1:] for chunk in chunks):
            raise UserError(
                f'{name}: the images have different numbers of patches, which cannot form one '
                'array: give an image size'
            )
    names = sorted(chunks[0], key=column_order)  # JAX sorts them as strings
    return {name: np.concatenate([chunk[name] for chunk in chunks]) for name in names}
