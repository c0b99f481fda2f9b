"""`packed:PATH`: examples of any source in ArrayRecord shards, as `vit_jax pack` writes them."""

from __future__ import annotations

import dataclasses
import functools
import pathlib
from typing import Any

import numpy as np

from vit_jax.data import images, packed
from vit_jax.data.records import BrokenRecord, Record, UnknownSplit
from vit_jax.errors import UserError
from vit_jax.storage import paths


@dataclasses.dataclass(frozen=True)
class Instruction:
    """A whole shard for ArrayRecord's reader, which then opens it on its first use."""

    filename: str
    examples_in_shard: int
    skip: int = 0

    @property
    def take(self) -> int:
        return self.examples_in_shard


class Source:
    """The records of a split in the order in which they were packed."""

    def __init__(self, path: str, split: str):
        self._title, self._split = f'source packed:{path}', split
        self._folder = pathlib.Path(path).expanduser()
        manifest = packed.read_manifest(self._folder, self._title)
        if split not in manifest.splits:
            raise UnknownSplit.of(self._title, split, manifest.splits)
        self.info, self._shards = manifest.info, manifest.splits[split]
        for shard in self._shards:
            self._require_whole(shard)
        self._ends = np.cumsum([shard.examples for shard in self._shards])

    def _require_whole(self, shard: packed.Shard) -> None:
        if not paths.stays_inside(shard.name):
            raise UserError(f'{self._title}: lists {shard.name!r}, outside of {self._folder}')
        file = self._folder / shard.name
        size = file.stat().st_size if file.is_file() else None
        if size != shard.size:
            found = 'is missing' if size is None else f'has {size:,} of {shard.size:,} bytes'
            raise UserError(f'{self._title}: {file} {found}: copy it again, or pack it anew')

    @functools.cached_property
    def _records(self) -> Any:
        from array_record.python.array_record_data_source import ArrayRecordDataSource

        return ArrayRecordDataSource(
            [Instruction(str(self._folder / s.name), s.examples) for s in self._shards]
        )

    def __getstate__(self) -> dict[str, Any]:
        return {k: v for k, v in self.__dict__.items() if k != '_records'}

    def __len__(self) -> int:
        return int(self._ends[-1])

    def __getitem__(self, index: int, /) -> Record:
        return images.decoded(self.encoded(index), self.record_name(index))

    def encoded(self, index: int, /) -> Record:
        try:
            return packed.decode(self._records[index])
        except Exception as error:  # the reader raises many kinds, none of them documented
            raise BrokenRecord(f'{self.record_name(index)}: {error}') from error

    def labels(self) -> np.ndarray:
        file = self._folder / f'{self._split}.labels.npy'
        if not file.is_file():
            raise UserError(f'{self._title}: its examples have no class each')
        try:
            labels = np.load(file)
        except (OSError, ValueError, EOFError) as error:
            raise UserError(f'{self._title}: {file} cannot be read: {error}') from error
        if labels.shape != (len(self),):
            raise UserError(f'{self._title}: {file} has {len(labels)} of {len(self)} labels')
        return labels

    def record_name(self, index: int, /) -> str:
        shard = int(np.searchsorted(self._ends, index, side='right'))
        row = index - int(self._ends[shard - 1] if shard else 0)
        return f'{self._folder / self._shards[shard].name} record {row}'
