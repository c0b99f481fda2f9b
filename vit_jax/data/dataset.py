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
    first_readable,
)
from vit_jax.data.splits import Subset
from vit_jax.data.transforms import parse_transforms
from vit_jax.errors import UserError
from vit_jax.runtime.watchdog import Stopping, no_stop
from vit_jax.storage import paths, run_folder

TOGETHER = 16  # examples whose files are read before any of them is decoded
SMALL = 2**18  # bytes of a batch that is made in less time than a thread takes to hand it over
AHEAD = 64  # rows whose examples are requested before they are needed


class Dataset:
    """The examples of a split as batches. Requirements of training are checked on first use.

    Every batch holds this process's rows {name: array [b, ...]}, with `index`, int32, the index of
    each example in the source, and `mask`, float32, 0 for padding. Both are [b], or [b n] if a row
    holds up to n examples, see `Plan.slots`.

    Attributes:
      plan: assigns examples to batches.
      source: the examples before the transforms; it counts broken records.
      batch_size: size of a global batch, in examples, or in tokens if the plan counts these.
      loading: the threads and processes that make batches, as far as they are given.
    """

    def __init__(
        self,
        plan: Plan,
        process: Process = Process(),  # noqa: B008  frozen
        loading: Loading = Loading(),  # noqa: B008  frozen
    ):
        """Open a data set.

        Args:
          plan: made of a source and transforms.
          process: the process whose rows to make.
          loading: options of reading ahead.

        Raises:
          UserError: for a cache together with reading processes, which cannot share it.
        """
        if loading.workers and plan.examples.cache:
            raise UserError(
                f'cache=True with workers={loading.workers}: processes do not share a cache; set '
                'one of them to 0'
            )
        self.plan, self.source, self.batch_size = plan, plan.examples.source, plan.batch_size
        self.loading, self._process = loading, process

    @property
    def info(self) -> SourceInfo:
        """Facts about the data for the model."""
        return self.plan.info

    @property
    def vocab(self) -> vocabulary.Tokenizer | None:
        """The vocabulary that encodes texts; None if there is none."""
        return self.plan.examples.vocab

    @property
    def unit(self) -> str:
        """The unit of rates: 'images', 'examples' or 'tokens'."""
        return self.plan.unit

    @property
    def spec(self) -> Spec:
        """The arrays of one of the largest examples, of training or evaluation."""
        return self.plan.spec

    @functools.cached_property
    def shapes(self) -> tuple[Shape, ...]:
        """The kinds of training batches; the last one has the largest examples.

        Raises:
          UserError: if no batch can be made of the examples.
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
        """Examples of an epoch of training."""
        return len(self.plan.members)

    def train_batches(
        self, start_step: int = 0, stopping: Stopping = no_stop, stop_step: int = sys.maxsize
    ) -> Generator[Batch, None, None]:
        """Shuffled batches of the steps from `start_step` up to, but not including, `stop_step`.

        Raises `Interrupted` if none is ready and `stopping` requests a stop.
        """
        for shape in self.shapes:
            self._process.rows(shape.rows)
        make = Loader(self.plan, self._process).train_batch
        return self._batches(make, start_step, stop_step, stopping)

    def eval_batches(self, stopping: Stopping = no_stop) -> Iterator[Batch]:
        """Every example once, the same number of batches on every process.

        Raises `Interrupted` if none is ready and `stopping` requests a stop.
        """
        make = Loader(self.plan, self._process).eval_batch
        return self._batches(make, 0, self.plan.eval_steps, stopping)

    def reading(self, batches: int = sys.maxsize) -> Loading:
        """The threads and processes that make this number of batches."""
        cached = self.plan.examples.cache
        return self.loading.resolved(None if cached else lambda: self._work(batches))

    def _work(self, batches: int) -> Work:
        """The work of making batches here; an estimate."""
        parts, here = self._process.count, len(self._process.parts)
        row = sum(math.prod(x.shape) * x.dtype.itemsize for x in self.spec.values())
        rows = min(self.batch_size, len(self.plan.rows)) * here / parts
        examples = self.plan.examples_per_row * rows * batches
        return Work(self._seconds, examples, int(row * rows), self._listing_bytes)

    @functools.cached_property
    def _seconds(self) -> float:
        """CPU seconds of an example, without the wait for its file."""
        spent, last = [], len(self.plan.examples) - 1
        for index in (0, 0, last // 2, last):  # the first one takes longer
            began = time.thread_time()
            self.plan.examples.first_readable(index, self.plan.seed, index)
            spent.append(time.thread_time() - began)
        return statistics.median(spent[1:])

    @functools.cached_property
    def _listing_bytes(self) -> int | None:
        try:
            return len(cloudpickle.dumps(self.plan))
        except Exception:  # of any type
            return None

    def _batches(
        self, make: Callable[[int], Batch], start: int, stop: int, stopping: Stopping
    ) -> Generator[Batch, None, None]:
        """Yield make(start), ..., make(stop - 1).

        Threads or processes read ahead, until a batch is made from memory faster than a thread
        would hand it over.
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
        """Counts over a global training batch, of which this process has the rows `batch`."""
        total, here = self._process.count, len(self._process.parts)
        return {name: n * total // here for name, n in self.plan.tally(batch).items()}

    def seen(self, steps: int) -> dict[str, float]:
        """The share of each source of a mixture in the first batches; empty for a single source."""
        mixture = self.source.mixture
        return mixture.seen(steps * self.batch_size, self.plan.seed) if mixture else {}

    @functools.cached_property
    def class_counts(self) -> np.ndarray | None:
        """The examples of each class, or objects if images have several, int64 [num_classes]; None
        if counting would have to read examples.
        """
        return self.source.class_counts()

    @functools.cached_property
    def listing(self) -> Listing:
        """Digests of the examples' metadata, which take no reading of examples."""
        return self.source.listing()

    def facts(self) -> dict[str, Any]:
        """Facts of the data stored in checkpoints, so that a model can be used without the data."""
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
        # Read once: a save must not wait for data that stall.
        return raw_images(self.source)

    def read(self, index: int) -> Record:
        """An example of an evaluation, after the transforms and before padding."""
        return self.plan.examples.read(index, draw=index)

    def text(self, index: int) -> Record:
        """The texts of an example before the transforms encode them, and its `image_id` as text if
        it has one; empty if there are none.
        """
        return self.plan.examples.text(index)

    def check(self, folder: pathlib.Path) -> None:
        """Raise UserError if the run in `folder` was made with other data files."""
        vocabulary.require_same(self._file, folder)

    def save(self, folder: pathlib.Path) -> None:
        """Save the files that later commands need in a run folder."""
        if self._file is not None:
            paths.write_atomic(folder / run_folder.VOCAB, self._file.model)

    @property
    def _file(self) -> vocabulary.Vocabulary | None:
        """The vocabulary to keep in the run folder."""
        return self.vocab if isinstance(self.vocab, vocabulary.Vocabulary) else None


def open_examples(data: Data, numbering: SourceInfo | None = None) -> Examples:
    """Open the source of a data set; classes with ids get their numbers in `numbering`.

    Raises:
      UserError: if no split is given, or the source cannot be opened.
    """
    loaded = vocabulary.load(data.vocab) if data.vocab else None
    parsed = parse_transforms(data.transforms, loaded)
    if data.split is None:
        raise UserError(f'{data.source}: no split is given; name one')
    source = sources.open_source(data.source, data.split)
    if data.classes is not None:
        source = source.only_classes(data.classes)
    if numbering is not None:
        source = source.numbered_as(numbering)
    return Examples(source, parsed, data.cache)


def make_plan(data: Data, examples: Examples, **options: Any) -> Plan:
    """Make the plan that a data set describes; `options` are its other keywords.

    Raises:
      UserError: if several keys define how batches are made.
    """
    values = {key: getattr(data, key) for key in ('buckets', 'sizes', 'plan')}
    choices = {key: value for key, value in values.items() if value}
    if len(choices) > 1:
        raise UserError(
            f'{" and ".join(choices)}: each defines how batches are made, buckets of sequences '
            'and sizes of images; give one of them'
        )
    if data.buckets:
        choices['count'] = data.count
    name = choices.pop('plan', next(iter(choices), 'fixed'))
    return plans.make(name, examples, **options, **choices)


def open_dataset(
    data: Data,
    batch_size: int,
    seed: int = 0,
    multiple: int = 1,
    process: Process = Process(),  # noqa: B008  frozen
    numbering: SourceInfo | None = None,
) -> Dataset:
    """The data of `config.data`, or of an entry of `config.evals`.

    Args:
      data: the section.
      batch_size: size of a global batch over all processes, in examples, or in tokens if the plan
        counts these.
      seed: seed of the order and the transforms of training.
      multiple: rows of an evaluation batch are a multiple of it.
      process: this one of the processes that share every batch.
      numbering: classes to number the data's own by, if both have ids.

    Raises:
      UserError: if the data do not exist, or no batches can be made of them.
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
    """Properties of a source's raw images: {channels, size: [H, W] or None if it varies}.

    Empty for a source without images. Checkpoints keep it, so that a trained model reads new images
    without its data.
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

    Row r of batch k of training draws from the generator of (seed, k * R + r), where the largest
    batch has R rows; an example of an evaluation draws from that of (0, its index).

    Attributes:
      plan: assigns examples to batches.
      process: the process whose rows to make.
    """

    plan: Plan
    process: Process

    def train_batch(self, k: int) -> Batch:
        """This process's rows of batch k of training."""
        spec, indices = self.plan.batch(k)
        slots = indices[0].size
        draws = k * self._rows * slots + np.arange(indices.size).reshape(-1, slots)
        return self._batch(spec, indices, draws, self.plan.seed, self.plan.replaces_broken)

    def eval_batch(self, k: int) -> Batch:
        """This process's rows of batch k of an evaluation."""
        spec, indices = self.plan.eval_batch(k)
        draws = indices.reshape(len(indices), -1)
        return self._batch(spec, indices, draws, seed=0, replace=False)

    @functools.cached_property
    def _rows(self) -> int:
        return max(shape.rows for shape in self.plan.shapes)

    @functools.cached_property
    def _dtypes(self) -> dict[str, np.dtype]:
        """The dtypes of the first example; empty for a plan of your own that takes texts."""
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
                f'`Plan.slots`, {slots}; override `rows` or `slots`, or give one example a row'
            )
        mine = self.process.rows(len(indices))
        batch, index, mask = empty_batch(spec, len(mine), slots)
        stacked = examples.stacked if type(self.plan) is fixed.Plan else None
        if stacked is not None and stacked.spec == spec:
            real = np.flatnonzero(indices[mine] != base.NONE)
            numbers = indices[mine][real]
            made = stacked.rows(numbers, seed, draws[mine][real, 0])
            for name, rows in (made | {'index': numbers, 'mask': 1}).items():
                batch[name][real] = rows
            return batch
        opened: dict[int, Record] = {}
        together = max(1, TOGETHER // index.shape[1])
        coming = (i for i in indices[mine].ravel().tolist() if i != base.NONE)
        examples.expect(itertools.islice(coming, AHEAD * index.shape[1]))
        numbered = indices[mine].reshape(index.shape).tolist()
        drawn = draws[mine].tolist()
        for row in range(len(mine)):
            examples.expect(itertools.islice(coming, index.shape[1]))
            if row % together == 0 and examples.transforms.crop_first:
                next_ones = indices[mine[row : row + together]].ravel().tolist()
                opened = examples.opened(i for i in next_ones if i != base.NONE)
            read = [
                self._read(i, seed, draw, replace, opened.get(i))
                for i, draw in zip(numbered[row], drawn[row], strict=True)
                if i != base.NONE
            ]
            if found := [one for one in read if one is not None]:
                numbers, records = zip(*found, strict=True)
                index[row, : len(found)], mask[row, : len(found)] = numbers, 1
                self._fill({name: batch[name][row, ...] for name in spec}, spec, numbers, records)
        return batch

    def _read(
        self, index: int, seed: int, draw: int, replace: bool, record: Record | None
    ) -> tuple[int, Record] | None:
        """An example and its index; None for a broken one that is not replaced.

        `record` is the example before its transforms, if it has been read.
        """
        if replace:
            index, record = self.plan.examples.first_readable(index, seed, draw, record)
        else:
            try:
                record = self.plan.examples.read(index, seed, draw, record)
            except BrokenRecord:
                return None
        try:
            check_alike(record, self._dtypes)
        except UserError as error:
            raise UserError(f'{self.plan.examples.source.record_name(index)}: {error}') from error
        return index, record

    def _fill(
        self, row: Batch, spec: Spec, numbers: tuple[int, ...], records: tuple[Record, ...]
    ) -> None:
        """Copy examples into the arrays of a row."""
        source = self.plan.examples.source
        try:
            made = self.plan.join(records, spec)
            for key, array in row.items():
                array[...] = checked(key, made[key], array, source.info.vocab_size)
        except UserError as error:
            names = ', '.join(map(source.record_name, numbers))
            raise UserError(f'{names}: {error}') from error


def check_alike(record: Record, dtypes: dict[str, np.dtype]) -> None:
    """Raise UserError unless a record has the arrays and dtypes of the first one.

    Assignment to a batch would cast silently, 21200 to 208 and NaN to 0.
    """
    for name, dtype in dtypes.items():
        if name not in record:
            raise UserError(
                f'there is no {name!r}, which the first example has; it has {", ".join(record)}'
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
                f'{name!r} is {value.dtype}, in the first example {dtype}; give all examples one '
                'dtype'
            )


def checked(key: str, value: Any, array: np.ndarray, vocab_size: int) -> Any:
    """Return the value of a row if it has the shape and dtype of `array`; else raise UserError."""
    known = isinstance(value, np.ndarray) and value.dtype == array.dtype != np.int32
    if known and value.shape == array.shape:  # as most are; the rest takes ten times as long
        return value
    if type(value) is int and array.shape == () and abs(value) < 2**31 and array.dtype == np.int32:
        return value  # a class
    # Assignment would broadcast one channel to three.
    if np.shape(value) != array.shape:
        if array.ndim == 1:
            how = 'set config.data.buckets=(16, 32, 64)'
        else:
            how = "with 'resize(224)'" if key == 'image' else "with 'pad_objects(100)'"
        raise UserError(
            f'{key} of shape {np.shape(value)} among others of {array.shape}; bring all to one '
            f'size, for example {how}'
        )
    if (dtype := ArraySpec.from_value(value).dtype) != array.dtype:
        raise UserError(f'{key} of {dtype} among others of {array.dtype}; give all one dtype')
    if array.dtype == np.int32:
        check_ids(key, np.asarray(value), vocab_size if array.ndim == 1 else 0)
    return value
