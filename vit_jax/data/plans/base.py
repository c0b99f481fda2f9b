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
from vit_jax.data.vocabulary import Tokenizer
from vit_jax.errors import UserError

NONE = -1  # padding instead of an example
Rows = Int[np.ndarray, 'rows *n']


class Examples:
    """A source and its transforms.

    Attributes:
      source: the examples before the transforms.
      transforms: applied to each of them.
      cache: whether they are kept in memory.
    """

    def __init__(self, source: Subset, transforms: Transforms, cache: bool = False):
        """Read nothing yet.

        Args:
          source: from `open_source`.
          transforms: applied to each of its examples.
          cache: keep examples in memory, so that each is decoded once; after the transforms, if
            none of them draws random numbers.
        """
        self.source, self.transforms, self.cache = source, transforms, cache
        self._size = len(source)
        self._kept: dict[int, Record | BrokenRecord] = {}
        self._stacked: tuple[Stacked | None, ...] = ()  # empty until the cache is full

    def __len__(self) -> int:
        return self._size

    @property
    def info(self) -> SourceInfo:
        """Facts about the examples for the model."""
        info, vocab = self.source.info, self.vocab
        return info if vocab is None else dataclasses.replace(info, vocab_size=len(vocab))

    @property
    def vocab(self) -> Tokenizer | None:
        """The vocabulary that encodes texts; None if there is none."""
        return self.transforms.vocab

    @property
    def stacked(self) -> Stacked | None:
        """All examples as arrays, if they are small and of one shape; None until all are kept."""
        if not self.cache or len(self._kept) < self._size:
            return None
        if not self._stacked:
            records = [self._kept[index] for index in range(self._size)]
            self._stacked = (stack(records, self.transforms, self.source.info.vocab_size),)
        return self._stacked[0]

    def opened(self, indices: Iterable[int]) -> dict[int, Record]:
        """Read files of examples that are needed next, to be decoded by `read`.

        Files that are read one after the other take less time than in turns with decoding, which
        displaces all else from a core's caches.

        Args:
          indices: in the order in which they are needed. It is followed up to one that is broken,
            or whose image was decoded at once and takes more memory than its file.

        Returns:
          Records by their indices; none if a cache keeps decoded images.
        """
        found: dict[int, Record] = {}
        for index in () if self.cache else indices:
            try:
                found[index] = self._decoded(index, on_demand=True)
            except BrokenRecord:
                break
            if not isinstance(found[index].get('image'), images.OnDemand):
                break
        return found

    def read(
        self, index: int, seed: int = 0, draw: int = 0, record: Record | None = None
    ) -> Record:
        """Transform an example with the random numbers of (seed, draw).

        Args:
          index: index of the example.
          seed, draw: see `example_rng`.
          record: the example before its transforms, if it has been read, see `opened`.

        Raises:
          BrokenRecord: if it cannot be read.
          UserError: if a transform refuses it; the message names the record.
        """
        if not self.cache:
            if record is None:
                record = self._decoded(index, self.transforms.crop_first)
            return self._transformed(index, record, seed, draw)
        if index not in self._kept:
            try:
                record = self._decoded(index)
                if not self.transforms.random:
                    record = self._transformed(index, record, 0, 0)
                self._kept[index] = record
            except BrokenRecord as broken:
                self._kept[index] = broken
        kept = self._kept[index]
        if isinstance(kept, BrokenRecord):
            raise kept
        return self._transformed(index, kept, seed, draw) if self.transforms.random else kept

    def expect(self, indices: Iterable[int]) -> None:
        """Start reading examples that are needed soon, if their storage is slow."""
        self.source.expect(index for index in indices if index not in self._kept)

    def first_readable(
        self, index: int, seed: int = 0, draw: int = 0, record: Record | None = None
    ) -> tuple[int, Record]:
        """The first example from `index` on that is not broken, and its index; see `read`."""
        while True:  # the source raises UserError once too many are broken
            try:
                return index, self.read(index, seed, draw, record)
            except BrokenRecord:
                index, record = (index + 1) % len(self), None

    def text(self, index: int) -> Record:
        """The texts of an example before the transforms encode them, and its `image_id` as text if
        it has one; empty if there are none.
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
        """A line for each transform whose arguments in pixels do not suit the images' size."""
        for index in (0, len(self) // 2, len(self) - 1):
            with contextlib.suppress(BrokenRecord, UserError):
                record = self._decoded(index, self.transforms.crop_first)
                if found := self.transforms.remarks(record):
                    return tuple(found)
        return ()

    def _decoded(self, index: int, on_demand: bool = False) -> Record:
        """The example before its transforms; `on_demand`, only the window of a crop is decoded."""
        drop_alpha = self.transforms.drops_alpha
        if not (on_demand or drop_alpha):
            return self.source[index]
        with images.decoding(on_demand=on_demand, drop_alpha=drop_alpha):
            return self.source[index]

    def _transformed(self, index: int, record: Record, seed: int, draw: int) -> Record:
        try:
            record = self.transforms(record, example_rng(seed, draw))
            return convert_coordinates(record, self.source, index)
        except UserError as error:
            raise UserError(f'{self.source.record_name(index)}: {error}') from error
        except BrokenRecord as reason:  # an image that was decoded only now, or made not finite
            self.source.report_broken(index, reason)
            raise


@dataclasses.dataclass(frozen=True, eq=False)
class Plan(abc.ABC):
    """Assignment of examples to batches, and the shapes that they are padded to.

    Options of a plan are keyword-only fields. Requirements of training are checked on first use.

    Attributes:
      examples: the examples to make batches of.
      batch_size: size of a global batch, in examples, or in tokens if the plan counts these.
      seed: seed of the order, 0 or more.
      multiple: the rows of evaluation batches are a multiple of it.
      replaces_broken: whether the next example replaces a broken one in training; else its row is
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
                f'{self.examples.source.title}: sources with weights need batches of images of '
                'fixed sizes; leave out config.data.buckets and plans of other orders'
            )
        if self.seed < 0:
            raise UserError(f'seed={self.seed}: must be 0 or more')
        if self.batch_size < 1:
            raise UserError(f'batch_size={self.batch_size}: must be positive')

    @abc.abstractmethod
    def batch(self, k: int) -> tuple[Spec, Rows]:
        """Batch k of training, a pure function of (seed, k).

        Returns:
          The arrays of a row, one of the specs of `shapes`; and the indices of the examples in the
          rows of the global batch, `NONE` for padding: [rows *slots]. `join` combines those of a
          row.
        """

    @functools.cached_property
    def spec(self) -> Spec:
        """The arrays of one of the largest rows, to which evaluation pads all of them."""
        return self.spec_of(self.example)

    @property
    def shapes(self) -> tuple[Shape, ...]:
        """The kinds of training batches; the last one has the largest rows.

        Raises:
          UserError: if no batch can be made of the examples.
        """
        return (Shape(self.batch_size, 1, self.spec, self.slots),)

    @property
    def members(self) -> Int[np.ndarray, ' N']:
        """The examples of an epoch of training."""
        return np.arange(len(self.examples))

    @functools.cached_property
    def slots(self) -> tuple[int, ...]:
        """The shape of `index` and `mask` in a row: (n,) if it holds up to n examples, else ()."""
        return self.rows.shape[1:]

    @property
    def examples_per_row(self) -> float:
        """Examples of a row in training, on average."""
        return np.count_nonzero(self.rows != NONE) / len(self.rows) if self.slots else 1

    @property
    def examples_per_step(self) -> float:
        """Examples of a training batch, on average."""
        return self.batch_size * self.examples_per_row

    @property
    def tokens_per_step(self) -> float:
        """Tokens of the target in a training batch, on average and without padding; else 0."""
        return 0

    @functools.cached_property
    def unit(self) -> str:
        """The unit of rates: 'images', 'examples' or 'tokens'."""
        return 'images' if 'image' in self.spec else 'examples'

    @property
    def info(self) -> SourceInfo:
        """Facts about the data for the model."""
        return self.examples.info

    @property
    def notes(self) -> tuple[str, ...]:
        """Remarks on the training data, one a line."""
        return ()

    @functools.cached_property
    def rows(self) -> Rows:
        """The examples of each row of an epoch, in their order; [rows n] if a row holds several."""
        return np.arange(len(self.examples))

    @property
    def eval_steps(self) -> int:
        """Batches of an evaluation."""
        return -(-len(self.rows) // self._eval_rows)

    def eval_batch(self, k: int) -> tuple[Spec, Rows]:
        """Batch k of an evaluation, which has every example once; see `batch`."""
        real = self.rows[k * self._eval_rows :][: self._eval_rows]
        rows = np.full((self._eval_rows, *self.slots), NONE)
        rows[: len(real)] = real
        return self.spec, rows

    @property
    def _eval_rows(self) -> int:
        # Padding is masked, so that the result does not depend on `multiple`.
        return -(-min(self.batch_size, len(self.rows)) // self.multiple) * self.multiple

    def pad(self, record: Record, spec: Spec) -> Record:
        """Pad the arrays of an example to `spec`; see `batches.pad`.

        Raises:
          UserError: if an array does not fit.
        """
        return batches.pad(record, spec)

    def join(self, records: Sequence[Record], spec: Spec) -> Record:
        """Combine the examples of a row, by default a single one."""
        (record,) = records
        return self.pad(record, spec)

    def tally(self, batch: Batch) -> dict[str, int]:
        """Counts over this process's rows of a training batch, without padding."""
        return {self.unit: int(np.count_nonzero(batch['mask']))}

    @functools.cached_property
    def example(self) -> Record:
        """The first example that can be read.

        Raises:
          UserError: for a record that holds text, or a reserved name.
        """
        index, record = self.examples.first_readable(0)
        if texts := [key for key, value in record.items() if isinstance(value, str)]:
            raise UserError(
                f'{self.examples.source.title}: {texts[0]!r} is text; convert it to ids with '
                f'config.data.vocab and transforms="tokenize({texts[0]!r}, 64)", or with '
                "transforms='tokenize' and config.data.buckets=(16, 32, 64)"
            )
        if taken := {'index', 'mask'} & record.keys():
            name = self.examples.source.record_name(index)
            raise UserError(f'{name}: {min(taken)!r} is a reserved name in batches')
        return record

    def spec_of(self, record: Record) -> Spec:
        """The arrays of a record."""
        return {key: ArraySpec.from_value(value) for key, value in record.items()}
