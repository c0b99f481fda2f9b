"""`tfds:NAME[/CONFIG][:VERSION]`: data prepared by TensorFlow Datasets, read without TensorFlow.

Random access needs the ArrayRecord format. Data are read from $TFDS_DATA_DIR, which may be in
object storage (gs://BUCKET/tfds), by default ~/tensorflow_datasets. Data are untrusted, but TFDS
imports the classes that they name. They may therefore name only classes of TFDS, and of modules
that the user's code has already imported.
"""

from __future__ import annotations

import contextlib
import functools
import os
import pathlib
import re
import sys
import tempfile
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np

from vit_jax.data import images, listing, remote
from vit_jax.data.records import BrokenRecord, Listing, Record, SourceInfo, UnknownSplit
from vit_jax.errors import UserError, nearest
from vit_jax.storage import paths, ranges

VERSION = re.compile(r'\d+\.\d+\.\d+')
NAME = re.compile(rf'(?P<dataset>\w+)(/(?P<config>[\w.-]+))?(:(?P<version>{VERSION.pattern}))?')
CHUNK = 1024  # records read at once, which is several times as fast
FEATURES = 'tensorflow_datasets.core.features.'
CLASS_KEYS = {  # TFDS reads both spellings of protocol buffers, and an older form of features
    'features.json': ('pythonClassName', 'python_class_name', 'type'),
    'dataset_info.json': ('pythonClassName', 'python_class_name'),
}


