"""`hf:PATH`: images of Hugging Face `datasets`, as Arrow or Parquet files on this machine.

    hf:/data/flowers            written by `save_to_disk`, or a download of the repository
    hf:ORG/NAME[/CONFIG]        the same in the caches of `huggingface_hub` and `datasets`

Splits come from file names, such as `train-00000-of-00005.parquet`, or from folders; a split with
missing or outdated files is refused. Arrow files are memory-mapped, see `vit_jax.data.arrow`.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import os
import pathlib
import re
from collections.abc import Iterable
from typing import Any, NamedTuple

import numpy as np

from vit_jax.data import arrow, images, listing
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
from vit_jax.errors import UserError, one_line
from vit_jax.storage import paths

SUFFIXES = ('.parquet', '.arrow')
PART = re.compile(r'-(?P<part>\d+)-of-(?P<count>\d+).*')
IMAGES = ('image', 'img')
LABELS = ('label', 'labels', 'fine_label')


class Columns(NamedTuple):
    """Columns that become fields of records, and the class names.

    Attributes:
      image: Image column.
      label: Class column, or empty.
      texts: Text columns.
      classes: Class names, or empty.
    """

    image: str
    label: str
    texts: tuple[str, ...]
    classes: tuple[str, ...]


class Part(NamedTuple):
    """A file name of a split, parsed; the files of a split differ only in their number.

    Attributes:
      folder: Folder of the file.
      stem: File name before the number.
      suffix: Suffix of the file name.
      total: Number of files; 0 if the name does not contain it.
      number: Number of the file.
    """

    folder: pathlib.Path
    stem: str
    suffix: str
    total: int
    number: int


class Source:
    """Records of the image, the class if any, and texts under their column names.

    The class is a `ClassLabel` column, or an integer column named `label`. Among several image or
    class columns, the one with a usual name is read: `image` or `label`.
    """

    def __init__(self, path: str, split: str):
        self._title = f'source hf:{path}'
        root = find_saved(path)
        splits = find_splits(root, self._title)
        if split not in splits:
            raise UnknownSplit.from_splits(self._title, split, splits)
        self._split, self._root = split, root
        self._listed = [str(file.relative_to(root)) for file in splits[split]]
        self._files = [arrow.random_access(file, self._title) for file in splits[split]]
        if not len(self):
            raise UserError(f'{self._title}: the split {self._split!r} has no rows')
        self._image, self._label, self._texts, names = self._read_columns()
        self._require_bytes()
        if self._label and not names:
            names = tuple(map(str, range(self._count_classes())))
        self.info = SourceInfo(len(names), names)

    @functools.cached_property
    def _batches_of_files(self) -> list[list[Any]]:
        return [arrow.open_batches(file, self._title) for file in self._files]

    @functools.cached_property
    def _batches(self) -> list[Any]:
        return [batch for batches in self._batches_of_files for batch in batches]

    @functools.cached_property
    def _shard_index(self) -> ShardIndex:
        return ShardIndex(batch.num_rows for batch in self._batches)

    def __getstate__(self) -> dict[str, Any]:
        # A worker process maps the files again; pickled batches would copy all rows.
        mapped = ('_batches_of_files', '_batches', '_shard_index')
        return {k: v for k, v in self.__dict__.items() if k not in mapped}

    def _read_columns(self) -> Columns:
        """Read the columns of all files; UserError if they differ."""
        pairs = zip(self._listed, self._batches_of_files, strict=True)
        filled = [(name, batches[0].schema) for name, batches in pairs if batches]
        first_name, first_schema = filled[0]
        first = columns(first_schema, self._title)
        for name, schema in filled[1:]:
            other = columns(schema, f'{self._title}: {name}')
            for field, a, b in zip(Columns._fields, first, other, strict=True):
                if a != b and (field != 'texts' or set(a) != set(b)):
                    raise UserError(
                        f'{self._title}: {first_name} and {name} differ in {field}: {_quote(a)} '
                        f'and {_quote(b)}; write all files with the same features'
                    )
        return first

    def _require_bytes(self) -> None:
        """Raise UserError if the image column has only paths, without bytes."""
        for batch in self._batches:
            column = batch.column(self._image)
            files = column.field('bytes') if column.type.num_fields else column
            if files.null_count < len(files):
                return
        raise UserError(
            f'{self._title}: its column {self._image!r} has no image bytes, at most paths; write '
            'the data with `save_to_disk` or `push_to_hub`, which store the files'
        )

    def _count_classes(self) -> int:
        """Count unnamed classes: one more than the largest label."""
        labels = self._read_labels()
        invalid = np.flatnonzero((labels < 0) | (labels >= MOST_CLASSES))
        if invalid.size:
            row = int(invalid[0])
            raise UserError(
                f'{self.record_name(row)}: {self._label!r} {labels[row]} is not a class: unnamed '
                f'classes are integers from 0 to {MOST_CLASSES - 1:,}; rename the column, or '
                'number its values'
            )
        return int(labels.max()) + 1

    def __len__(self) -> int:
        return len(self._shard_index)

    def __getitem__(self, index: int, /) -> Record:
        return images.decode_record(self.encoded(index), self.record_name(index))

    def encoded(self, index: int, /) -> Record:
        name, (number, row) = self.record_name(index), self._shard_index.locate(index)
        batch = self._batches[number]
        value = batch.column(self._image)[row].as_py()
        data = value.get('bytes') if isinstance(value, dict) else value
        if not data:
            path = value.get('path') if isinstance(value, dict) else None
            detail = f', only the path {one_line(str(path))!r}' if path else ''
            raise BrokenRecord(f'{name}: {self._image!r} has no bytes{detail}')
        record: Record = {'image': data}
        if self._label:
            record['label'] = batch.column(self._label)[row].as_py()
        return record | {text: batch.column(text)[row].as_py() or '' for text in self._texts}

    def labels(self) -> np.ndarray:
        if not self._label:
            raise UserError(f'{self._title}: has no class column')
        return self._read_labels()

    def _read_labels(self) -> np.ndarray:
        labels, first_row = [], 0
        for batch in self._batches:
            column = batch.column(self._label)
            if column.null_count:
                row = first_row + column.to_pylist().index(None)
                raise UserError(f'{self.record_name(row)}: has no {self._label!r}')
            labels.append(column.to_numpy().astype(np.int64))
            first_row += batch.num_rows
        return np.concatenate(labels)

    def class_counts(self, indices: np.ndarray, /) -> np.ndarray | None:
        with contextlib.suppress(UserError):  # a row has no class
            return count_labels(self.labels()[indices], self.info.num_classes)
        return None

    def listing(self, indices: np.ndarray, /) -> Listing:
        """Digest whole files, and the examples' classes."""
        labels = np.zeros(0, np.int64)
        with contextlib.suppress(UserError):  # a row has no class
            labels = self.labels()[indices]
        rows = np.array([batch.num_rows for batch in self._batches])
        return Listing(
            listing.digest_of(self._listed, rows, labels),
            listing.digest_of_sizes(self._root, self._listed),
        )

    def record_name(self, index: int, /) -> str:
        return f'{self._title.removeprefix("source ")} {self._split} row {index}'


