"""Batches of examples of one shape, or of images padded to one of a few sizes."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import math
import pathlib
import sys
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from vit_jax.data import order
from vit_jax.data.batches import ArraySpec, Batch, Process, Shape, Spec, as_facts, zeros
from vit_jax.data.read_ahead import Loading, read_ahead
from vit_jax.data.records import BrokenRecord, Record, SourceInfo, check_ids, first_readable
from vit_jax.data.rng import example_rng
from vit_jax.data.splits import Cached, Subset
from vit_jax.data.transforms import Transforms, geometry
from vit_jax.data.vocabulary import Tokenizer
from vit_jax.errors import UserError

Size = tuple[int, int]  # height and width in pixels


class FixedShapes:
    """A `Dataset` of examples that have one shape after the transforms.

    With `sizes` every image is shrunk if need be and padded to one of these sizes, and its real
    pixels are marked by `pixel_mask`. A batch of training has one size, which is a function of
    (seed, k); evaluation pads everything to the last size, so that no result depends on the batch.

    Args:
      source: the examples.
      transforms: applied to each of them.
      batch_size: examples of a global batch.
      seed: of order, transforms and sizes, 0 or more.
      multiple: the rows of evaluation batches are a multiple of it.
      process: whose rows to make.
      sizes: heights and widths in pixels that images are padded to; none for examples of one shape.
      cache: keeps decoded records in memory, so that each is decoded once.
      loading: how batches are read ahead.
    """

    def __init__(
        self,
        source: Subset,
        transforms: Transforms,
        batch_size: int,
        *,
        seed: int = 0,
        multiple: int = 1,
        process: Process = Process(),  # noqa: B008  frozen
        sizes: Sequence[Size] = (),
        cache: bool = False,
        loading: Loading = Loading(),  # noqa: B008  frozen
    ):
        if seed < 0:
            raise UserError(f'seed={seed}: must be 0 or more')
        if cache and loading.workers:
            raise UserError(
                f'cache=True with workers={loading.workers}: processes do not share a cache; set '
                'one of them to 0'
            )
        if any(len(size) != 2 or min(size) < 1 for size in sizes):
            raise UserError(
                f'sizes={tuple(sizes)}: write heights and widths of at least 1, as ((480, 640),)'
            )
        self.source, self.batch_size = source, batch_size
        self._transforms, self._seed, self._multiple = transforms, seed, multiple
        self._process, self._loading = process, loading
        self._sizes: tuple[Size | None, ...] = tuple(sizes) or (None,)
        self._view = source.cached if cache else source

    @property
    def examples(self) -> Subset:
        return self.source

    @property
    def info(self) -> SourceInfo:
        return self.source.info

    @property
    def vocab(self) -> Tokenizer | None:
        return self._transforms.vocab

    @functools.cached_property
    def unit(self) -> str:
        """What rates and batch sizes count."""
        return 'images' if 'image' in self.spec else 'examples'

    @functools.cached_property
    def spec(self) -> Spec:
        return self._spec(self._sizes[-1])

    @property
    def image_size(self) -> Size | None:
        if 'image' not in self.spec:
            return None
        height, width = self.spec['image'].shape[:2]
        return height, width

    @property
    def num_examples(self) -> int:
        return len(self.source)

    @property
    def notes(self) -> tuple[str, ...]:
        return ()

    @property
    def examples_per_step(self) -> float:
        return self.batch_size

    @functools.cached_property
    def shapes(self) -> tuple[Shape, ...]:
        """The kinds of training batches, one a size.

        Raises:
          UserError: if there are fewer examples than rows, or no batch can be made of them.
        """
        if self.batch_size > len(self.source):
            raise UserError(
                f'{self.source.title}: {len(self.source)} examples are fewer than '
                f'batch_size={self.batch_size}; lower it or take a larger split'
            )
        share = 1 / len(self._sizes)
        return tuple(Shape(self.batch_size, share, self._spec(size)) for size in self._sizes)

    def train_batches(self, start_step: int = 0) -> Iterator[Batch]:
        specs = tuple(shape.spec for shape in self.shapes)
        loader = self._loader(self.batch_size, specs)
        return read_ahead(loader.train_batch, start_step, sys.maxsize, self._loading, self.source)

    def eval_batches(self) -> Iterator[Batch]:
        # Padding is masked, so that any multiple of the devices gives the same result.
        unit = math.lcm(self._multiple, self._process.count)
        rows = -(-min(self.batch_size, len(self.source)) // unit) * unit
        loader = self._loader(rows, (self.spec,))
        batches = -(-len(self.source) // rows)
        return read_ahead(loader.eval_batch, 0, batches, self._loading, self.source)

    def count(self, batch: Batch) -> dict[str, int]:
        rows = len(next(iter(batch.values())))
        return {self.unit: rows * self._process.count}

    def facts(self) -> dict[str, Any]:
        return {
            'class_names': list(self.info.class_names),
            'image': raw_images(self.source),
            'input_size': self.image_size,
            'num_examples': self.num_examples,
            'shapes': as_facts(self.shapes),
        }

    def text(self, index: int) -> Record:
        del index  # an example of one shape is no text
        return {}

    def check(self, folder: pathlib.Path) -> None:
        del folder

    def save(self, folder: pathlib.Path) -> None:
        del folder

    def _loader(self, batch_size: int, specs: tuple[Spec, ...]) -> ExampleLoader:
        rows = self._process.rows(batch_size)
        sizes = self._sizes[-len(specs) :]
        return ExampleLoader(
            self._view, self._transforms, specs, sizes, batch_size, rows, self._seed
        )

    def _spec(self, size: Size | None) -> Spec:
        index, record = first_readable(self.source, 0)
        try:
            record = fitted(self._transforms(record, example_rng(0, 0)), size)
        except UserError as error:
            raise UserError(f'{self.source.record_name(index)}: {error}') from error
        if texts := [key for key, value in record.items() if isinstance(value, str)]:
            raise UserError(
                f'{self.source.title}: {texts[0]!r} is text; make ids of it with config.data.vocab '
                "and transforms='tokenize', and batches with config.data.buckets=(16, 32, 64)"
            )
        return {key: ArraySpec.of(value) for key, value in record.items()}


@dataclasses.dataclass(frozen=True)
class ExampleLoader:
    """Makes one process's rows of batch k.

    Example g of training is row g % batch_size of batch g // batch_size. It is example
    shuffled(g % N) of epoch g // N, and its transforms draw from a generator keyed by (seed, g).

    Attributes:
      source, transforms: of the examples.
      specs: of one example, one for each of `sizes`.
      sizes: that images are padded to; (None,) for none.
      batch_size: rows of a global batch.
      rows: this process's.
      seed: of the order of training, the transforms and the sizes.
    """

    source: Subset | Cached
    transforms: Transforms
    specs: tuple[Spec, ...]
    sizes: tuple[Size | None, ...]
    batch_size: int
    rows: range
    seed: int

    def train_batch(self, k: int) -> Batch:
        kind = 0
        if len(self.sizes) > 1:
            kind = int(np.random.default_rng((self.seed, k)).integers(len(self.sizes)))
        examples = k * self.batch_size + np.arange(self.rows.start, self.rows.stop)
        batch = zeros(self.specs[kind], len(self.rows))
        indices = _train_indices(examples, len(self.source), self.seed)
        for row, (g, index) in enumerate(zip(examples.tolist(), indices, strict=True)):
            found, record = first_readable(self.source, index)
            self._put(batch, row, found, record, self.seed, g, kind)
        return batch

    def eval_batch(self, k: int) -> Batch:
        batch = zeros(self.specs[-1], len(self.rows))
        if taken := {'index', 'mask'} & batch.keys():
            raise UserError(f'{min(taken)!r} of a record is what batches call something else')
        index, mask = np.zeros(len(self.rows), np.int32), np.zeros(len(self.rows), np.float32)
        first = k * self.batch_size + self.rows.start
        for row, i in enumerate(range(first, min(first + len(mask), len(self.source)))):
            with contextlib.suppress(BrokenRecord):
                self._put(batch, row, i, self.source[i], 0, i, -1)
                index[row], mask[row] = i, 1
        return {**batch, 'index': index, 'mask': mask}

    def _put(
        self, batch: Batch, row: int, index: int, record: Record, seed: int, draw: int, kind: int
    ) -> None:
        """Transforms a record with the random numbers of (seed, draw) into a row."""
        try:
            record = self.transforms(record, example_rng(seed, draw))
            record = fitted(record, self.sizes[kind])
            for key, array in batch.items():
                array[row] = _checked(key, record[key], array, self.source.info.vocab_size)
        except UserError as error:
            raise UserError(f'{self.source.record_name(index)}: {error}') from error


def fitted(record: Record, size: Size | None) -> Record:
    """The record with its image padded to `size`, and `pixel_mask`; None leaves it as it is."""
    return record if size is None else geometry.fit(record, size)


def raw_images(source: Subset) -> dict[str, Any]:
    """What raw images of a source are like: {channels, size: [H, W] or None where it varies}.

    Empty for a source without images. Checkpoints keep it, so that a trained model reads new images
    without its data.
    """
    places = (0, len(source) // 2, len(source) - 1)
    records = [first_readable(source, i)[1] for i in places]
    if any('image' not in record for record in records):
        return {}
    shapes = {record['image'].shape for record in records}
    height, width, channels = next(iter(shapes))
    return {'channels': channels, 'size': [height, width] if len(shapes) == 1 else None}


def _train_indices(examples: np.ndarray, size: int, seed: int) -> list[int]:
    """The index in the source of each training example; a batch may span epochs."""
    epochs, positions = np.divmod(examples, size)
    indices = np.empty_like(examples)
    for epoch in np.unique(epochs):
        now = epochs == epoch
        indices[now] = order.shuffled(positions[now], size=size, seed=seed, epoch=int(epoch))
    return indices.tolist()


def _checked(key: str, value: Any, array: np.ndarray, vocab_size: int) -> Any:
    """The value of a record if it fits into a row of `array` as it is; raises UserError if not."""
    shape = array.shape[1:]
    # Assignment would broadcast one channel to three.
    if np.shape(value) != shape:
        if len(shape) == 1:
            how = 'set config.data.buckets=(16, 32, 64)'
        else:
            how = "with 'resize(224)'" if key == 'image' else "with 'pad_objects(100)'"
        raise UserError(
            f'{key} of shape {np.shape(value)} among others of {shape}; bring all to one size, '
            f'for example {how}'
        )
    if array.dtype == np.int32:
        check_ids(key, np.asarray(value), vocab_size if len(shape) == 1 else 0)
    return value
