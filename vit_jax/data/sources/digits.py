"""`digits`: 1,797 handwritten digits of 8 x 8 pixels, bundled with scikit-learn."""

from __future__ import annotations

import functools

import numpy as np

from vit_jax.data.records import Record, SourceInfo
from vit_jax.errors import UserError, nearest


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
            raise UserError('source digits: ' + nearest('split', split, ['train', 'test']))
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
    try:
        from sklearn import datasets
    except ImportError as error:
        raise UserError(
            f'source digits needs scikit-learn ({error}); pip install scikit-learn'
        ) from error
    digits = datasets.load_digits()
    images = np.round(digits.images * (255 / 16)).astype(np.uint8)
    return images[..., None], digits.target.astype(np.int64)
