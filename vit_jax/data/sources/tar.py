"""`tar:PATTERN`: WebDataset shards, tar files in which an example is a few consecutive members.

    tar:/data/flowers                      SPLIT-*.tar, or all of *.tar as `train`
    tar:/data/cc3m-{split}-*.tar           the same with other names
    tar:/data/cc3m-{000000..000331}.tar    a range, as `train`

The members of an example share the name up to the first dot: `0001.jpg` (or png, webp) is the
image, `0001.cls` the number of its class, `0001.txt` its caption; `0001.json` is an object whose
`label` is a class and whose texts become fields under their own names. `classnames.txt` next to the
shards has one name a line. Shards are indexed once, in the user's cache folder; examples are in the
order of the shards.
"""

from __future__ import annotations

import glob
import logging
import pathlib
import re
import tarfile
from collections.abc import Iterator
from typing import IO, Any

import numpy as np

from vit_jax.data import images, listing
from vit_jax.data.records import (
    BrokenRecord,
    Listing,
    Record,
    ShardIndex,
    SourceInfo,
    UnknownSplit,
    count_labels,
)
from vit_jax.errors import UserError
from vit_jax.storage import cache, paths

log = logging.getLogger(__name__)

IMAGES = ('jpg', 'jpeg', 'png', 'webp')
FIELDS = ('image', 'cls', 'txt', 'json')
CLASSES = ('cls', 'json')
SPLIT = '{split}'
RANGE = re.compile(r'\{(\d+)\.\.(\d+)\}')
CLASS_NAMES = 'classnames.txt'
NO_LABEL = -1
INDEX = 2  # version; the first left out classes that were not integers
MOST_CLASSES = 10**6
JSON_LIMIT = 2**20  # bytes of a member other than the image


class Source:
    """Records {image, label} and {image, caption} of all shards of a split."""

    def __init__(self, path: str, split: str):
        self._title = f'source tar:{path}'
        self._shards = find_shards(path, split)
        indices = [indexed(shard, self._title) for shard in self._shards]
        self._shard_index = ShardIndex(len(index['names']) for index in indices)
        self._names = [index['names'] for index in indices]
        self._members = [index['members'] for index in indices]
        self._labels = np.concatenate([index['labels'] for index in indices])
        if not len(self):
            raise UserError(f'{self._title}: no shard has a member {"|".join(IMAGES)}')
        self.info = self._classes()

    def _classes(self) -> SourceInfo:
        without = np.flatnonzero(self._labels == NO_LABEL)
        if without.size:
            if without.size < len(self):
                log.warning(
                    '%s: %d of %d examples have no class, the first is %s: classes are left out',
                    *(self._title, without.size, len(self), self.record_name(int(without[0]))),
                )
            return SourceInfo(0, ())
        count = int(self._labels.max()) + 1
        file = self._shards[0].parent / CLASS_NAMES
        names = (
            tuple(paths.read_bytes(file).decode().splitlines())
            if file.is_file()
            else tuple(map(str, range(count)))
        )
        if len(names) < count:
            raise UserError(
                f'{self._title}: {file} names {len(names)} classes, but a label is {count - 1}'
            )
        return SourceInfo(len(names), names)

    def __len__(self) -> int:
        return len(self._shard_index)

    def __getitem__(self, index: int, /) -> Record:
        return images.decoded(self.encoded(index), self.record_name(index))

    def encoded(self, index: int, /) -> Record:
        name = self.record_name(index)
        shard, row = self._shard_index.locate(index)
        try:
            with paths.open_file(self._shards[shard]) as file:
                found = dict(_contents(file, self._members[shard][row]))
        except OSError as error:
            raise BrokenRecord(f'{name}: {error.strerror or error}') from error
        record: Record = {'image': found['image']}
        if self.info.num_classes:
            record['label'] = int(self._labels[index])
        try:
            return record | texts(found)
        except ValueError as error:
            raise BrokenRecord(f'{name}: {error}') from error

    def labels(self) -> np.ndarray:
        if not self.info.num_classes:
            raise UserError(f'{self._title}: not every image has a class (NAME.cls)')
        return self._labels

    def class_counts(self, indices: np.ndarray, /) -> np.ndarray:
        return count_labels(self._labels[indices], self.info.num_classes)

    def listing(self, indices: np.ndarray, /) -> Listing:
        names = [name for shard in self._names for name in shard.tolist()]
        sizes = np.concatenate([members[..., 1] for members in self._members])
        chosen = b'\0'.join(names[i] for i in indices.tolist())
        return Listing(
            listing.digest_of(chosen, self._labels[indices]), listing.digest_of(sizes[indices])
        )

    def record_name(self, index: int, /) -> str:
        shard, row = self._shard_index.locate(index)
        return f'{self._shards[shard]} {self._names[shard][row].decode(errors="replace")}'