class Source:
    """One split of a prepared data set of images with labels, or of pairs of sentences.

    Images with labels have the features `image` and `label`: images are gray, [H, W, 1], if the
    data set declares one channel, else RGB; other features are ignored. `imagenet2012_real` has
    `original_label` instead of `label`, and `real_label`, bool [C], the reassessed classes (Beyer
    et al., 2020, arXiv:2006.07159). Pairs of sentences have exactly one text per language: the
    first of the data set's supervised keys, or of its features, is `source`, the other `target`.
    """

    def __init__(self, path: str, split: str):
        import tensorflow_datasets as tfds

        self._title, self._opened_as = f'tfds:{path}', (path, split)
        with paths.reaching(data_dir()):
            folder = find_prepared(path)
        self._bucket = ranges.Folder(folder) if paths.is_remote(folder) else None
        with local_copy(self._bucket, folder) as local:
            require_known_features(local, self._title)
            builder = _open_builder(tfds, local, self._title)
            self._read_split(tfds, builder, split, folder, local)

    def _read_split(
        self, tfds: Any, builder: Any, split: str, folder: paths.Path, local: pathlib.Path
    ) -> None:
        splits = builder.info.splits
        if split not in splits:
            raise UnknownSplit.from_splits(f'source {self._title}', split, splits)
        for file in map(str, splits[split].filepaths):
            if not paths.stays_inside(file.removeprefix(f'{local}/')):
                raise UserError(f'source {self._title}: lists {file!r}, outside of {folder}')
        self._split, self._label, self._folder = split, 'label', folder
        names = [file.name for file in splits[split].filepaths]
        self._shards = dict(zip(names, splits[split].shard_lengths, strict=True))
        self._pair = _find_languages(tfds, builder.info)
        decoders: dict[str, Any] = {}
        if self._pair:
            self.info = SourceInfo(0, ())
        else:
            self.info = self._read_features(tfds, builder.info.features)
            decoders = {'image': tfds.decode.SkipDecoding()}
        try:
            self._records = builder.as_data_source(split, decoders=decoders)
        except NotImplementedError as error:
            raise UserError(
                f'source {self._title}: stored as {builder.info.file_format.value}, which has no '
                "random access; convert it (with TensorFlow) by 'tfds convert_format "
                f"--dataset_version_dir={folder} --out_file_format=array_record'"
            ) from error
        if self._bucket:
            names = [file.name for info in splits.values() for file in info.filepaths]
            self._bucket.keep([name for name in names if name in self._bucket.files])
            records = remote.Records(self._bucket, self._shards, f'source {self._title}')
            self._records.data_source = records

    def __reduce_ex__(self, protocol: Any) -> Any:
        # TFDS opens the folder again for each copy, but a bucket's temporary folder is gone.
        if self._bucket:
            return type(self), self._opened_as
        return super().__reduce_ex__(protocol)

    def expect(self, indices: Iterable[int]) -> None:
        """Start reading examples from a bucket."""
        if self._bucket:
            self._records.data_source.expect(indices)

    def _read_features(self, tfds: Any, features: Any) -> SourceInfo:
        if 'label' not in features and 'original_label' in features:
            self._label = 'original_label'
        kinds = {'image': tfds.features.Image, self._label: tfds.features.ClassLabel}
        for key, kind in kinds.items():
            if key not in features or not isinstance(features[key], kind):
                raise UserError(
                    f'source {self._title}: has no {key!r} of type {kind.__name__}; its features '
                    f'are {", ".join(features)}'
                )
        self._channels = 1 if features['image'].shape[-1] == 1 else 3
        self._has_real = 'real_label' in features
        return SourceInfo(features[self._label].num_classes, tuple(features[self._label].names))

    def __len__(self) -> int:
        return len(self._records)

    def __getitem__(self, index: int, /) -> Record:
        return images.decode_record(self.encoded(index), self.record_name(index))

    def encoded(self, index: int, /) -> Record:
        record = self._read(index)
        if self._pair:
            return _decode_sentences(record, self._pair, self.record_name(index))
        encoded: Record = {'image': record['image'], 'label': int(record[self._label])}
        if self._has_real:
            encoded['real_label'] = self._real_labels(record)
        return encoded | ({'channels': 1} if self._channels == 1 else {})

    def _real_labels(self, record: dict[str, Any]) -> np.ndarray:
        return np.isin(np.arange(self.info.num_classes), record['real_label'])

    def labels(self) -> np.ndarray:
        if self._pair:
            raise UserError(f'source {self._title}: pairs of sentences have no classes')
        return self._labels

    @functools.cached_property
    def _labels(self) -> np.ndarray:
        chunks = [range(i, min(i + CHUNK, len(self))) for i in range(0, len(self), CHUNK)]
        records = (record for chunk in chunks for record in self._records.__getitems__(chunk))
        return np.fromiter((record[self._label] for record in records), np.int64, len(self))

    def listing(self, indices: np.ndarray, /) -> Listing:
        """Digest whole shards: names and record counts; sizes, and tags in a bucket."""
        shards = listing.digest_of(f'{name} {count}' for name, count in self._shards.items())
        if self._bucket:
            files = self._bucket.files
            return Listing(shards, listing.digest_of(str(files[name]) for name in self._shards))
        folder = pathlib.Path(self._folder)
        return Listing(shards, listing.digest_of_sizes(folder, list(self._shards)))

    def record_name(self, index: int, /) -> str:
        return f'{self._title} {self._split} record {index}'

    def _read(self, index: int) -> dict[str, Any]:
        try:
            return self._records[index]
        except UserError:
            raise
        except Exception as error:  # the readers raise several undocumented types
            raise BrokenRecord(f'{self.record_name(index)}: {error}') from error


@contextlib.contextmanager
def local_copy(bucket: ranges.Folder | None, folder: paths.Path) -> Iterator[pathlib.Path]:
    """Yield the folder, or for a bucket a temporary folder with all files except shards."""
    if bucket is None:
        yield pathlib.Path(folder)
        return
    with tempfile.TemporaryDirectory() as name:
        for file, entry in bucket.files.items():
            if file.endswith(('.json', '.txt')):
                pathlib.Path(name, file).write_bytes(bucket.read(file, 0, entry.size))
        yield pathlib.Path(name)


def require_known_features(folder: pathlib.Path, title: str) -> None:
    """Refuse data for which TFDS would import code other than its own features.

    Raises:
      UserError: for such a class, or a file that cannot be read.
    """
    for name, keys in CLASS_KEYS.items():
        try:
            class_names = list(
                _find_strings(paths.parse_json(paths.read_bytes(folder / name)), keys)
            )
        except (OSError, ValueError) as error:
            raise UserError(f'source {title}: cannot read {folder / name}: {error}') from error
        for class_name in class_names:
            module = class_name.rpartition('.')[0]
            if not class_name.startswith(FEATURES) and module and module not in sys.modules:
                raise UserError(
                    f'source {title}: {folder / name} names {class_name!r}, which is not part of '
                    f'TFDS; if you trust it, write a module that imports {module} and the Source '
                    'of vit_jax.data.sources.tfds, and use this module instead of tfds'
                )


