"""`packed:PATH`: examples of any source in ArrayRecord shards written by `vit_jax pack`.

PATH may be in object storage, gs://BUCKET/FOLDER: see `vit_jax.data.remote`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import io
from collections.abc import Iterable
from typing import Any

import numpy as np

from vit_jax.data import images, listing, packed, remote
from vit_jax.data.records import (
    BrokenRecord,
    Listing,
    Record,
    ShardIndex,
    UnknownSplit,
    count_labels,
)
from vit_jax.errors import UserError
from vit_jax.storage import paths, ranges


@dataclasses.dataclass(frozen=True)
class Instruction:
    """A complete shard for ArrayRecord's reader, which opens it on first use."""

    filename: str
    examples_in_shard: int
    skip: int = 0

    @property
    def take(self) -> int:
        return self.examples_in_shard


class Source:
    """Records of a split in the order of packing."""

    def __init__(self, path: str, split: str):
        self._title, self._split = f'source packed:{path}', split
        self._folder = paths.path(path)
        self._bucket = ranges.Folder(self._folder) if paths.is_remote(self._folder) else None
        manifest = packed.read_manifest(self._folder, self._read, self._title)
        if split not in manifest.splits:
            raise UnknownSplit.from_splits(self._title, split, manifest.splits)
        self.info, self._shards = manifest.info, manifest.splits[split]
        for shard in self._shards:
            self._require_complete(shard)
        self._shard_index = ShardIndex(shard.examples for shard in self._shards)
        if self._bucket:
            # Keep shards of all splits, so that each gets its share of the cache.
            self._bucket.keep([s.name for shards in manifest.splits.values() for s in shards])
            counts = {shard.name: shard.examples for shard in self._shards}
            self._records = remote.Records(self._bucket, counts, self._title)

    def _read(self, name: str) -> bytes:
        if self._bucket is None:
            return paths.read_bytes(self._folder / name, paths.TABLE)
        if name not in self._bucket.files:
            raise FileNotFoundError(name)
        return self._bucket.read(name, 0, self._bucket.files[name].size)

    def _require_complete(self, shard: packed.Shard) -> None:
        if not paths.stays_inside(shard.name):
            raise UserError(f'{self._title}: lists {shard.name!r}, outside of {self._folder}')
        file = self._folder / shard.name
        if self._bucket:
            entry = self._bucket.files.get(shard.name)
            size = entry.size if entry else None
        else:
            size = file.stat().st_size if file.is_file() else None
        if size != shard.size:
            problem = 'is missing' if size is None else f'has {size:,} of {shard.size:,} bytes'
            raise UserError(
                f'{self._title}: {file} {problem}; copy it again, or pack the data again'
            )

    @functools.cached_property
    def _records(self) -> Any:
        from array_record.python.array_record_data_source import ArrayRecordDataSource

        return ArrayRecordDataSource(
            [Instruction(str(self._folder / s.name), s.examples) for s in self._shards]
        )

    def __getstate__(self) -> dict[str, Any]:
        unpickled = () if self._bucket else ('_records',)
        return {k: v for k, v in self.__dict__.items() if k not in unpickled}

    def expect(self, indices: Iterable[int]) -> None:
        """Start reading examples from a bucket."""
        if self._bucket:
            self._records.expect(indices)

    def __len__(self) -> int:
        return len(self._shard_index)

    def __getitem__(self, index: int, /) -> Record:
        return images.decode_record(self.encoded(index), self.record_name(index))

    def encoded(self, index: int, /) -> Record:
        try:
            return packed.decode(self._records[index])
        except UserError:
            raise
        except Exception as error:  # the reader raises several undocumented types
            raise BrokenRecord(f'{self.record_name(index)}: {error}') from error

    def labels(self) -> np.ndarray:
        file = self._folder / f'{self._split}.labels.npy'
        try:
            labels = np.load(io.BytesIO(self._read(file.name)))
        except FileNotFoundError as error:
            raise UserError(f'{self._title}: not every example has a class') from error
        except (OSError, ValueError, EOFError) as error:
            raise UserError(f'{self._title}: {file} cannot be read: {error}') from error
        if labels.shape != (len(self),):
            raise UserError(f'{self._title}: {file} has {len(labels)} of {len(self)} labels')
        if labels.dtype.kind not in 'iu':
            raise UserError(f'{self._title}: {file} has dtype {labels.dtype}, not integers')
        return labels

    def class_counts(self, indices: np.ndarray, /) -> np.ndarray | None:
        with contextlib.suppress(UserError):  # an example has no class
            return count_labels(self.labels()[indices], self.info.num_classes)
        return None

    def listing(self, indices: np.ndarray, /) -> Listing:
        """Digest whole shards, by the manifest."""
        labels = np.zeros(0, np.int64)
        with contextlib.suppress(UserError):  # an example has no class
            labels = self.labels()[indices]
        shards = [f'{shard.name} {shard.examples}' for shard in self._shards]
        return Listing(
            listing.digest_of(shards, labels),
            listing.digest_of(shard.sha256 for shard in self._shards),
        )

    def record_name(self, index: int, /) -> str:
        shard, row = self._shard_index.locate(index)
        return f'{self._folder / self._shards[shard].name} record {row}'
