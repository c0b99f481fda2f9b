"""Examples after their transforms, and the base class of the plans that assign them to batches."""

from __future__ import annotations

import abc
import contextlib
import dataclasses
import functools
from collections.abc import Iterable, Sequence

import numpy as np

from vit_jax.array_types import Int
from vit_jax.data import batches, images
from vit_jax.data.batches import ArraySpec, Batch, Shape, Spec
from vit_jax.data.records import BrokenRecord, Record, SourceInfo, convert_coordinates, example_rng
from vit_jax.data.splits import Subset
from vit_jax.data.stacked import Stacked, stack
from vit_jax.data.transforms import Transforms
from vit_jax.errors import UserError

NONE = -1  # padding instead of an example
Rows = Int[np.ndarray, 'rows *n']


class Examples:
    """A source with transforms.

    Attributes:
      source: Examples before the transforms.
      transforms: Transforms of each example.
      cache: Whether to keep examples in memory.
      vocab: Vocabulary that encodes texts, or None.
    """

    def __init__(self, source: Subset, transforms: Transforms, cache: bool = False):
        """Set up without reading any example.

        Args:
          source: Source from `open_source`.
          transforms: Transforms of each example.
          cache: Whether to keep examples in memory, so that each is decoded once; they are kept
            transformed if no transform draws random numbers.
        """
        self.source, self.transforms, self.cache = source, transforms, cache
        self.vocab = transforms.vocab
        self._size = len(source)
        self._cached: dict[int, Record | BrokenRecord] = {}
        self._stacked: tuple[Stacked | None, ...] = ()  # empty until the cache is full

    def __len__(self) -> int:
        return self._size

    @property
    def info(self) -> SourceInfo:
        """Facts about the examples for the model."""
        info, vocab = self.source.info, self.vocab
        return info if vocab is None else dataclasses.replace(info, vocab_size=len(vocab))

    @property
    def stacked(self) -> Stacked | None:
        """All examples as arrays, if they are small and of one shape; None until all are cached."""
        if not self.cache or len(self._cached) < self._size:
            return None
        if not self._stacked:
            records = [self._cached[index] for index in range(self._size)]
            self._stacked = (stack(records, self.transforms, self.source.info.vocab_size),)
        return self._stacked[0]

    def read_files(self, indices: Iterable[int]) -> dict[int, Record]:
        """Read the files of the next examples, which `read` then decodes.

        Reading several files in a row is faster than alternating with decoding, which evicts
        everything else from a core's caches.

        Args:
          indices: Indices in the order of use. Reading stops at a broken example, or at one whose
            image was decoded immediately and takes more memory than its file.

        Returns:
          {index: record}; empty if a cache keeps decoded images.
        """
        records: dict[int, Record] = {}
        for index in () if self.cache else indices:
            try:
                records[index] = self._read_source(index, on_demand=True)
            except BrokenRecord:
                break
            if not isinstance(records[index].get('image'), images.OnDemand):
                break
        return records

    def read(
        self, index: int, seed: int = 0, draw: int = 0, record: Record | None = None
    ) -> Record:
        """Transform an example with the random numbers of (seed, draw).

        Args:
          index: Index of the example.
          seed, draw: See `example_rng`.
          record: Untransformed example, if `read_files` has read it.

        Raises:
          BrokenRecord: if the example cannot be read.
          UserError: if a transform refuses it; the message names the record.
        """
        if not self.cache:
            if record is None:
                record = self._read_source(index, self.transforms.crop_first)
            return self._transform(index, record, seed, draw)
        if index not in self._cached:
            try:
                record = self._read_source(index)
                if not self.transforms.random:
                    record = self._transform(index, record, 0, 0)
                self._cached[index] = record
            except BrokenRecord as broken:
                self._cached[index] = broken
        cached = self._cached[index]
        if isinstance(cached, BrokenRecord):
            raise cached
        return self._transform(index, cached, seed, draw) if self.transforms.random else cached

    def expect(self, indices: Iterable[int]) -> None:
        """Start reading examples that will be needed soon, if their storage is slow."""
        self.source.expect(index for index in indices if index not in self._cached)

    def first_readable(
        self, index: int, seed: int = 0, draw: int = 0, record: Record | None = None
    ) -> tuple[int, Record]:
        """Return the index and content of the first readable example from `index` on."""
        while True:  # the source raises UserError once too many are broken
            try:
                return index, self.read(index, seed, draw, record)
            except BrokenRecord:
                index, record = (index + 1) % len(self), None

    def text(self, index: int) -> Record:
        """Return the texts of an example before encoding, and its `image_id` as text; empty if it
        has neither.
        """
        if self.vocab is None:
            return {}
        try:
            record = self.source[index]
        except BrokenRecord:
            return {}
        image = {'image_id': str(record['image_id'])} if 'image_id' in record else {}
        texts: Record = {}
        for step in self.transforms.steps:
            texts = {k: value for k, value in record.items() if isinstance(value, str)} or texts
            record = step(record, example_rng(0, index))
        return texts and texts | image

    def remarks(self) -> tuple[str, ...]:
        """Describe transforms whose pixel arguments do not suit the images' size, one per line."""
        for index in (0, len(self) // 2, len(self) - 1):
            with contextlib.suppress(BrokenRecord, UserError):
                record = self._read_source(index, self.transforms.crop_first)
                if lines := self.transforms.remarks(record):
                    return tuple(lines)
        return ()

    def _read_source(self, index: int, on_demand: bool = False) -> Record:
        """Return the untransformed example; `on_demand` decodes only the window of a crop."""
        drop_alpha = self.transforms.drops_alpha
        if not (on_demand or drop_alpha):
            return self.source[index]
        with images.decoding(on_demand=on_demand, drop_alpha=drop_alpha):
            return self.source[index]

    def _transform(self, index: int, record: Record, seed: int, draw: int) -> Record:
        try:
            record = self.transforms(record, example_rng(seed, draw))
            return convert_coordinates(record, self.source, index)
        except UserError as error:
            raise UserError(f'{self.source.record_name(index)}: {error}') from error
        except BrokenRecord as reason:  # decoded only now, or not finite after the transforms
            self.source.report_broken(index, reason)
            raise


@dataclasses.dataclass(frozen=True, eq=False)
class Plan(abc.ABC):
    """Assignment of examples to batches, and their padded shapes.

    Options of a plan are keyword-only fields. What only training requires is checked on first use.

    Attributes:
      examples: Examples to batch.
      batch_size: Size of a global batch, in examples, or in tokens if the plan counts tokens.
      seed: Nonnegative seed of the order.
      multiple: Divisor of the rows of evaluation batches.
      replaces_broken: Whether training replaces a broken example by the next; else its row is
        masked.
    """

    examples: Examples
    batch_size: int
    seed: int = 0
    multiple: int = 1

    replaces_broken = True
    mixes = False  # whether `batch` follows the shares of a mixture

    def __post_init__(self) -> None:
        if self.examples.source.members and not self.mixes:
            raise UserError(
                f'{self.examples.source.title}: weighted sources need a plan with fixed sizes; '
                'unset config.data.buckets and config.data.plan'
            )
        if self.seed < 0:
            raise UserError(f'seed={self.seed}: must be 0 or more')
        if self.batch_size < 1:
            raise UserError(f'batch_size={self.batch_size}: must be positive')

    @abc.abstractmethod
    def batch(self, k: int) -> tuple[Spec, Rows]:
        """Return training batch k, a pure function of (seed, k).

        Returns:
          The spec of a row, one of those in `shapes`; and the indices of the examples in the rows
          of the global batch, [rows *slots], `NONE` for padding. `join` combines a row's examples.
        """

    @functools.cached_property
    def spec(self) -> Spec:
        """Spec of the largest row, to which evaluation pads all rows."""
        return self.spec_of(self.example)

    @property
    def shapes(self) -> tuple[Shape, ...]:
        """Kinds of training batches; the last one has the largest rows.

        Raises:
          UserError: if the examples do not fill a batch.
        """
        return (Shape(self.batch_size, 1, self.spec, self.slots),)

    @property
    def members(self) -> Int[np.ndarray, ' N']:
        """Examples of a training epoch."""
        return np.arange(len(self.examples))

    @functools.cached_property
    def slots(self) -> tuple[int, ...]:
        """Shape of `index` and `mask` in a row: (n,) if it holds up to n examples, else ()."""
        return self.rows.shape[1:]

    @property
    def examples_per_row(self) -> float:
        """Mean number of examples per training row."""
        return np.count_nonzero(self.rows != NONE) / len(self.rows) if self.slots else 1

    @property
    def examples_per_step(self) -> float:
        """Mean number of examples per training batch."""
        return self.batch_size * self.examples_per_row

    @property
    def tokens_per_step(self) -> float:
        """Mean number of target tokens per training batch, without padding; 0 without targets."""
        return 0

    @functools.cached_property
    def unit(self) -> str:
        """Unit of throughput: 'images', 'examples' or 'tokens'."""
        return 'images' if 'image' in self.spec else 'examples'

    @property
    def info(self) -> SourceInfo:
        """Facts about the data for the model."""
        return self.examples.info

    @property
    def notes(self) -> tuple[str, ...]:
        """Remarks on the training data, one per line."""
        return ()

    @functools.cached_property
    def rows(self) -> Rows:
        """Examples of an epoch's rows, in order; [rows n] if a row holds several."""
        return np.arange(len(self.examples))

    @property
    def eval_steps(self) -> int:
        """Number of batches of an evaluation."""
        return -(-len(self.rows) // self._eval_rows)

    def eval_batch(self, k: int) -> tuple[Spec, Rows]:
        """Return evaluation batch k; an evaluation has every example once; see `batch`."""
        real = self.rows[k * self._eval_rows :][: self._eval_rows]
        rows = np.full((self._eval_rows, *self.slots), NONE)
        rows[: len(real)] = real
        return self.spec, rows

    @property
    def _eval_rows(self) -> int:
        # Padding is masked, so the result does not depend on `multiple`.
        return -(-min(self.batch_size, len(self.rows)) // self.multiple) * self.multiple

    def pad(self, record: Record, spec: Spec) -> Record:
        """Pad the arrays of an example to `spec`; see `batches.pad`.

        Raises:
          UserError: if an array does not fit.
        """
        return batches.pad(record, spec)

    def join(self, records: Sequence[Record], spec: Spec) -> Record:
        """Combine the examples of a row; by default there is only one."""
        (record,) = records
        return self.pad(record, spec)

    def tally(self, batch: Batch) -> dict[str, int]:
        """Count over this process's rows of a training batch, without padding."""
        return {self.unit: int(np.count_nonzero(batch['mask']))}

    @functools.cached_property
    def example(self) -> Record:
        """First readable example.

        Raises:
          UserError: for a record with text, or with a reserved name.
        """
        index, record = self.examples.first_readable(0)
        if texts := [key for key, value in record.items() if isinstance(value, str)]:
            raise UserError(
                f'{self.examples.source.title}: {texts[0]!r} is text; convert it to ids with '
                f'config.data.vocab and transforms="tokenize({texts[0]!r}, 64)", or with '
                "transforms='tokenize' and config.data.buckets=(16, 32, 64)"
            )
        if reserved := {'index', 'mask'} & record.keys():
            name = self.examples.source.record_name(index)
            raise UserError(f'{name}: {min(reserved)!r} is a reserved name in batches')
        return record

    def spec_of(self, record: Record) -> Spec:
        """Return the spec of a record."""
        return {key: ArraySpec.from_value(value) for key, value in record.items()}