def find_saved(path: str) -> pathlib.Path:
    """Find the folder of a data set, locally or in the caches of Hugging Face's libraries.

    Raises:
      UserError: if it does not exist.
    """
    local = pathlib.Path(path).expanduser()
    if local.is_dir():
        return local
    org, _, name_and_config = path.partition('/')
    name, _, config = name_and_config.partition('/')
    home = pathlib.Path(os.environ.get('HF_HOME') or '~/.cache/huggingface').expanduser()
    hub = pathlib.Path(os.environ.get('HF_HUB_CACHE') or home / 'hub')
    prepared = pathlib.Path(os.environ.get('HF_DATASETS_CACHE') or home / 'datasets')
    repository = hub / f'datasets--{org}--{name}'
    revision = repository / 'refs' / 'main'
    candidates = [prepared / f'{org}___{name.lower()}' / config, prepared / name / config]
    if revision.is_file():
        candidates.insert(0, repository / 'snapshots' / revision.read_text().strip() / config)
    for folder in candidates:
        if name and folder.is_dir():
            return folder
    raise UserError(
        f'source hf:{path}: not a folder, and neither in {hub} nor in {prepared}; download it '
        f'with `hf download {org}/{name or "NAME"} --repo-type dataset`'
    )


def find_splits(root: pathlib.Path, title: str) -> dict[str, list[pathlib.Path]]:
    """Find the files of each split, sorted by name.

    Raises:
      UserError: if there are none, they belong to several configs, or a split has missing files or
        files written at different times.
    """
    splits: dict[str, list[pathlib.Path]] = {}
    configs = set()
    candidates = (file for file in sorted(root.rglob('*')) if file.suffix in SUFFIXES)
    for folder, files in itertools.groupby(candidates, key=lambda file: file.parent):
        saved = _saved_names(folder, title)
        for file in files:
            relative = file.relative_to(root)
            if _is_unfinished(relative) or (saved and file.name not in saved):
                continue
            config, split = config_and_split(relative)
            configs.add(config)
            splits.setdefault(split, []).append(file)
    if len(configs) > 1:
        names = ', '.join(sorted(str(config) for config in configs))
        raise UserError(
            f'{title}: has several configs, {names}; choose one with {title[7:]}/CONFIG'
        )
    if not splits:
        raise UserError(f'{title}: {root} has no {" or ".join(SUFFIXES)} file')
    for files_of_split in splits.values():
        _require_parts([file.relative_to(root) for file in files_of_split], title)
    return splits


