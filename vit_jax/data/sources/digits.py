"""`digits`: 1,797 handwritten digits of 8 x 8 pixels, bundled with scikit-learn."""

from __future__ import annotations

import functools
import importlib.util
import pathlib

import numpy as np

from vit_jax.data.records import Record, SourceInfo, UnknownSplit
from vit_jax.errors import UserError


class Source:
    """`train` (1,437 images) or `test` (360).

    The test split takes every fifth image of the data sorted by class, so that both
    splits have the classes in equal shares. Images are uint8 [8, 8, 1]; the original's
    0..16 becomes 0..255.
    """

    def __init__(self, path: str, split: str):
        if path:
            raise UserError(f"source 'digits:{path}': digits takes no path; write 'digits'")
        if split not in ('train', 'test'):
            raise UnknownSplit.of('source digits', split, ['train', 'test'])
        self._split = split
        images, labels = _load()
        by_class = np.argsort(labels, kind='stable')
        is_test = np.zeros(len(labels), bool)
        is_test[by_class[::5]] = True
        self._original = np.flatnonzero(is_test if split == 'test' else ~is_test)
        self._images = images[self._original]
        self._images.flags.writeable = False  # records are views
        self._labels = labels[self._original]
        self.info = SourceInfo(10, tuple('0123456789'))

    def __len__(self) -> int:
        return len(self._labels)

    def __getitem__(self, index: int, /) -> Record:
        return {'image': self._images[index], 'label': int(self._labels[index])}

    def labels(self) -> np.ndarray:
        return self._labels

    def record_name(self, index: int, /) -> str:
        return f'digits {self._split} record {index} (scikit-learn: {self._original[index]})'


@functools.cache
def _load() -> tuple[np.ndarray, np.ndarray]:
    """Images and labels, read without scikit-learn itself, which takes seconds to import."""
    found = importlib.util.find_spec('sklearn')
    if found is None or not found.submodule_search_locations:
        raise UserError('source digits needs scikit-learn: pip install scikit-learn')
    file = pathlib.Path(found.submodule_search_locations[0], 'datasets', 'data', 'digits.csv.gz')
    try:
        rows = np.loadtxt(file, np.int64, delimiter=',')
    except OSError as error:
        raise UserError(
            f'source digits: no digits in this scikit-learn ({error}); reinstall it'
        ) from error
    images = np.round(rows[:, :-1].reshape(-1, 8, 8, 1) * (255 / 16)).astype(np.uint8)
    return images, rows[:, -1]