def find_shards(path: str, split: str) -> list[pathlib.Path]:
    """The tar files of a split, sorted by name.

    Raises:
      UnknownSplit: if there are none of this split.
      UserError: if one of a range is missing.
    """
    folder = pathlib.Path(path).expanduser()
    if folder.is_dir():
        return _in_folder(folder, split, path)
    pattern = str(folder)
    if SPLIT in pattern:
        pattern = pattern.replace(SPLIT, glob.escape(split))
    elif split != 'train':
        raise UnknownSplit(
            f'source tar:{path}: has no split {split!r}, for its pattern names all of its files: '
            "write {split} into it, or use 'train'"
        )
    found = [pathlib.Path(name) for one in _expanded(pattern) for name in sorted(glob.glob(one))]
    if missing := [one for one in _expanded(pattern) if not glob.glob(one)]:
        kind = UserError if found or SPLIT not in path else UnknownSplit
        raise kind(f'source tar:{path}: there is no file {missing[0]}')
    return found


def _in_folder(folder: pathlib.Path, split: str, path: str) -> list[pathlib.Path]:
    shards = sorted(folder.glob('*.tar'))
    if not shards:
        raise UserError(f'source tar:{path}: there is no file *.tar')
    if mine := [shard for shard in shards if shard.name.startswith(f'{split}-')]:
        return mine
    if split != 'train':
        splits = {shard.name.rpartition('-')[0] for shard in shards} - {''} or {'train'}
        raise UnknownSplit.from_splits(f'source tar:{path}', split, splits)
    return shards


def _expanded(pattern: str) -> list[str]:
    """The patterns that a range in braces stands for."""
    if (match := RANGE.search(pattern)) is None:
        return [pattern]
    first, last = match.groups()
    numbers = [f'{n:0{len(first)}}' for n in range(int(first), int(last) + 1)]
    return [pattern[: match.start()] + number + pattern[match.end() :] for number in numbers]


def indexed(shard: pathlib.Path, title: str) -> dict[str, np.ndarray]:
    """The examples of a shard: positions of their members, and their classes.

    Returns:
      names: bytes [n]; members: int64 [n, fields, 2], position and size of each of `FIELDS`, size
      -1 for a missing one; labels: int64 [n], `NO_LABEL` if missing.

    Raises:
      UserError: if the shard is damaged, or the index cannot be kept.
    """
    file = cache.folder('tar') / f'{cache.key([shard])}.{INDEX}.npz'

    def make(path: pathlib.Path) -> None:
        with path.open('wb') as opened:
            arrays: Any = scanned(shard, title)
            np.savez(opened, **arrays)

    try:
        with np.load(cache.made_once(file, make)) as arrays:
            return dict(arrays)
    except (ValueError, EOFError, KeyError, OSError):  # a damaged index is made anew
        file.unlink(missing_ok=True)
        return scanned(shard, title)


