"""`hf:PATH`: images of Hugging Face `datasets`, as Arrow or Parquet files on this machine.

    hf:/data/flowers            written by `save_to_disk`, or a download of the repository
    hf:ORG/NAME[/CONFIG]        the same in the caches of `huggingface_hub` and `datasets`

Splits are read from file names, such as `train-00000-of-00005.parquet`, or from folders.
Arrow files are mapped into memory. Parquet has no random access: its rows are copied to Arrow once,
in the user's cache folder.
"""

from __future__ import annotations

import contextlib
import functools
import os
import pathlib
import re
from collections.abc import Callable
from typing import Any

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
from vit_jax.runtime.console import progress
from vit_jax.storage import cache, paths

SUFFIXES = ('.parquet', '.arrow')
PART = re.compile(r'-\d+-of-\d+.*')
LABELS = ('label', 'labels', 'fine_label')
BATCH = 1000  # rows copied at a time


class Source:
    """Records of the first column of images, the class if any, and texts under their own names.

    The class is a column of `ClassLabel`, or of integers named `label`.
    """

    def __init__(self, path: str, split: str):
        self._title = f'source hf:{path}'
        root = find(path)
        splits = find_splits(root, self._title)
        if split not in splits:
            raise UnknownSplit.from_splits(self._title, split, splits)
        self._split, self._root = split, root
        self._listed = [str(file.relative_to(root)) for file in splits[split]]
        self._files = [random_access(file, self._title) for file in splits[split]]
        schema = self._batches[0].schema
        self._image, self._label, self._texts, names = columns(schema, self._title)
        if self._label and not names:
            names = tuple(map(str, range(int(self._read_labels().max()) + 1)))
        self.info = SourceInfo(len(names), names)

    @functools.cached_property
    def _batches(self) -> list[Any]:
        found = [batch for file in self._files for batch in open_arrow(file, self._title)]
        if not sum(batch.num_rows for batch in found):
            raise UserError(f'{self._title}: the split {self._split!r} has no rows')
        return found

    @functools.cached_property
    def _shard_index(self) -> ShardIndex:
        return ShardIndex(batch.num_rows for batch in self._batches)

    def __getstate__(self) -> dict[str, Any]:
        # A worker process maps the files itself; a copy of the batches would hold all their rows.
        return {k: v for k, v in self.__dict__.items() if k not in ('_batches', '_shard_index')}

    def __len__(self) -> int:
        return len(self._shard_index)

    def __getitem__(self, index: int, /) -> Record:
        return images.decoded(self.encoded(index), self.record_name(index))

    def encoded(self, index: int, /) -> Record:
        name, (number, row) = self.record_name(index), self._shard_index.locate(index)
        batch = self._batches[number]
        value = batch.column(self._image)[row].as_py()
        data = value.get('bytes') if isinstance(value, dict) else value
        if not data:
            raise BrokenRecord(f'{name}: {self._image!r} holds no bytes')
        record: Record = {'image': data}
        if self._label:
            record['label'] = batch.column(self._label)[row].as_py()
        return record | {text: batch.column(text)[row].as_py() or '' for text in self._texts}

    def labels(self) -> np.ndarray:
        if not self._label:
            raise UserError(f'{self._title}: has no column of classes')
        return self._read_labels()

    def _read_labels(self) -> np.ndarray:
        parts = [b.column(self._label).to_numpy(zero_copy_only=False) for b in self._batches]
        labels = np.concatenate(parts)
        if labels.dtype.kind != 'i':  # a missing one makes them floating-point numbers
            raise UserError(f'{self._title}: a row has no {self._label!r}')
        return labels.astype(np.int64)

    def class_counts(self, indices: np.ndarray, /) -> np.ndarray | None:
        with contextlib.suppress(UserError):  # a row without a class
            return count_labels(self.labels()[indices], self.info.num_classes)
        return None

    def listing(self, indices: np.ndarray, /) -> Listing:
        """Digests of whole files, and of the examples' classes."""
        labels = np.zeros(0, np.int64)
        with contextlib.suppress(UserError):  # a row without a class
            labels = self.labels()[indices]
        rows = np.array([batch.num_rows for batch in self._batches])
        return Listing(
            listing.digest_of(self._listed, rows, labels),
            listing.digest_of_sizes(self._root, self._listed),
        )

    def record_name(self, index: int, /) -> str:
        return f'{self._title.removeprefix("source ")} {self._split} row {index}'


def find(path: str) -> pathlib.Path:
    """The folder of a data set, here or in the caches of Hugging Face's libraries.

    Raises:
      UserError: if it is in neither.
    """
    local = pathlib.Path(path).expanduser()
    if local.is_dir():
        return local
    org, _, rest = path.partition('/')
    name, _, config = rest.partition('/')
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
        f'source hf:{path}: there is no such folder, and it is neither in {hub} nor in '
        f'{prepared}: download it by `hf download {org}/{name or "NAME"} --repo-type dataset`'
    )


