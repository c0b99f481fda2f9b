"""Batches for training and evaluation: data set = source x transforms x plan.

Batch k of training is a pure function of (seed, k). So resuming is `train_batches(k)`, and any
number of processes, workers and threads sees the same examples in the same order.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
import math
import pathlib
import statistics
import sys
import time
from collections.abc import Callable, Generator, Iterator
from typing import Any

import cloudpickle
import numpy as np

from vit_jax.array_types import Float
from vit_jax.config.run import Data
from vit_jax.data import plans, sources, vocabulary
from vit_jax.data.batches import (
    ArraySpec,
    Batch,
    Process,
    Shape,
    Spec,
    as_facts,
    empty_batch,
)
from vit_jax.data.plans import Plan, base, fixed
from vit_jax.data.plans.base import Examples
from vit_jax.data.read_ahead import Loading, Watched, Work, read_ahead
from vit_jax.data.records import (
    BrokenRecord,
    Listing,
    Record,
    SourceInfo,
    check_ids,
    example_rng,
    first_readable,
)
from vit_jax.data.splits import Subset
from vit_jax.data.transforms import Transforms, parse_transforms, without_annotations
from vit_jax.errors import UserError
from vit_jax.runtime.watchdog import Stopping, no_stop
from vit_jax.storage import paths, run_folder

TOGETHER = 16  # examples whose files are all read before the first is decoded
SMALL = 2**18  # bytes; a smaller batch is made faster than a thread hands it over
AHEAD = 64  # rows whose examples are requested before they are needed


class Dataset:
    """Batches of the examples of a split; what only training requires is checked on first use.

    Every batch holds this process's rows {name: array [b, ...]}, with `index`, int32, the index of
    each example in the source, and `mask`, float32, 0 for padding. Both are [b], or [b n] if a row
    holds up to n examples, see `Plan.slots`.

    Attributes:
      plan: Assignment of examples to batches.
      source: Examples before the transforms; counts broken records.
      batch_size: Size of a global batch, in examples, or in tokens if the plan counts tokens.
      loading: Requested threads and processes that make batches.
      vocab: Vocabulary that encodes texts, or None.
    """

    def __init__(
        self,
        plan: Plan,
        process: Process = Process(),  # noqa: B008  frozen
        loading: Loading = Loading(),  # noqa: B008  frozen
    ):
        """Open a data set.

        Args:
          plan: Plan of a source and transforms.
          process: Process whose rows to make.
          loading: Options for reading ahead.

        Raises:
          UserError: if a cache is combined with worker processes, which cannot share it.
        """
        if loading.workers and plan.examples.cache:
            raise UserError(
                f'cache=True with workers={loading.workers}: processes do not share a cache; set '
                'one of them to 0'
            )
        self.plan, self.source, self.batch_size = plan, plan.examples.source, plan.batch_size
        self.loading, self._process, self.vocab = loading, process, plan.examples.vocab

    @property
    def info(self) -> SourceInfo:
        """Facts about the data for the model."""
        return self.plan.info

    @property
    def spec(self) -> Spec:
        """Arrays of one of the largest examples, in training or evaluation."""
        return self.plan.spec

    @functools.cached_property
    def shapes(self) -> tuple[Shape, ...]:
        """Kinds of training batches; the last one has the largest examples.

        Raises:
          UserError: if the examples do not fill a batch.
        """
        return self.plan.shapes

    @property
    def image_size(self) -> tuple[int, int] | None:
        """Height and width in pixels of the images of the largest batches; None without images."""
        if 'image' not in self.spec:
            return None
        height, width = self.spec['image'].shape[-3:-1]
        return height, width

    @property
    def num_examples(self) -> int:
        """Number of examples in a training epoch."""
        return len(self.plan.members)

    def train_batches(
        self, start_step: int = 0, stopping: Stopping = no_stop, stop_step: int = sys.maxsize
    ) -> Generator[Batch, None, None]:
        """Yield shuffled batches for the steps from `start_step` up to, but excluding, `stop_step`.

        Raises `Interrupted` if none is ready and `stopping` requests a stop.
        """
        for shape in self.shapes:
            self._process.rows(shape.rows)
        make = Loader(self.plan, self._process).train_batch
        return self._batches(make, start_step, stop_step, stopping)

    def eval_batches(self, stopping: Stopping = no_stop) -> Iterator[Batch]:
        """Yield every example once, in the same number of batches on every process.

        Raises `Interrupted` if none is ready and `stopping` requests a stop.
        """
        make = Loader(self.plan, self._process).eval_batch
        return self._batches(make, 0, self.plan.eval_steps, stopping)

    def reading(self, batches: int = sys.maxsize) -> Loading:
        """Choose the threads and processes that make this number of batches."""
        cached = self.plan.examples.cache
        return self.loading.resolve(None if cached else lambda: self._estimate_work(batches))

    def _estimate_work(self, batches: int) -> Work:
        """Estimate the work of making batches in this process."""
        all_parts, local_parts = self._process.count, len(self._process.parts)
        row = sum(math.prod(x.shape) * x.dtype.itemsize for x in self.spec.values())
        rows = min(self.batch_size, len(self.plan.rows)) * local_parts / all_parts
        examples = self.plan.examples_per_row * rows * batches
        return Work(self._seconds, examples, int(row * rows), self._listing_bytes)

    @functools.cached_property
    def _seconds(self) -> float:
        """CPU seconds per example, without waiting for its file."""
        durations, last = [], len(self.plan.examples) - 1
        for index in (0, 0, last // 2, last):  # the first one takes longer
            start_time = time.thread_time()
            self.plan.examples.first_readable(index, self.plan.seed, index)
            durations.append(time.thread_time() - start_time)
        return statistics.median(durations[1:])

    @functools.cached_property
    def _listing_bytes(self) -> int | None:
        try:
            return len(cloudpickle.dumps(self.plan))
        except Exception:  # pickling raises any type
            return None

    def _batches(
        self, make: Callable[[int], Batch], start: int, stop: int, stopping: Stopping
    ) -> Generator[Batch, None, None]:
        """Yield make(start), ..., make(stop - 1).

        Threads or processes read ahead until making a batch from memory is faster than handing it
        over.
        """
        k, rows = start, self.batch_size // self._process.count
        by_array = type(self.plan) is fixed.Plan
        ahead: Watched[Batch] | None = None
        try:
            while k < stop:
                stacked = self.plan.examples.stacked if by_array else None
                if stacked is not None and stacked.nbytes * rows <= SMALL:
                    break
                if ahead is None:
                    loading = self.reading(stop - k)
                    ahead = read_ahead(make, k, stop, loading, self.source, stopping)
                yield next(ahead)
                k += 1
        finally:
            if ahead is not None:
                ahead.close()
        for number in range(k, stop):
            yield make(number)

    def count(self, batch: Batch) -> dict[str, int]:
        """Scale the counts over this process's rows of a training batch to the global batch."""
        all_parts, local_parts = self._process.count, len(self._process.parts)
        return {name: n * all_parts // local_parts for name, n in self.plan.tally(batch).items()}

    def seen(self, steps: int) -> dict[str, float]:
        """Return each source's share of a mixture's first batches; empty for a single source."""
        mixture = self.source.mixture
        return mixture.seen(steps * self.batch_size, self.plan.seed) if mixture else {}

    @functools.cached_property
    def class_counts(self) -> np.ndarray | None:
        """Number of examples, or of objects, in each class, int64 [num_classes]; None if counting
        required reading examples.
        """
        return self.source.class_counts()

    @functools.cached_property
    def listing(self) -> Listing:
        """Digests of the examples' metadata, computed without reading examples."""
        return self.source.listing()

    def facts(self) -> dict[str, Any]:
        """Return the facts that checkpoints store, so that a model can be used without its data."""
        return {
            'class_names': list(self.info.class_names),
            **({} if self.class_counts is None else {'class_counts': self.class_counts.tolist()}),
            'image': self._raw_images,
            'input_size': self.image_size,
            'listing': self.listing._asdict(),
            'num_examples': self.num_examples,
            'shapes': as_facts(self.shapes),
            **({'class_ids': list(self.info.class_ids)} if self.info.class_ids else {}),
            **({'vocab': self._file.digest} if self._file else {}),
        }

    @functools.cached_property
    def _raw_images(self) -> dict[str, Any]:
        # Read once: saving must not wait for stalled data.
        return raw_images(self.source)

    def read(self, index: int) -> Record:
        """Read an evaluation example, transformed but not padded."""
        return self.plan.examples.read(index, draw=index)

    def text(self, index: int) -> Record:
        """Return the texts of an example before encoding, and its `image_id` as text; empty if it
        has neither.
        """
        return self.plan.examples.text(index)

    def corners(
        self, index: int, size: tuple[int, int], frame: tuple[int, int]
    ) -> Float[np.ndarray, '2 2']:
        """Locate the source's image of height and width `size` in the model's image, `frame`.

        Returns:
          (x, y) in pixels of the model's image of the upper left and the lower right corner; both
          may be outside.

        Raises:
          UserError: if the transforms do not move points with the image.
        """
        from vit_jax.data.transforms import geometry  # here, as few evaluators ask

        key = (index if self._movement.random else 0, size, frame)
        if key not in self._corners:
            record: Record = {
                'image': np.zeros((*size, self.spec['image'].shape[-1]), np.uint8),
                'points': np.array([[0, 0], size[::-1]], np.float32),
            }
            record = self._movement(record, example_rng(0, index))
            if geometry.image_size(record) != frame:
                record = geometry.shrink_and_pad(record, frame)
            self._corners[key] = record['points']
        return self._corners[key]

    @functools.cached_property
    def _movement(self) -> Transforms:
        return parse_transforms(without_annotations(self.plan.examples.transforms.spec))

    @functools.cached_property
    def _corners(self) -> dict[tuple[Any, ...], np.ndarray]:
        return {}

    def check(self, folder: pathlib.Path) -> None:
        """Raise UserError if the run in `folder` was made with different data files."""
        vocabulary.require_same(self._file, folder)

    def save(self, folder: pathlib.Path) -> None:
        """Save the files that later commands need in a run folder."""
        if self._file is not None:
            paths.write_atomic(folder / run_folder.VOCAB, self._file.model)

    @property
    def _file(self) -> vocabulary.Vocabulary | None:
        """Vocabulary to copy into the run folder."""
        return self.vocab if isinstance(self.vocab, vocabulary.Vocabulary) else None


def open_examples(data: Data, numbering: SourceInfo | None = None) -> Examples:
    """Open the source of a data set; classes with ids are numbered as in `numbering`.

    Raises:
      UserError: if the split is missing, or the source cannot be opened.
    """
    loaded = vocabulary.load_vocabulary(data.vocab) if data.vocab else None
    parsed = parse_transforms(data.transforms, loaded)
    if data.split is None:
        raise UserError(f'{data.source}: missing split; set data.split, such as "train"')
    source = sources.open_source(data.source, data.split)
    if data.classes is not None:
        source = source.only_classes(data.classes)
    if numbering is not None and numbering != source.info:
        source = source.numbered_as(numbering)
    return Examples(source, parsed, data.cache)


def make_plan(data: Data, examples: Examples, **options: Any) -> Plan:
    """Make the plan of a `data` section; `options` are the plan's other keywords.

    Raises:
      UserError: if several keys define how to make batches.
    """
    values = {key: getattr(data, key) for key in ('buckets', 'sizes', 'plan')}
    choices = {key: value for key, value in values.items() if value}
    if len(choices) > 1:
        raise UserError(
            f'data: {" and ".join(choices)} each define how to make batches; set only one of them'
        )
    if data.buckets:
        choices['count'] = data.count
    name = choices.pop('plan', next(iter(choices), 'fixed'))
    return plans.make_plan(name, examples, **options, **choices)


def open_dataset(
    data: Data,
    batch_size: int,
    seed: int = 0,
    multiple: int = 1,
    process: Process = Process(),  # noqa: B008  frozen
    numbering: SourceInfo | None = None,
) -> Dataset:
    """Open the data of `config.data`, or of an entry of `config.evals`.

    Args:
      data: Config section.
      batch_size: Size of a global batch over all processes, in examples, or in tokens if the plan
        counts tokens.
      seed: Seed of the training order and transforms.
      multiple: Divisor of the rows of an evaluation batch.
      process: This process among those that share every batch.
      numbering: Classes whose numbers the data take over, if both have ids.

    Raises:
      UserError: if the data do not exist, or do not fill a batch.
    """
    plan = make_plan(
        data,
        open_examples(data, numbering),
        batch_size=batch_size,
        seed=seed,
        multiple=math.lcm(multiple, process.count),
    )
    return Dataset(plan, process, Loading(data.workers, data.threads, data.stall_seconds))


def raw_images(source: Subset) -> dict[str, Any]:
    """Describe a source's raw images: {channels, size: [H, W] or None if it varies}.

    Empty for a source without images. Checkpoints store the description, so that a trained model
    reads new images without its data.
    """
    indices = (0, len(source) // 2, len(source) - 1)
    records = [first_readable(source, i)[1] for i in indices]
    if any('image' not in record for record in records):
        return {}
    shapes = {record['image'].shape for record in records}
    height, width, channels = next(iter(shapes))[-3:]
    return {'channels': channels, 'size': [height, width] if len(shapes) == 1 else None}


@dataclasses.dataclass(frozen=True)
class Loader:
    """Make batches by their numbers.

    Row r of training batch k draws from the generator of (seed, k * R + r), where the largest
    batch has R rows; an evaluation example draws from the generator of (0, its index).

    Attributes:
      plan: Assignment of examples to batches.
      process: Process whose rows to make.
    """

    plan: Plan
    process: Process

    def train_batch(self, k: int) -> Batch:
        """Make this process's rows of training batch k."""
        spec, indices = self.plan.batch(k)
        slots = indices[0].size
        draws = k * self._rows * slots + np.arange(indices.size).reshape(-1, slots)
        return self._batch(spec, indices, draws, self.plan.seed, self.plan.replaces_broken)

    def eval_batch(self, k: int) -> Batch:
        """Make this process's rows of evaluation batch k."""
        spec, indices = self.plan.eval_batch(k)
        draws = indices.reshape(len(indices), -1)
        return self._batch(spec, indices, draws, seed=0, replace=False)

    @functools.cached_property
    def _rows(self) -> int:
        return max(shape.rows for shape in self.plan.shapes)

    @functools.cached_property
    def _dtypes(self) -> dict[str, np.dtype]:
        """Dtypes of the first example; empty for a user's plan that takes texts."""
        with contextlib.suppress(UserError):
            return {name: spec.dtype for name, spec in self.plan.spec_of(self.plan.example).items()}
        return {}

    def _batch(
        self, spec: Spec, indices: np.ndarray, draws: np.ndarray, seed: int, replace: bool
    ) -> Batch:
        examples, slots = self.plan.examples, self.plan.slots
        if indices.shape[1:] != slots:
            raise UserError(
                f'{type(self.plan).__module__}: examples of shape {indices.shape} do not match '
                f'`Plan.slots`, {slots}; override `rows` or `slots`, or put one example in a row'
            )
        local_rows = self.process.rows(len(indices))
        batch, index, mask = empty_batch(spec, len(local_rows), slots)
        stacked = examples.stacked if type(self.plan) is fixed.Plan else None
        if stacked is not None and stacked.spec == spec:
            real = np.flatnonzero(indices[local_rows] != base.NONE)
            numbers = indices[local_rows][real]
            arrays = stacked.rows(numbers, seed, draws[local_rows][real, 0])
            for name, rows in (arrays | {'index': numbers, 'mask': 1}).items():
                batch[name][real] = rows
            return batch
        file_records: dict[int, Record] = {}
        rows_at_once = max(1, TOGETHER // index.shape[1])
        next_indices = (i for i in indices[local_rows].ravel().tolist() if i != base.NONE)
        examples.expect(itertools.islice(next_indices, AHEAD * index.shape[1]))
        indices_of_rows = indices[local_rows].reshape(index.shape).tolist()
        draws_of_rows = draws[local_rows].tolist()
        for row in range(len(local_rows)):
            examples.expect(itertools.islice(next_indices, index.shape[1]))
            if row % rows_at_once == 0 and examples.transforms.crop_first:
                group = indices[local_rows[row : row + rows_at_once]].ravel().tolist()
                file_records = examples.read_files(i for i in group if i != base.NONE)
            entries = [
                self._read(i, seed, draw, replace, file_records.get(i))
                for i, draw in zip(indices_of_rows[row], draws_of_rows[row], strict=True)
                if i != base.NONE
            ]
            if readable := [entry for entry in entries if entry is not None]:
                numbers, records = zip(*readable, strict=True)
                index[row, : len(readable)], mask[row, : len(readable)] = numbers, 1
                self._fill({name: batch[name][row, ...] for name in spec}, spec, numbers, records)
        return batch

    def _read(
        self, index: int, seed: int, draw: int, replace: bool, record: Record | None
    ) -> tuple[int, Record] | None:
        """Return an example and its index; None for a broken one that is not replaced.

        `record` is the untransformed example, if it has been read already.
        """
        if replace:
            index, record = self.plan.examples.first_readable(index, seed, draw, record)
        else:
            try:
                record = self.plan.examples.read(index, seed, draw, record)
            except BrokenRecord:
                return None
        try:
            check_dtypes(record, self._dtypes)
        except UserError as error:
            raise UserError(f'{self.plan.examples.source.record_name(index)}: {error}') from error
        return index, record

    def _fill(
        self, row: Batch, spec: Spec, numbers: tuple[int, ...], records: tuple[Record, ...]
    ) -> None:
        """Copy examples into the arrays of a row."""
        source = self.plan.examples.source
        try:
            joined = self.plan.join(records, spec)
            for key, array in row.items():
                array[...] = check_value(key, joined[key], array, source.info.vocab_size)
        except UserError as error:
            names = ', '.join(map(source.record_name, numbers))
            raise UserError(f'{names}: {error}') from error


def check_dtypes(record: Record, dtypes: dict[str, np.dtype]) -> None:
    """Raise UserError unless a record has the arrays and dtypes of the first record.

    Assignment to a batch casts silently: 21200 to 208, NaN to 0.
    """
    for name, dtype in dtypes.items():
        if name not in record:
            raise UserError(
                f'{name!r} is missing, unlike in the first example; this has {", ".join(record)}'
            )
        value = record[name]
        if getattr(value, 'dtype', None) == dtype or (type(value) is int and dtype == np.int32):
            continue
        try:
            value = np.asarray(value)
        except ValueError as error:  # lists of different lengths
            raise UserError(f'{name!r} is not an array: {error}') from error
        if ArraySpec.from_value(value).dtype != dtype:
            raise UserError(
                f'{name!r} is {value.dtype}, but {dtype} in the first example; use one dtype in '
                'all examples'
            )


def check_value(key: str, value: Any, array: np.ndarray, vocab_size: int) -> Any:
    """Return the value of a row if it has the shape and dtype of `array`; else raise UserError."""
    is_float_array = isinstance(value, np.ndarray) and value.dtype == array.dtype != np.int32
    if (
        is_float_array and value.shape == array.shape
    ):  # the common case; the checks below take ten times as long
        return value
    if type(value) is int and array.shape == () and abs(value) < 2**31 and array.dtype == np.int32:
        return value  # a class label
    # Assignment broadcasts one channel to three.
    if np.shape(value) != array.shape:
        if array.ndim == 1:
            how = 'set config.data.buckets=(16, 32, 64)'
        else:
            how = "with 'resize(224)'" if key == 'image' else "with 'pad_objects(100)'"
        raise UserError(
            f'{key} has shape {np.shape(value)}, other examples have {array.shape}; bring all to '
            f'one size, for example {how}'
        )
    if (dtype := ArraySpec.from_value(value).dtype) != array.dtype:
        raise UserError(f'{key} is {dtype}, in other examples {array.dtype}; use one dtype for all')
    if array.dtype == np.int32:
        check_ids(key, np.asarray(value), vocab_size if array.ndim == 1 else 0)
    return value
