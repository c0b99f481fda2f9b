"""Images of mixed sizes, cut into patches; several images share a row."""

import dataclasses
import functools

import numpy as np

from vit_jax.data import batches
from vit_jax.data.batches import ArraySpec
from vit_jax.data.plans import base, fixed
from vit_jax.data.sources import digits
from vit_jax.data.transforms import geometry, transform


class Source(digits.Source):
    """Handwritten digits, each stretched to its own height and width."""

    def __getitem__(self, index, /):
        height, width = map(int, np.random.default_rng(index).integers(6, 33, 2))
        return geometry.resize(super().__getitem__(index), height, width)


@transform
def fit_patches(side, most):
    """Shrink the image to at most `most` whole patches, nearly keeping its aspect ratio."""

    def apply(record):
        height, width = record['image'].shape[:2]
        scale = min(1, (side**2 * most / (height * width)) ** 0.5) / side
        rows = min(most, max(1, int(height * scale)))
        columns = min(most // rows, max(1, int(width * scale)))
        return geometry.resize(record, rows * side, columns * side)

    return apply


def cut(image, side):
    """Cut an image [H W C] into patches [N P]; also return the row and column [N 2] of each."""
    grid = rows, columns = image.shape[0] // side, image.shape[1] // side
    patches = image.reshape(rows, side, columns, side, -1).swapaxes(1, 2)
    return patches.reshape(rows * columns, -1), np.indices(grid).reshape(2, -1).T


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class Plan(fixed.Plan):
    """Pack up to `most` consecutive images into rows of `length` patches of `side` pixels."""

    side: int
    length: int
    most: int

    unit = 'images'
    replaces_broken = False  # the next image may be larger

    @functools.cached_property
    def rows(self):
        """The images of each row [rows most]."""
        rows, free = [], 0
        for index in range(len(self.examples)):
            tokens = self.examples.read(index)['image'][:: self.side, :: self.side, 0].size
            if tokens > free or len(rows[-1]) == self.most:
                rows, free = [*rows, []], self.length
            rows[-1].append(index)
            free -= tokens
        return np.array([row + [base.NONE] * (self.most - len(row)) for row in rows])

    @functools.cached_property
    def specs(self):
        values = self.side**2 * self.example['image'].shape[2]
        shapes = {'places': (self.length, 2), 'segments': (self.length,), 'label': (self.most,)}
        spec = {name: ArraySpec(shape, np.dtype(np.int32)) for name, shape in shapes.items()}
        return ({**spec, 'patches': ArraySpec((self.length, values), np.dtype(np.uint8))},)

    def join(self, records, spec):
        patches, places = zip(*(cut(r['image'], self.side) for r in records), strict=True)
        segments = [np.full(len(one), number) for number, one in enumerate(patches, 1)]
        parts = {'patches': patches, 'places': places, 'segments': segments}
        row = {name: np.concatenate(part) for name, part in parts.items()}
        return batches.pad({**row, 'label': np.array([r['label'] for r in records])}, spec)