def _is_unfinished(relative: pathlib.Path) -> bool:
    """Return whether a file is hidden, being prepared, or a cached result of `datasets`."""
    hidden = any(part.startswith('.') or part.endswith('.incomplete') for part in relative.parts)
    return hidden or relative.name.startswith('cache-')


def _saved_names(folder: pathlib.Path, title: str) -> tuple[str, ...]:
    """Return the files that the last `save_to_disk` wrote, if it left a list."""
    state = folder / 'state.json'
    if not state.is_file():
        return ()
    try:
        content = paths.parse_json(paths.read_bytes(state))
        names = tuple(str(entry['filename']) for entry in content['_data_files'])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UserError(f'{title}: {state} cannot be read: {paths.first_line(error)}') from error
    if missing := [name for name in names if not (folder / name).is_file()]:
        raise UserError(
            f'{title}: {len(missing)} of {len(names)} files of {folder} are missing, first '
            f'{one_line(missing[0])}; copy or save the data again'
        )
    return names


def _require_parts(files: list[pathlib.Path], title: str) -> None:
    """Raise UserError if names show that files of a split are missing or outdated."""
    parts = [_parse_part(file) for file in files]
    first, numbers = parts[0], [part.number for part in parts]
    for file, part in zip(files, parts, strict=True):
        if part._replace(number=first.number) != first:
            raise UserError(
                f'{title}: {files[0]} and {file} belong to different versions of a split; remove '
                'the older files'
            )
        if parts.count(part) > 1:
            raise UserError(
                f'{title}: {file} has the number of another file of its split; remove the older one'
            )
    expected = range(first.total) if first.total else range(min(numbers), max(numbers) + 1)
    missing = sorted(set(expected) - set(numbers))
    if missing and (first.total or expected[0] <= 1):
        raise UserError(
            f'{title}: {len(missing)} of the {len(expected)} files of the split of {files[0]} are '
            f'missing, first number {missing[0]} of {expected[0]} to {expected[-1]}; download or '
            'write them again'
        )


def _parse_part(file: pathlib.Path) -> Part:
    if match := PART.search(file.stem):
        stem, number, count = PART.sub('', file.stem), int(match['part']), int(match['count'])
        return Part(file.parent, stem, file.suffix, count, number)
    if file.stem.isdecimal():  # converted to Parquet by the hub
        return Part(file.parent, '', file.suffix, 0, int(file.stem))
    return Part(file.parent, file.stem, file.suffix, 0, 0)


