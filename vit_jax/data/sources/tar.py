"""`tar:PATTERN`: WebDataset shards, tar files in which an example is a few consecutive members.

    tar:/data/flowers                      SPLIT-*.tar, or all of *.tar as `train`
    tar:/data/cc3m-{split}-*.tar           the same with other names
    tar:/data/cc3m-{000000..000331}.tar    a range, as `train`

The members of an example share the name up to the first dot: `0001.jpg` (or png, webp) is the
image, `0001.cls` the number of its class, `0001.txt` its caption; `0001.json` is an object whose
`label` is a class and whose texts become fields under their own names. `classnames.txt` next to the
shards has one name a line. Shards are indexed once, in the user's cache folder; examples are in the
order of the shards. Hidden members are skipped, and links are read as their targets in the shard.
Two members with the same name in an example are an error, as in webdataset.
"""

from __future__ import annotations

import glob
import json
import logging
import pathlib
import posixpath
import re
import tarfile
from collections.abc import Iterable, Iterator
from typing import IO, Any, NamedTuple

import numpy as np

from vit_jax.data import images, listing
from vit_jax.data.records import (
    MOST_CLASSES,
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

IMAGES = ('jpg', 'jpeg', 'png', 'webp')  # of several, the first is taken
FIELDS = ('image', 'cls', 'txt', 'json')
CLASSES = ('cls', 'json')
SPLIT = '{split}'
RANGE = re.compile(r'\{(\d+)\.\.(\d+)\}')
CLASS_NAMES = 'classnames.txt'
NO_LABEL = -1
INDEX = 3  # version; earlier ones lack links and remarks
JSON_LIMIT = 2**20  # bytes of a member other than the image
MOST_LINKS = 40  # from a link to a file, as on Linux
REMARKS = {
    'links': 'links left out whose target is not in their shard',
    'dots': "images left out whose names go on after the first dot, where an example's name ends",
    'images': f'examples with several images, of which the first of {", ".join(IMAGES)} is taken',
}


class Member(NamedTuple):
    """A file in a shard.

    Attributes:
      name: path in the shard.
      position: offset of the content in bytes.
      size: size of the content in bytes.
    """

    name: str
    position: int
    size: int


class Source:
    """Records {image, label} and {image, caption} of all shards of a split."""

    def __init__(self, path: str, split: str):
        self._title = f'source tar:{path}'
        self._shards = find_shards(path, split)
        indices = [read_index(shard, self._title) for shard in self._shards]
        self._shard_index = ShardIndex(len(index['names']) for index in indices)
        self._names = [index['names'] for index in indices]
        self._members = [index['members'] for index in indices]
        self._labels = np.concatenate([index['labels'] for index in indices])
        remarks = _join_remarks(json.loads(str(index['remarks'])) for index in indices)
        if not len(self):
            reasons = '; '.join([f'no shard has a member {"|".join(IMAGES)}', *remarks])
            raise UserError(f'{self._title}: {reasons}')
        for remark in remarks:
            listing.warn_once(f'{self._title}: {remark}')
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
        names = _class_names(file) if file.is_file() else tuple(map(str, range(count)))
        if len(names) < count:
            raise UserError(
                f'{self._title}: {file} names {len(names)} classes, but a label is {count - 1}'
            )
        return SourceInfo(len(names), names)

    def __len__(self) -> int:
        return len(self._shard_index)

    def __getitem__(self, index: int, /) -> Record:
        return images.decode_record(self.encoded(index), self.record_name(index))

    def encoded(self, index: int, /) -> Record:
        name = self.record_name(index)
        shard, row = self._shard_index.locate(index)
        try:
            with paths.open_file(self._shards[shard]) as file:
                contents = dict(_contents(file, self._members[shard][row]))
        except OSError as error:
            raise BrokenRecord(f'{name}: {error.strerror or error}') from error
        try:
            label, fields = label_of(contents), texts(contents)
        except ValueError as error:
            raise BrokenRecord(f'{name}: {error}') from error
        record: Record = {'image': contents['image']}
        if self.info.num_classes:
            record['label'] = label
            if label != self._labels[index]:
                raise UserError(
                    f'{name}: its class is {label}, but {self._labels[index]} in the index of the '
                    f'shard, which has changed: start again, or remove {cache.folder("tar")}'
                )
        return record | fields

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
    matches = {part: sorted(glob.glob(part)) for part in _expand_range(pattern)}
    shards = [pathlib.Path(name) for names in matches.values() for name in names]
    if missing := [part for part, names in matches.items() if not names]:
        kind = UserError if shards or SPLIT not in path else UnknownSplit
        raise kind(f'source tar:{path}: there is no file {missing[0]}')
    return shards


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


def _expand_range(pattern: str) -> list[str]:
    """The pattern for each number of a range in braces."""
    if (match := RANGE.search(pattern)) is None:
        return [pattern]
    first, last = match.groups()
    numbers = [f'{n:0{len(first)}}' for n in range(int(first), int(last) + 1)]
    return [pattern[: match.start()] + number + pattern[match.end() :] for number in numbers]


def read_index(shard: pathlib.Path, title: str) -> dict[str, np.ndarray]:
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
            arrays: Any = scan(shard, title)
            np.savez(opened, **arrays)

    try:
        with np.load(cache.made_once(file, make)) as arrays:
            return dict(arrays)
    except (ValueError, EOFError, KeyError, OSError):  # a damaged index is made anew
        file.unlink(missing_ok=True)
        return scan(shard, title)


def scan(shard: pathlib.Path, title: str) -> dict[str, Any]:
    """Read the headers of a shard and the classes in it; see `read_index`.

    Raises:
      UserError: if the shard cannot be read, a class in it is not an integer, or the members of an
        example are not consecutive or have the same name.
    """
    names: list[str] = []
    rows: list[np.ndarray] = []
    labels: list[int] = []
    remarks: dict[str, list[str]] = {kind: [] for kind in REMARKS}
    imageless: set[str] = set()
    duplicates: list[str] = []
    try:
        with (
            paths.open_file(shard) as file,
            paths.open_file(shard) as headers,
            tarfile.open(fileobj=headers, mode='r:') as tar,
        ):
            members = _members(tar, shard.stat().st_size, remarks['links'])
            for name, fields in _examples(members, duplicates):
                if (image := _choose_image(name, fields, remarks)) is None:
                    imageless.add(name)
                    continue
                row = _row([image, *map(fields.get, FIELDS[1:])])
                try:
                    labels.append(label_of(dict(_contents(file, row, CLASSES))))
                except ValueError as error:
                    raise UserError(f'{title}: {shard} {name}: {error}') from error
                names.append(name)
                rows.append(row)
    except (tarfile.TarError, EOFError, OSError, ValueError) as error:
        raise UserError(
            f'{title}: {shard} cannot be read after {len(names)} examples ({error}): copy it '
            'again; compressed shards have to be unpacked to .tar first'
        ) from error
    _check_members(f'{title}: {shard}', duplicates, [x for x in names if x in imageless])
    return {
        'names': np.array([name.encode(errors='surrogateescape') for name in names], np.bytes_),
        'members': np.array(rows, np.int64).reshape(-1, len(FIELDS), 2),
        'labels': np.array(labels, np.int64),
        'remarks': json.dumps({kind: (len(some), some[:1]) for kind, some in remarks.items()}),
    }


def _check_members(shard: str, duplicates: list[str], scattered: list[str]) -> None:
    """Raise UserError for members with the same name, or examples in several pieces."""
    if duplicates:
        raise UserError(
            f'{shard}: {len(duplicates)} members have the name of another in their example, such '
            f'as {duplicates[0]}: give each example a unique name'
        )
    if scattered:
        raise UserError(
            f'{shard}: the members of {len(scattered)} examples are not consecutive, such as '
            f'{scattered[0]}: write it anew with sorted names (tar --sort=name)'
        )


def _choose_image(
    name: str, fields: dict[str, Member], remarks: dict[str, list[str]]
) -> Member | None:
    """The image of an example, if it has one; `remarks` gets the images that are left out."""
    kinds = [kind for kind in IMAGES if kind in fields]
    if not kinds:
        dotted = (kind for kind in fields if kind.rpartition('.')[2] in IMAGES)
        remarks['dots'] += [fields[kind].name for kind in dotted]
        return None
    if len(kinds) > 1:
        remarks['images'].append(f'{name}.{kinds[1]}')
    return fields[kinds[0]]


def _join_remarks(remarks: Iterable[dict[str, tuple[int, list[str]]]]) -> list[str]:
    """What was left out of shards, each kind with its number and the first example."""
    counts = dict.fromkeys(REMARKS, 0)
    examples: dict[str, str] = {}
    for shard in remarks:
        for kind, (count, first) in shard.items():
            counts[kind] += count
            if first:
                examples.setdefault(kind, first[0])
    return [f'{counts[kind]} {REMARKS[kind]}, such as {examples[kind]}' for kind in examples]


def _members(tar: tarfile.TarFile, size: int, lost: list[str]) -> list[Member]:
    """The files of a shard of `size` bytes in their order; `lost` gets links without a target."""
    members: dict[int, Member] = {}
    places: dict[str, Member] = {}
    links: dict[str, tuple[int, str, str]] = {}
    for number, info in enumerate(tar):
        tar.members = []  # type: ignore[attr-defined]  # else it keeps all of them
        path = posixpath.normpath(info.name)
        if info.issym():
            target = posixpath.join(posixpath.dirname(path), info.linkname)
            links[path] = number, info.name, posixpath.normpath(target)
        elif info.islnk():
            links[path] = number, info.name, posixpath.normpath(info.linkname)
        elif info.isfile():
            if info.offset_data + info.size > size:
                raise tarfile.ReadError(f'{info.name} is cut off')
            if info.issparse():
                raise tarfile.ReadError(f'{info.name} is a sparse file')
            members[number] = places[path] = Member(info.name, info.offset_data, info.size)
    for number, name, target in links.values():
        for _ in range(MOST_LINKS):
            if target not in links:
                break
            target = links[target][2]
        if target in places:
            members[number] = places[target]._replace(name=name)
        else:
            lost.append(name)
    return [members[number] for number in sorted(members)]


def _examples(
    members: Iterable[Member], duplicates: list[str]
) -> Iterator[tuple[str, dict[str, Member]]]:
    """The name of each example, and its members by the rest of their names, in lower case.

    `duplicates` gets the members that have the name of another one.
    """
    name = ''
    fields: dict[str, Member] = {}
    for member in members:
        folder, _, base = member.name.rpartition('/')
        stem, _, kind = base.partition('.')
        if not (stem and kind):  # hidden files, such as ._0001.jpg of macOS, belong to none
            continue
        if f'{folder}/{stem}' != name:
            if fields:
                yield name.lstrip('/'), fields
            name, fields = f'{folder}/{stem}', {}
        if fields.setdefault(kind.lower(), member) is not member:
            duplicates.append(member.name)
    if fields:
        yield name.lstrip('/'), fields


def _row(members: Iterable[Member | None]) -> np.ndarray:
    """Positions and sizes of an example's members; -1 for a missing one."""
    return np.array([(-1, -1) if member is None else member[1:] for member in members])


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


def label_of(contents: dict[str, bytes]) -> int:
    """The class of an example; `NO_LABEL` if it has none, or a text instead of a number.

    Raises:
      ValueError: if it is anything but an integer from 0 to `MOST_CLASSES` - 1.
    """
    label = _object(contents).get('label')
    if 'cls' in contents:
        label = contents['cls'].decode(errors='replace').strip()
        label = int(label) if label.isdecimal() and len(label) < 10 else label
    elif label is None or isinstance(label, str):
        return NO_LABEL
    if type(label) is not int or not 0 <= label < MOST_CLASSES:
        raise ValueError(
            f'its class, {str(label)[:40]!r}, is not an integer from 0 to {MOST_CLASSES - 1:,}'
        )
    return label


def _class_names(file: pathlib.Path) -> tuple[str, ...]:
    """The names of classes, one a line; UserError if a line is empty or the file cannot be read."""
    try:
        names = paths.read_lines(file)
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f'{file}: cannot be read as UTF-8: {paths.first_line(error)}') from error
    empty = next((number for number, name in enumerate(names, 1) if not name.strip()), None)
    if empty:
        raise UserError(f'{file}: line {empty} is empty: write the name of a class')
    return tuple(names)


def texts(contents: dict[str, bytes]) -> Record:
    """The texts of an example: `caption`, and the texts of its JSON under their own names.

    Raises:
      ValueError: if they cannot be read.
    """
    record: Record = {k: v for k, v in _object(contents).items() if isinstance(v, str)}
    if 'txt' in contents:
        record['caption'] = contents['txt'].decode().strip()
    return {k: v for k, v in record.items() if k not in ('image', 'label')}


def _object(contents: dict[str, bytes]) -> dict:
    value = paths.parse_json(contents.get('json', b'{}'))
    return value if isinstance(value, dict) else {}