def scanned(shard: pathlib.Path, title: str) -> dict[str, np.ndarray]:
    """Read the headers of a shard and the classes in it; see `indexed`.

    Raises:
      UserError: if the shard cannot be read, or a class in it is not an integer.
    """
    names: list[bytes] = []
    members: list[np.ndarray] = []
    labels: list[int] = []
    try:
        with (
            paths.open_file(shard) as file,
            paths.open_file(shard) as headers,
            tarfile.open(fileobj=headers, mode='r:') as tar,
        ):
            for name, row in _examples(tar, shard.stat().st_size):
                names.append(name.encode())
                members.append(row)
                try:
                    labels.append(label_of(dict(_contents(file, row, CLASSES))))
                except ValueError as error:
                    raise UserError(f'{title}: {shard} {name}: {error}') from error
    except (tarfile.TarError, EOFError, OSError, ValueError) as error:
        raise UserError(
            f'{title}: {shard} cannot be read after {len(names)} examples ({error}): copy it '
            'again; compressed shards have to be unpacked to .tar first'
        ) from error
    return {
        'names': np.array(names, np.bytes_),
        'members': np.array(members, np.int64).reshape(-1, len(FIELDS), 2),
        'labels': np.array(labels, np.int64),
    }


def _examples(tar: tarfile.TarFile, size: int) -> Iterator[tuple[str, np.ndarray]]:
    """The name and the members of each example with an image."""
    name, row = '', np.full((len(FIELDS), 2), -1)
    for member in tar:
        tar.members = []  # type: ignore[attr-defined]  # else it keeps all of them
        if not member.isfile():
            continue
        if member.offset_data + member.size > size:
            raise tarfile.ReadError(f'{member.name} is cut off')
        folder, _, base = member.name.rpartition('/')
        stem, _, kind = base.partition('.')
        if f'{folder}/{stem}' != name:
            if row[0, 1] >= 0:
                yield name.lstrip('/'), row
            name, row = f'{folder}/{stem}', np.full((len(FIELDS), 2), -1)
        field = 'image' if kind.lower() in IMAGES else kind.lower()
        if field in FIELDS:
            row[FIELDS.index(field)] = member.offset_data, member.size
    if row[0, 1] >= 0:
        yield name.lstrip('/'), row


def _contents(
    file: IO[bytes], row: np.ndarray, fields: tuple[str, ...] = FIELDS
) -> Iterator[tuple[str, bytes]]:
    for field in fields:
        position, size = row[FIELDS.index(field)].tolist()
        if size >= 0:
            if size > (paths.IMAGE if field == 'image' else JSON_LIMIT):
                raise OSError(f'{field} has {size:,} bytes')
            file.seek(position)
            yield field, file.read(size)


def label_of(found: dict[str, bytes]) -> int:
    """The class of an example; `NO_LABEL` if it has none, or a text instead of a number.

    Raises:
      ValueError: if it is anything but an integer from 0 to `MOST_CLASSES` - 1.
    """
    label = _object(found).get('label')
    if 'cls' in found:
        label = found['cls'].decode(errors='replace').strip()
        label = int(label) if label.isdecimal() and len(label) < 10 else label
    elif label is None or isinstance(label, str):
        return NO_LABEL
    if type(label) is not int or not 0 <= label < MOST_CLASSES:
        raise ValueError(
            f'its class, {str(label)[:40]!r}, is not an integer from 0 to {MOST_CLASSES - 1:,}'
        )
    return label


def texts(found: dict[str, bytes]) -> Record:
    """The texts of an example: `caption`, and the texts of its JSON under their own names.

    Raises:
      ValueError: if they cannot be read.
    """
    record: Record = {k: v for k, v in _object(found).items() if isinstance(v, str)}
    if 'txt' in found:
        record['caption'] = found['txt'].decode().strip()
    return {k: v for k, v in record.items() if k not in ('image', 'label')}


def _object(found: dict[str, bytes]) -> dict:
    about = paths.parse_json(found.get('json', b'{}'))
    return about if isinstance(about, dict) else {}
