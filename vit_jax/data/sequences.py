"""A source of sequences of ids whose lengths are known."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Sequence

import numpy as np

from vit_jax.data.bucket_plan import check_bounds
from vit_jax.data.records import BrokenRecord, Record, SourceInfo, check_ids
from vit_jax.data.splits import Subset
from vit_jax.data.transforms import Transforms
from vit_jax.data.vocabulary import Tokenizer
from vit_jax.errors import UserError

_UNUSED = np.random.default_rng(0)  # no transform of a sequence draws from it


class SequenceSource:
    """A source of sequences, the transforms applied, whose lengths are known.

    Itself a `Source`; a record is {name: int32 [n]}.

    Attributes:
      source: the examples before the transforms.
      bounds: length of each bucket, growing.
      lengths: of the longest sequence of each example; 0 for a broken record.
      targets: of the sequence `target` of each example; 0 where there is none.
      names: of the sequences.
    """

    def __init__(
        self, source: Subset, transforms: Transforms, bounds: Sequence[int], cache: bool = False
    ):
        """Reads and transforms every example once.

        Args:
          source: what `open_source` returns.
          transforms: make sequences of it, as `tokenize` does.
          bounds: `config.data.buckets`.
          cache: keeps the sequences in memory, so that none is made again.

        Raises:
          UserError: if the bounds do not grow, a transform draws random numbers or something
            else than sequences comes out of them.
        """
        self.source, self.title, self.bounds = source, source.title, tuple(bounds)
        self._transforms = transforms
        check_bounds(self.bounds)
        if transforms.random:
            raise UserError(
                f'transforms {transforms.spec!r}: lengths that are random have no bucket; leave '
                'out config.data.buckets or what draws random numbers'
            )
        vocab = transforms.vocab
        self._vocab_size = source.info.vocab_size if vocab is None else len(vocab)
        self.lengths, self.targets = np.zeros((2, len(source)), np.int64)
        self.names: tuple[str, ...] = ()
        self._cache: list[Record] = []
        largest = 0
        for index in range(len(source)):
            record: Record = {}
            with contextlib.suppress(BrokenRecord):
                record = self._read(index)
                self.names = tuple(record)
            self.lengths[index] = max(map(len, record.values()), default=0)
            self.targets[index] = len(record.get('target', ()))
            largest = max(largest, *(int(np.max(ids, initial=0)) for ids in record.values()), 0)
            if cache:
                self._cache.append(record)
        self._vocab_size = self._vocab_size or largest + 1  # of a source that does not tell it

    @property
    def info(self) -> SourceInfo:
        return dataclasses.replace(self.source.info, vocab_size=self._vocab_size)

    @property
    def vocab(self) -> Tokenizer | None:
        return self._transforms.vocab

    def __len__(self) -> int:
        return len(self.source)

    def __getitem__(self, index: int, /) -> Record:
        cached = self._cache[index] if self._cache else {}
        return cached or self._read(index)

    def labels(self) -> np.ndarray:
        return self.source.labels()

    def record_name(self, index: int, /) -> str:
        return self.source.record_name(index)

    def text(self, index: int, /) -> Record:
        """The strings of an example that the transforms make ids of; empty if there are none."""
        record: Record = {}
        with contextlib.suppress(BrokenRecord):
            now = self.source[index]
            for step in self._transforms.steps:
                texts = {name: value for name, value in now.items() if isinstance(value, str)}
                record = texts or record
                now = step(now, _UNUSED)
        return record

    def _read(self, index: int) -> Record:
        record = self.source[index]
        try:
            record = self._transforms(record, _UNUSED)
        except UserError as error:
            raise UserError(f'{self.record_name(index)}: {error}') from error
        for name, value in record.items():
            array = np.asarray(value)
            if array.ndim != 1 or array.dtype.kind != 'i':
                raise UserError(
                    f'{self.record_name(index)}: {name!r} is no sequence of ids; with buckets, '
                    "the transforms end in 'tokenize'"
                )
            try:
                # Of a source that does not tell its vocabulary, ids are what an int32 holds.
                check_ids(name, array, self._vocab_size or 2**31)
            except UserError as error:
                raise UserError(
                    f'{self.record_name(index)}: {error}; correct it, or the size of the vocabulary'
                ) from error
        return record