def config_and_split(file: pathlib.Path) -> tuple[pathlib.Path, str]:
    """Return the folder of a file's config, and the file's split."""
    stem, folder = PART.sub('', file.stem), file.parent
    if stem == 'data' or stem.isdecimal():  # save_to_disk; converted to Parquet by the hub
        return (folder.parent, folder.name) if folder.name else (folder, 'train')
    if file.suffix == '.arrow':  # NAME-SPLIT.arrow in the cache of `datasets`
        stem = stem.rpartition('-')[2]
    return (folder.parent if folder.name == 'data' else folder), stem


def columns(schema: Any, title: str) -> Columns:
    """Choose columns by the features that `datasets` stores, or else by their types.

    Raises:
      UserError: if there is no image, several columns may be the image or the class, or the class
        column is not integers.
    """
    import pyarrow.types as kinds

    features = _read_features(schema.metadata or {})
    types = dict(zip(schema.names, schema.types, strict=True))
    declared = {name: _feature_type(features.get(name)) for name in types}
    pictures = [name for name, kind in types.items() if _holds_files(kind)]
    if not pictures:
        raise UserError(f'{title}: no image column among {_quote(types)}')
    image = _choose([n for n in pictures if declared[n] == 'Image'] or pictures, IMAGES, title)
    classes = [
        name
        for name, kind in types.items()
        if kinds.is_integer(kind) and (declared[name] == 'ClassLabel' or name in LABELS)
    ]
    label = _choose(classes, LABELS, title) if classes else ''
    texts = [name for name, kind in types.items() if _is_text(kind)]
    for name in LABELS if not classes else ():
        is_unread = name in types and (name == 'label' or name not in texts)
        if is_unread and not kinds.is_nested(types[name]):
            raise UserError(
                f'{title}: its column {name!r} has type {types[name]}, but classes are integers; '
                'cast or rename it'
            )
    names = (features.get(label) or {}).get('names') or ()
    fields = tuple(name for name in texts if name not in ('image', 'label'))
    return Columns(image, label, fields, tuple(map(str, names)))


def _choose(candidates: list[str], usual: tuple[str, ...], title: str) -> str:
    """Choose the only candidate, or the first usual name; UserError if that is ambiguous."""
    named = [name for name in usual if name in candidates]
    if not named and len(candidates) > 1:
        raise UserError(
            f'{title}: any of its columns {_quote(candidates)} may be the {usual[0]}; rename one '
            f'to {usual[0]!r}, or remove the others'
        )
    return (named or candidates)[0]


def _holds_files(kind: Any) -> bool:
    """Return whether values of an Arrow type may be image files, or structs with their bytes."""
    import pyarrow.types as kinds

    if kinds.is_struct(kind):
        position = kind.get_field_index('bytes')
        return position >= 0 and (
            _holds_files(kind.field(position).type) or kinds.is_null(kind.field(position).type)
        )
    return kinds.is_binary(kind) or kinds.is_large_binary(kind) or kinds.is_binary_view(kind)


def _is_text(kind: Any) -> bool:
    import pyarrow.types as kinds

    return kinds.is_string(kind) or kinds.is_large_string(kind) or kinds.is_string_view(kind)


def _quote(names: str | Iterable[str]) -> str:
    """Quote names, or a single one."""
    quoted = map(repr, filter(None, [names] if isinstance(names, str) else names))
    return one_line(', '.join(quoted))[:200] or 'none'


def _read_features(metadata: dict[bytes, bytes]) -> dict[str, Any]:
    try:
        return dict(paths.parse_json(metadata.get(b'huggingface', b'{}'))['info']['features'])
    except (ValueError, KeyError, TypeError):
        return {}


def _feature_type(feature: Any) -> str:
    return str(feature.get('_type', '')) if isinstance(feature, dict) else ''