def find_splits(root: pathlib.Path, title: str) -> dict[str, list[pathlib.Path]]:
    """The files of each split, sorted by name.

    Raises:
      UserError: if there are none, or they belong to several configs.
    """
    splits: dict[str, list[pathlib.Path]] = {}
    configs = set()
    for file in sorted(root.rglob('*')):
        inside = file.relative_to(root)
        hidden = any(part.startswith('.') for part in inside.parts)
        if file.suffix in SUFFIXES and not hidden and not file.name.startswith('cache-'):
            config, split = config_and_split(inside)
            configs.add(config)
            splits.setdefault(split, []).append(file)
    if len(configs) > 1:
        names = ', '.join(sorted(str(config) for config in configs))
        raise UserError(f'{title}: has several configs, {names}: name one as {title[7:]}/CONFIG')
    if not splits:
        raise UserError(f'{title}: {root} holds no file of {" or ".join(SUFFIXES)}')
    return splits


def config_and_split(file: pathlib.Path) -> tuple[pathlib.Path, str]:
    """The folder of a file's config, and the file's split."""
    stem, folder = PART.sub('', file.stem), file.parent
    if stem == 'data' or stem.isdigit():  # save_to_disk; the hub's own conversion to Parquet
        return (folder.parent, folder.name) if folder.name else (folder, 'train')
    if file.suffix == '.arrow':  # NAME-SPLIT.arrow of the cache of `datasets`
        stem = stem.rpartition('-')[2]
    return (folder.parent if folder.name == 'data' else folder), stem


def random_access(file: pathlib.Path, title: str) -> pathlib.Path:
    """The rows of a file as Arrow: the file itself, or a copy in the user's cache folder.

    Raises:
      UserError: if the file cannot be read, or the copy cannot be written.
    """
    try:
        paths.open_file(file).close()
    except OSError as error:
        raise UserError(f'{title}: {file} cannot be read: {error.strerror}') from error
    if file.suffix == '.arrow':
        return file
    target = cache.folder('arrow') / f'{cache.key([file])}.arrow'
    return cache.made_once(target, lambda path: copy_to_arrow(file, path, title))


def copy_to_arrow(file: pathlib.Path, target: pathlib.Path, title: str) -> None:
    """Write the rows of a Parquet file as a stream of Arrow.

    Raises:
      OSError: if they cannot be written.
      UserError: if the file is damaged.
    """
    import pyarrow as pa
    import pyarrow.parquet as pq

    def read(step: Callable[[], Any]) -> Any:
        try:
            return step()
        except (pa.ArrowException, OSError, EOFError) as error:
            raise UserError(f'{title}: {file} cannot be read: {_reason(error)}') from error

    with (
        read(lambda: pq.ParquetFile(file)) as rows,
        target.open('wb') as opened,
        pa.ipc.new_stream(opened, rows.schema_arrow) as stream,
        progress(f'copying {file.name} to Arrow', rows.metadata.num_rows) as advance,
    ):
        batches = rows.iter_batches(batch_size=BATCH)
        while (batch := read(lambda: next(batches, None))) is not None:
            stream.write(batch)
            advance(batch.num_rows)


def open_arrow(file: pathlib.Path, title: str) -> list[Any]:
    """The record batches of a file, mapped into memory.

    Raises:
      UserError: if it is damaged.
    """
    import pyarrow as pa

    try:
        return list(pa.ipc.open_stream(pa.memory_map(str(file))))
    except (pa.ArrowException, OSError) as error:
        raise UserError(f'{title}: {file} cannot be read: {_reason(error)}') from error


def columns(schema: Any, title: str) -> tuple[str, str, tuple[str, ...], tuple[str, ...]]:
    """Choose columns by the features that `datasets` stores, or else by their types.

    Returns:
      The names of the image, of the class or '', and of the texts; and the names of the classes.

    Raises:
      UserError: if there is no image.
    """
    import pyarrow.types as kinds

    features = _features(schema.metadata or {})
    found = {name: schema.field(name).type for name in schema.names}
    noted = {name: _kind(features.get(name)) for name in found}
    pictures = [n for n in found if noted[n] == 'Image'] or [
        n for n, kind in found.items() if kinds.is_struct(kind) or kinds.is_binary(kind)
    ]
    if not pictures:
        raise UserError(f'{title}: none of its columns is an image: {", ".join(found)}')
    classes = [n for n in found if noted[n] == 'ClassLabel'] or [
        n for n, kind in found.items() if n in LABELS and kinds.is_integer(kind)
    ]
    label = min(classes, key=lambda n: (n not in LABELS, classes.index(n)), default='')
    for name in LABELS:
        if name not in classes and name in found and kinds.is_floating(found[name]):
            raise UserError(
                f'{title}: its column {name!r} holds {found[name]}, but classes are integers: '
                'cast or rename it'
            )
    names = (features.get(label) or {}).get('names') or ()
    texts = tuple(n for n, kind in found.items() if kinds.is_string(kind) and n != label)
    return pictures[0], label, texts, tuple(map(str, names))


def _features(metadata: dict[bytes, bytes]) -> dict[str, Any]:
    try:
        return dict(paths.parse_json(metadata.get(b'huggingface', b'{}'))['info']['features'])
    except (ValueError, KeyError, TypeError):
        return {}


def _kind(feature: Any) -> str:
    return str(feature.get('_type', '')) if isinstance(feature, dict) else ''


def _reason(error: Exception) -> str:
    return ' '.join(str(error).split())[:200] or type(error).__name__
