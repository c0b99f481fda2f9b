"""`helpers.two_towers.source:`: colored shapes on noise, with captions such as 'a red square'."""

import itertools

import numpy as np

from vit_jax.data.records import SourceInfo

SIZES = {'train': 256, 'test': 40}
COLORS = {'red': (255, 0, 0), 'green': (0, 255, 0), 'blue': (0, 0, 255), 'white': (255,) * 3}
Y, X = np.mgrid[-3:4, -3:4]
SHAPES = {'square': abs(X) < 9, 'disk': X**2 + Y**2 < 10, 'cross': abs(X * Y) < 1}
KINDS = tuple(itertools.product(COLORS, SHAPES))


class Source:
    """Records {image, label, caption}; record i is a function of the split and i."""

    info = SourceInfo(len(KINDS), tuple(map(' '.join, KINDS)))

    def __init__(self, path, split):
        self._split = split

    def __len__(self):
        return SIZES[self._split]

    def __getitem__(self, index, /):
        rng = np.random.default_rng((len(self), index))
        image = rng.integers(40, 120, (16, 16, 3), np.uint8)
        color, shape = KINDS[index % len(KINDS)]
        y, x = rng.integers(16 - len(Y), size=2)
        image[y : y + len(Y), x : x + len(X)][SHAPES[shape]] = COLORS[color]
        return {'image': image, 'label': index % len(KINDS), 'caption': f'a {color} {shape}'}

    def labels(self):
        return np.arange(len(self)) % len(KINDS)

    def record_name(self, index, /):
        return f'shapes {self._split} record {index}'
