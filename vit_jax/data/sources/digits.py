"""`digits`: 1,797 handwritten digits of 8 x 8 pixels, bundled with scikit-learn.

`digits:6-32` stretches each image to a random height and width of 6 to 32 pixels.
"""

from __future__ import annotations

import functools
import importlib.util
import pathlib

import numpy as np

from vit_jax.data import listing
from vit_jax.data.records import Listing, Record, SourceInfo, UnknownSplit, count_labels
from vit_jax.data.transforms import geometry
from vit_jax.errors import UserError


class Source:
    """`train` (1,437 images) or `test` (360).

    The test split takes every fifth image of the data sorted by class, so that both
    splits have equal class shares. Images are uint8 [8, 8, 1], scaled from 0..16 to
    0..255. Stretched images are [H, W, 1], functions of only their index.
    """

    def __init__(self, path: str, split: str):
        self._sides = _parse_sides(path) if path else None
        if split not in ('train', 'test'):
            raise UnknownSplit.from_splits('source digits', split, ['train', 'test'])
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
        record = {'image': self._images[index], 'label': int(self._labels[index])}
        if self._sides is None:
            return record
        rng = np.random.default_rng(int(self._original[index]))
        low, high = self._sides
        height, width = rng.integers(low, high + 1, 2).tolist()
        return geometry.resize(record, height, width)

    def labels(self) -> np.ndarray:
        return self._labels

    def class_counts(self, indices: np.ndarray, /) -> np.ndarray:
        return count_labels(self._labels[indices], self.info.num_classes)

    def listing(self, indices: np.ndarray, /) -> Listing:
        images = listing.digest_of(self._images[indices])
        return Listing(listing.digest_of(self._labels[indices]), images)

    def record_name(self, index: int, /) -> str:
        return f'digits {self._split} record {index} (scikit-learn: {self._original[index]})'


def _parse_sides(path: str) -> tuple[int, int]:
    """Parse the smallest and largest side in pixels from a path such as '6-32'."""
    low, _, high = path.partition('-')
    if not (low.isdecimal() and high.isdecimal() and 0 < int(low) <= int(high)):
        raise UserError(
            f"source 'digits:{path}': digits accepts only sides in pixels; write 'digits', or "
            "'digits:6-32' for images of mixed sizes"
        )
    return int(low), int(high)


@functools.cache
def _load() -> tuple[np.ndarray, np.ndarray]:
    """Read images and labels without importing scikit-learn, which takes seconds."""
    spec = importlib.util.find_spec('sklearn')
    if spec is None or not spec.submodule_search_locations:
        raise UserError('source digits needs scikit-learn: pip install scikit-learn')
    file = pathlib.Path(spec.submodule_search_locations[0], 'datasets', 'data', 'digits.csv.gz')
    try:
        rows = np.loadtxt(file, np.int64, delimiter=',')
    except OSError as error:
        raise UserError(
            f'source digits: scikit-learn lacks the digits ({error}); reinstall it'
        ) from error
    images = np.round(rows[:, :-1].reshape(-1, 8, 8, 1) * (255 / 16)).astype(np.uint8)
    return images, rows[:, -1]
