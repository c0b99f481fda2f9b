"""`tar:PATTERN`: WebDataset shards, tar files with a few consecutive members per example.

    tar:/data/flowers                      SPLIT-*.tar, or else all *.tar as `train`
    tar:/data/cc3m-{split}-*.tar           the same with other names
    tar:/data/cc3m-{000000..000331}.tar    a range, the split `train`

The members of an example share the name up to the first dot: `0001.jpg` (or png, webp) is the
image, `0001.cls` its class number, `0001.txt` its caption; `0001.json` is an object with the class
`label` and texts that become fields under their keys. `classnames.txt` next to the shards has one
name per line. Shards are indexed once, in the user's cache folder; examples have the order of the
shards. Hidden members are skipped, and links are resolved within the shard. Two members with the
same name in an example are an error, as in webdataset.
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
from vit_jax.runtime import caches
from vit_jax.storage import cache, paths

log = logging.getLogger(__name__)

IMAGES = ('jpg', 'jpeg', 'png', 'webp')  # in order of preference
FIELDS = ('image', 'cls', 'txt', 'json')
CLASSES = ('cls', 'json')
SPLIT = '{split}'
RANGE = re.compile(r'\{(\d+)\.\.(\d+)\}')
CLASS_NAMES = 'classnames.txt'
NO_LABEL = -1
INDEX = 3  # version of the index; earlier ones lack links and remarks
JSON_LIMIT = 2**20  # most bytes of a member that is not an image
MOST_LINKS = 40  # most links in a chain, as on Linux
REMARKS = {
    'links': 'links were ignored because their target is not in their shard',
    'dots': "images were ignored because of a second dot; an example's name ends at the first dot",
    'images': f'examples have several images; the first of {", ".join(IMAGES)} is used',
}


class Member(NamedTuple):
    """A file in a shard.

    Attributes:
      name: Path in the shard.
      position: Offset of the content in bytes.
      size: Size of the content in bytes.
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
        self.info = self._read_info()

    def _read_info(self) -> SourceInfo:
        unlabeled = np.flatnonzero(self._labels == NO_LABEL)
        if unlabeled.size:
            if unlabeled.size < len(self):
                log.warning(
                    '%s: %d of %d examples have no class, first %s; ignoring all classes',
                    *(self._title, unlabeled.size, len(self), self.record_name(int(unlabeled[0]))),
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
                contents = dict(_read_fields(file, self._members[shard][row]))
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
                    f'{name}: its class is {label}, but {self._labels[index]} in the index, so the '
                    f'shard has changed; start again, or remove {caches.folder("tar")}'
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
        member_names = b'\0'.join(names[i] for i in indices.tolist())
        return Listing(
            listing.digest_of(member_names, self._labels[indices]),
            listing.digest_of(sizes[indices]),
        )

    def record_name(self, index: int, /) -> str:
        shard, row = self._shard_index.locate(index)
        return f'{self._shards[shard]} {self._names[shard][row].decode(errors="replace")}'


def find_shards(path: str, split: str) -> list[pathlib.Path]:
    """Find the tar files of a split, sorted by name.

    Raises:
      UnknownSplit: if this split has no files.
      UserError: if a file of a range is missing.
    """
    folder = pathlib.Path(path).expanduser()
    if folder.is_dir():
        return _find_in_folder(folder, split, path)
    pattern = str(folder)
    if SPLIT in pattern:
        pattern = pattern.replace(SPLIT, glob.escape(split))
    elif split != 'train':
        raise UnknownSplit(
            f'source tar:{path}: has no split {split!r}: the pattern matches the files of all '
            "splits; write {split} into it, or use 'train'"
        )
    matches = {part: sorted(glob.glob(part)) for part in _expand_range(pattern)}
    shards = [pathlib.Path(name) for names in matches.values() for name in names]
    if missing := [part for part, names in matches.items() if not names]:
        kind = UserError if shards or SPLIT not in path else UnknownSplit
        raise kind(f'source tar:{path}: {missing[0]} does not exist')
    return shards


def _find_in_folder(folder: pathlib.Path, split: str, path: str) -> list[pathlib.Path]:
    shards = sorted(folder.glob('*.tar'))
    if not shards:
        raise UserError(f'source tar:{path}: has no *.tar file')
    if matches := [shard for shard in shards if shard.name.startswith(f'{split}-')]:
        return matches
    if split != 'train':
        splits = {shard.name.rpartition('-')[0] for shard in shards} - {''} or {'train'}
        raise UnknownSplit.from_splits(f'source tar:{path}', split, splits)
    return shards


def _expand_range(pattern: str) -> list[str]:
    """Expand a range in braces to one pattern per number."""
    if (match := RANGE.search(pattern)) is None:
        return [pattern]
    first, last = match.groups()
    numbers = [f'{n:0{len(first)}}' for n in range(int(first), int(last) + 1)]
    return [pattern[: match.start()] + number + pattern[match.end() :] for number in numbers]


def read_index(shard: pathlib.Path, title: str) -> dict[str, np.ndarray]:
    """Read the cached index of a shard: positions of members, and classes.

    Returns:
      names: bytes [n]; members: int64 [n, fields, 2], position and size of each of `FIELDS`, size
      -1 for a missing one; labels: int64 [n], `NO_LABEL` if missing.

    Raises:
      UserError: if the shard is damaged, or the index cannot be cached.
    """

    def make(path: pathlib.Path) -> None:
        with path.open('wb') as opened:
            arrays: Any = scan(shard, title)
            np.savez(opened, **arrays)

    name = f'{cache.key([shard])}.{INDEX}.npz'
    file = cache.make_once('tar', name, shard, make)
    try:
        with np.load(file) as arrays:
            return dict(arrays)
    except (ValueError, EOFError, KeyError, OSError):  # the index is damaged
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
            members = _list_members(tar, shard.stat().st_size, remarks['links'])
            for name, fields in _group_members(members, duplicates):
                if (image := _choose_image(name, fields, remarks)) is None:
                    imageless.add(name)
                    continue
                row = _positions([image, *map(fields.get, FIELDS[1:])])
                try:
                    labels.append(label_of(dict(_read_fields(file, row, CLASSES))))
                except ValueError as error:
                    raise UserError(f'{title}: {shard} {name}: {error}') from error
                names.append(name)
                rows.append(row)
    except (tarfile.TarError, EOFError, OSError, ValueError) as error:
        raise UserError(
            f'{title}: {shard} cannot be read after {len(names)} examples ({error}): copy it '
            'again; unpack compressed shards to .tar first'
        ) from error
    _check_members(f'{title}: {shard}', duplicates, [x for x in names if x in imageless])
    return {
        'names': np.array([name.encode(errors='surrogateescape') for name in names], np.bytes_),
        'members': np.array(rows, np.int64).reshape(-1, len(FIELDS), 2),
        'labels': np.array(labels, np.int64),
        'remarks': json.dumps({kind: (len(names), names[:1]) for kind, names in remarks.items()}),
    }


def _check_members(shard: str, duplicates: list[str], scattered: list[str]) -> None:
    """Raise UserError for members with the same name, or examples split into pieces."""
    if duplicates:
        raise UserError(
            f'{shard}: {len(duplicates)} members have the same name as another in their example, '
            f'such as {duplicates[0]}; give each example a unique name'
        )
    if scattered:
        raise UserError(
            f'{shard}: the members of {len(scattered)} examples are not consecutive, such as '
            f'{scattered[0]}; write the shard again with sorted names (tar --sort=name)'
        )


def _choose_image(
    name: str, fields: dict[str, Member], remarks: dict[str, list[str]]
) -> Member | None:
    """Choose the image of an example, if any; add ignored images to `remarks`."""
    kinds = [kind for kind in IMAGES if kind in fields]
    if not kinds:
        dotted = (kind for kind in fields if kind.rpartition('.')[2] in IMAGES)
        remarks['dots'] += [fields[kind].name for kind in dotted]
        return None
    if len(kinds) > 1:
        remarks['images'].append(f'{name}.{kinds[1]}')
    return fields[kinds[0]]


def _join_remarks(remarks: Iterable[dict[str, tuple[int, list[str]]]]) -> list[str]:
    """Describe what was ignored in shards: for each kind its count and first example."""
    counts = dict.fromkeys(REMARKS, 0)
    examples: dict[str, str] = {}
    for shard in remarks:
        for kind, (count, first) in shard.items():
            counts[kind] += count
            if first:
                examples.setdefault(kind, first[0])
    return [f'{counts[kind]} {REMARKS[kind]}, such as {examples[kind]}' for kind in examples]


def _list_members(tar: tarfile.TarFile, size: int, lost: list[str]) -> list[Member]:
    """List the files of a shard of `size` bytes in order; add links without a target to `lost`."""
    members: dict[int, Member] = {}
    members_by_name: dict[str, Member] = {}
    links: dict[str, tuple[int, str, str]] = {}
    for number, info in enumerate(tar):
        tar.members = []  # type: ignore[attr-defined]  # else tarfile keeps all members
        path = posixpath.normpath(info.name)
        if info.issym():
            target = posixpath.join(posixpath.dirname(path), info.linkname)
            links[path] = number, info.name, posixpath.normpath(target)
        elif info.islnk():
            links[path] = number, info.name, posixpath.normpath(info.linkname)
        elif info.isfile():
            if info.offset_data + info.size > size:
                raise tarfile.ReadError(f'{info.name} is truncated')
            if info.issparse():
                raise tarfile.ReadError(f'{info.name} is a sparse file')
            members[number] = members_by_name[path] = Member(info.name, info.offset_data, info.size)
    for number, name, target in links.values():
        for _ in range(MOST_LINKS):
            if target not in links:
                break
            target = links[target][2]
        if target in members_by_name:
            members[number] = members_by_name[target]._replace(name=name)
        else:
            lost.append(name)
    return [members[number] for number in sorted(members)]


def _group_members(
    members: Iterable[Member], duplicates: list[str]
) -> Iterator[tuple[str, dict[str, Member]]]:
    """Yield each example's name, and its members by their lower-case suffixes.

    Members with the name of another one are added to `duplicates`.
    """
    name = ''
    fields: dict[str, Member] = {}
    for member in members:
        folder, _, base = member.name.rpartition('/')
        stem, _, kind = base.partition('.')
        if not (stem and kind):  # skip hidden files, such as macOS's ._0001.jpg
            continue
        if f'{folder}/{stem}' != name:
            if fields:
                yield name.lstrip('/'), fields
            name, fields = f'{folder}/{stem}', {}
        if fields.setdefault(kind.lower(), member) is not member:
            duplicates.append(member.name)
    if fields:
        yield name.lstrip('/'), fields


def _positions(members: Iterable[Member | None]) -> np.ndarray:
    """Return positions and sizes of an example's members; -1 for a missing one."""
    return np.array([(-1, -1) if member is None else member[1:] for member in members])


def _read_fields(
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
    """Read the class of an example; `NO_LABEL` if it is missing or a text.

    Raises:
      ValueError: for anything else except an integer from 0 to `MOST_CLASSES` - 1.
    """
    label = _parse_object(contents).get('label')
    if 'cls' in contents:
        label = contents['cls'].decode(errors='replace').strip()
        label = int(label) if label.isdecimal() and len(label) < 10 else label
    elif label is None or isinstance(label, str):
        return NO_LABEL
    if type(label) is not int or not 0 <= label < MOST_CLASSES:
        raise ValueError(
            f'its class {str(label)[:40]!r} is not an integer from 0 to {MOST_CLASSES - 1:,}'
        )
    return label


def _class_names(file: pathlib.Path) -> tuple[str, ...]:
    """Read one class name per line; UserError if a line is empty or the file cannot be read."""
    try:
        names = paths.read_lines(file)
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f'{file}: cannot be read as UTF-8: {paths.first_line(error)}') from error
    empty = next((number for number, name in enumerate(names, 1) if not name.strip()), None)
    if empty:
        raise UserError(f'{file}: line {empty} is empty; write a class name')
    return tuple(names)


def texts(contents: dict[str, bytes]) -> Record:
    """Read the texts of an example: `caption`, and the texts of its JSON under their keys.

    Raises:
      ValueError: if they cannot be read.
    """
    record: Record = {k: v for k, v in _parse_object(contents).items() if isinstance(v, str)}
    if 'txt' in contents:
        record['caption'] = contents['txt'].decode().strip()
    return {k: v for k, v in record.items() if k not in ('image', 'label')}


def _parse_object(contents: dict[str, bytes]) -> dict:
    value = paths.parse_json(contents.get('json', b'{}'))
    return value if isinstance(value, dict) else {}
