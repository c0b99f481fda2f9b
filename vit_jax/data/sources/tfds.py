"""`tfds:NAME[/CONFIG][:VERSION]`: data prepared by TensorFlow Datasets, read without TensorFlow.

Random access needs the ArrayRecord format. Data are looked for in $TFDS_DATA_DIR, or in
~/tensorflow_datasets where that is not set.
"""

from __future__ import annotations

import os
import pathlib
import re
from typing import Any

import numpy as np

from vit_jax.data import images
from vit_jax.data.records import BrokenRecord, Record, SourceInfo
from vit_jax.errors import UserError, nearest

NAME = re.compile(r'(?P<dataset>\w+)(/(?P<config>[\w.-]+))?(:(?P<version>\d+\.\d+\.\d+))?')
PREPARE = 'tfds build {} --file_format=array_record'


class Source:
    """One split of a prepared data set that has the features `image` and `label`.

    Images are decoded to as many channels as the data set declares (RGB where it leaves
    that open); other features are not read.
    """

    def __init__(self, path: str, split: str):
        import tensorflow_datasets as tfds

        self._title = f'tfds:{path}'
        builder = tfds.builder_from_directory(find(path))
        splits = builder.info.splits
        if split not in splits:
            raise UserError(f'source {self._title}: ' + nearest('split', split, splits))
        if builder.info.file_format.value != 'array_record':
            raise UserError(
                f'source {self._title}: stored as {builder.info.file_format.value}, which has no '
                f"random access; prepare it once more (with TensorFlow): '{_prepare(path)}'"
            )
        features = builder.info.features
        for key in ('image', 'label'):
            if key not in features:
                raise UserError(
                    f'source {self._title}: no feature {key!r} (it has {", ".join(features)})'
                )
        if not getattr(features['label'], 'num_classes', None):
            raise UserError(f"source {self._title}: the feature 'label' declares no classes")
        self.info = SourceInfo(features['label'].num_classes, tuple(features['label'].names))
        self._channels = features['image'].shape[-1] or 3
        self._split = split
        self._records = builder.as_data_source(
            split, decoders={'image': tfds.decode.SkipDecoding()}
        )

    def __len__(self) -> int:
        return len(self._records)

    def __getitem__(self, index: int, /) -> Record:
        record = self._read(index)
        name = self.record_name(index)
        image = images.decode(record['image'], name=name, channels=self._channels)
        return {'image': image, 'label': int(record['label'])}

    def labels(self) -> np.ndarray:
        return np.array([self._read(i)['label'] for i in range(len(self))], np.int64)

    def record_name(self, index: int, /) -> str:
        return f'{self._title} {self._split} record {index}'

    def _read(self, index: int) -> dict[str, Any]:
        try:
            return self._records[index]
        except Exception as error:  # the readers raise many kinds, none of them documented
            raise BrokenRecord(f'{self.record_name(index)}: {error}') from error


def data_dir() -> pathlib.Path:
    """The folder that holds prepared data sets."""
    return pathlib.Path(os.environ.get('TFDS_DATA_DIR') or '~/tensorflow_datasets').expanduser()


def find(name: str) -> pathlib.Path:
    """The folder of a prepared data set, in its newest version unless `name` has one.

    Raises:
      UserError: if it is not there, or has several configs and `name` takes none.
    """
    match = NAME.fullmatch(name)
    if match is None:
        raise UserError(f'source tfds:{name}: write tfds:NAME, tfds:NAME/CONFIG or tfds:NAME:1.0.0')
    root = data_dir()
    folder = root / match['dataset'] / (match['config'] or '')
    if not folder.is_dir():
        raise UserError(_not_found(match, root))
    versions = _versions(folder)
    if match['version']:
        if match['version'] not in versions:
            raise UserError(
                f'source tfds:{name}: ' + nearest('version', match['version'], versions)
            )
        return folder / match['version']
    if versions:
        return folder / max(versions, key=lambda v: tuple(map(int, v.split('.'))))
    configs = [child.name for child in _folders(folder) if _versions(child)]
    if not configs:
        raise UserError(_not_found(match, root))
    raise UserError(
        f'source tfds:{name}: choose a config: '
        + ', '.join(f'tfds:{match["dataset"]}/{config}' for config in sorted(configs))
    )


def _versions(folder: pathlib.Path) -> list[str]:
    return [child.parent.name for child in folder.glob('*.*.*/features.json')]


def _folders(folder: pathlib.Path) -> list[pathlib.Path]:
    return [child for child in folder.iterdir() if child.is_dir()] if folder.is_dir() else []


def _not_found(match: re.Match[str], root: pathlib.Path) -> str:
    prepared = [child.name for child in _folders(root)]
    known = nearest('data set', match['dataset'], prepared) if prepared else 'it is not prepared'
    if match['dataset'] in prepared:
        configs = [child.name for child in _folders(root / match['dataset'])]
        known = nearest('config', match['config'] or '', configs)
    return (
        f'source tfds:{match[0]}: {known}; not in {root}: set TFDS_DATA_DIR, or prepare it '
        f"(with TensorFlow): '{_prepare(match[0])}'"
    )


def _prepare(name: str) -> str:
    return PREPARE.format(name)