def _find_strings(content: Any, keys: tuple[str, ...]) -> Iterator[str]:
    """Yield strings under these keys at any depth, also inside JSON strings of an older form."""
    if isinstance(content, list):
        for value in content:
            yield from _find_strings(value, keys)
    if isinstance(content, dict):
        for key, value in content.items():
            if not isinstance(value, str):
                yield from _find_strings(value, keys)
            elif key in keys:
                yield value
            elif key == 'content':
                with contextlib.suppress(ValueError):
                    yield from _find_strings(paths.parse_json(value), keys)


def _open_builder(tfds: Any, folder: pathlib.Path, title: str) -> Any:
    try:
        return tfds.builder_from_directory(folder)
    except Exception as error:  # TFDS raises several undocumented types
        reason = ' '.join(str(error).split())[:200]
        raise UserError(
            f'source {title}: {folder} cannot be read ({reason}); prepare it again'
        ) from error


def _find_languages(tfds: Any, info: Any) -> tuple[str, ...]:
    """Return the two languages of a translation data set; empty for other data sets."""
    texts = [k for k, kind in info.features.items() if isinstance(kind, tfds.features.Text)]
    if len(texts) != 2 or len(info.features) != 2:
        return ()
    return tuple(info.supervised_keys or texts)


def _decode_sentences(record: dict[str, Any], pair: tuple[str, ...], name: str) -> Record:
    try:
        source, target = (record[language].decode() for language in pair)
    except UnicodeDecodeError as error:
        raise BrokenRecord(f'{name}: not UTF-8 ({error.reason})') from error
    return {'source': source, 'target': target}


def data_dir() -> paths.Path:
    """Return the folder of prepared data sets."""
    return paths.path(os.environ.get('TFDS_DATA_DIR') or '~/tensorflow_datasets')


def find_prepared(name: str) -> paths.Path:
    """Find the folder of a prepared data set, in its newest version unless `name` has one.

    Raises:
      UserError: if it is missing, or has several configs and `name` has none.
    """
    match = NAME.fullmatch(name)
    if match is None:
        raise UserError(f'source tfds:{name}: write tfds:NAME, tfds:NAME/CONFIG or tfds:NAME:1.0.0')
    dataset = data_dir() / match['dataset']
    if not dataset.is_dir():
        raise UserError(
            f'source tfds:{name}: {_suggest_dataset(match["dataset"])}; {_how_to_prepare(name)}'
        )
    configs = [child.name for child in _folders(dataset) if _versions(child)]
    if match['config'] not in (None, *configs):
        raise UserError(
            f'source tfds:{name}: {nearest("config", match["config"], configs or ["none"])}; '
            f'{_how_to_prepare(name)}'
        )
    versions = _versions(dataset / (match['config'] or ''))
    if match['version'] and versions and match['version'] not in versions:
        raise UserError(f'source tfds:{name}: ' + nearest('version', match['version'], versions))
    if not versions and configs:
        choices = ', '.join(f'tfds:{match["dataset"]}/{config}' for config in sorted(configs))
        raise UserError(f'source tfds:{name}: choose a config: {choices}')
    if not versions:
        raise UserError(f'source tfds:{name}: {dataset} is incomplete; {_how_to_prepare(name)}')
    newest = max(versions, key=lambda version: [int(n) for n in version.split('.')])
    return dataset / (match['config'] or '') / (match['version'] or newest)


def _versions(folder: paths.Path) -> list[str]:
    """List the prepared versions, without remains such as `incomplete.A_1.0.0`."""
    names = [child.parent.name for child in folder.glob('*.*.*/features.json')]
    return [name for name in names if VERSION.fullmatch(name)]


def _folders(folder: paths.Path) -> list[paths.Path]:
    return [child for child in folder.iterdir() if child.is_dir()] if folder.is_dir() else []


def _suggest_dataset(dataset: str) -> str:
    prepared = [child.name for child in _folders(data_dir())]
    return nearest('data set', dataset, prepared) if prepared else 'no data set is prepared'


def _how_to_prepare(name: str) -> str:
    return (
        f'looked in {data_dir()}; set TFDS_DATA_DIR, or prepare it (with TensorFlow) by '
        f"'tfds build {name} --file_format=array_record'"
    )
