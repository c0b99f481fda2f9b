"""The examples of a split after their transforms, from which plans make batches."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterable

from vit_jax.data import images
from vit_jax.data.records import BrokenRecord, Record, SourceInfo, example_rng, with_numbers
from vit_jax.data.splits import Subset
from vit_jax.data.transforms import Transforms
from vit_jax.data.vocabulary import Tokenizer
from vit_jax.errors import UserError


class Examples:
    """A source and its transforms.

    Attributes:
      source: the examples before the transforms.
      transforms: applied to each of them.
    """

    def __init__(self, source: Subset, transforms: Transforms, cache: bool = False):
        """Read nothing yet.

        Args:
          source: from `open_source`.
          transforms: applied to each of its examples.
          cache: keep examples in memory, so that each is decoded once; after the transforms, if
            none of them draws random numbers.
        """
        self.source, self.transforms = source, transforms
        self._cache = cache
        self._kept: dict[int, Record | BrokenRecord] = {}

    def __len__(self) -> int:
        return len(self.source)

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
    def is_filling(self) -> bool:
        """Whether a cache lacks some of the examples."""
        return self._cache and len(self._kept) < len(self)

    def read(self, index: int, seed: int = 0, draw: int = 0) -> Record:
        """Transform an example with the random numbers of (seed, draw).

        Raises:
          BrokenRecord: if it cannot be read.
          UserError: if a transform refuses it; the message names the record.
        """
        if not self._cache:
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

    def first_readable(self, index: int, seed: int = 0, draw: int = 0) -> tuple[int, Record]:
        """The first example from `index` on that is not broken, and its index; see `read`."""
        while True:  # the source raises UserError once too many are broken
            try:
                return index, self.read(index, seed, draw)
            except BrokenRecord:
                index = (index + 1) % len(self)

    def text(self, index: int) -> Record:
        """The texts of an example before the transforms encode them; empty if there are none."""
        if self.vocab is None:
            return {}
        try:
            record = self.source[index]
        except BrokenRecord:
            return {}
        texts: Record = {}
        for step in self.transforms.steps:
            texts = {k: value for k, value in record.items() if isinstance(value, str)} or texts
            record = step(record, example_rng(0, index))
        return texts

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
        with images.decoding(on_demand=on_demand, drop_alpha=self.transforms.drops_alpha):
            return self.source[index]

    def _transformed(self, index: int, record: Record, seed: int, draw: int) -> Record:
        try:
            record = self.transforms(record, example_rng(seed, draw))
            return with_numbers(record, self.source, index)
        except UserError as error:
            raise UserError(f'{self.source.record_name(index)}: {error}') from error
        except BrokenRecord as reason:  # an image that was decoded only now, or made not finite
            self.source.report_broken(index, reason)
            raise
