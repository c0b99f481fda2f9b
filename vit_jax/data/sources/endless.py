"""`endless`: sketches of many kinds in every class, of which no two images are equal.

Laws of the loss over model and data size need data that do not run out. Each class has
1,024 kinds of sketches, and most of them are rare, as in photographs: kind k of a class is drawn
with a frequency of k^-(1 + 1/difficulty). A model learns the frequent kinds soon, and ever rarer
ones with more data and more parameters.
"""

from __future__ import annotations

import bisect
import dataclasses
import functools
from typing import Any

import numpy as np

from vit_jax.data import listing
from vit_jax.data.records import (
    MOST_CLASSES,
    Listing,
    Record,
    SourceInfo,
    UnknownSplit,
    count_labels,
    example_rng,
)
from vit_jax.errors import UserError, nearest

SPLITS = ('train', 'val', 'test')
HELD_OUT = 10_000  # images of `val` and of `test`
KINDS = 1024  # kinds of sketches in a class
SIDE = 16  # height and width of an image, in pixels
MARGIN = 1  # largest shift of a sketch, in pixels
STROKES, POINTS = 3, 16  # strokes of a sketch, and points along each
CONTRAST = (0.6, 1.0)  # of the ink, from image to image
NOISE = 24.0  # standard deviation of a pixel, of 255


@dataclasses.dataclass(frozen=True)
class Options:
    """Options of the source, written as `endless:classes=64,difficulty=2`.

    Attributes:
      classes: Number of classes.
      difficulty: Weight of the rare kinds; 0 draws one kind per class.
      seed: Seed of sketches and images.
      examples: Images of `train`, which count as an epoch.
    """

    classes: int = 16
    difficulty: float = 1.0
    seed: int = 0
    examples: int = 10_000_000


class Source:
    """Images uint8 [16, 16, 1] of `train`, `val` (10,000) and `test` (10,000).

    Image i is a function of the seed, the split and i; its class is i modulo the number of classes.
    It shows one kind of its class, shifted by up to a pixel, with its own contrast and noise.
    """

    def __init__(self, path: str, split: str):
        self._options = options = parse_options(path)
        self._name = f'endless:{path}'.rstrip(':')
        if split not in SPLITS:
            raise UnknownSplit.from_splits(f'source {self._name}', split, SPLITS)
        self._split = split
        self._length = options.examples if split == 'train' else HELD_OUT
        self._key = options.seed * len(SPLITS) + SPLITS.index(split)
        self._shares = shares(options.difficulty).cumsum().tolist()
        names = tuple(f'class {label}' for label in range(options.classes))
        self.info = SourceInfo(options.classes, names)

    @functools.cached_property
    def _sketches(self) -> np.ndarray:
        return draw_sketches(self._options.classes, self._options.seed)

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, index: int, /) -> Record:
        if not 0 <= index < self._length:
            raise IndexError(index)
        label = index % self._options.classes
        rng = example_rng(self._key, index)
        kind, row, column, contrast = rng.random(4).tolist()
        y, x = (int(part * (2 * MARGIN + 1)) for part in (row, column))
        # The last share may be just below 1.
        number = min(bisect.bisect(self._shares, kind), KINDS - 1)
        ink = self._sketches[label, number, y : y + SIDE, x : x + SIDE]
        pixels = rng.standard_normal((SIDE, SIDE), np.float32)
        pixels *= NOISE
        pixels += ink * np.float32(CONTRAST[0] + contrast * (CONTRAST[1] - CONTRAST[0]))
        np.clip(pixels, 0, 255, pixels)
        return {'image': pixels.astype(np.uint8)[..., None], 'label': label}

    def labels(self) -> np.ndarray:
        return np.arange(self._length) % self._options.classes

    def class_counts(self, indices: np.ndarray, /) -> np.ndarray:
        return count_labels(indices % self._options.classes, self._options.classes)

    def listing(self, indices: np.ndarray, /) -> Listing:
        """Digest the options; the images follow from them."""
        del indices
        return Listing(listing.digest_of(list(map(str, dataclasses.astuple(self._options)))))

    def record_name(self, index: int, /) -> str:
        return f'{self._name} {self._split} record {index}'


def parse_options(path: str) -> Options:
    """Parse the options of a source's name, such as 'classes=64,difficulty=2'.

    Raises:
      UserError: for an unknown option, or a value out of range.
    """
    kinds: dict[str, Any] = {f.name: type(f.default) for f in dataclasses.fields(Options)}
    values: dict[str, Any] = {}
    for text in path.split(',') if path else ():
        name, _, value = text.partition('=')
        if name not in kinds:
            raise UserError(f"source 'endless:{path}': " + nearest('option', name, kinds))
        try:
            values[name] = kinds[name](value)
        except ValueError:
            raise UserError(
                f"source 'endless:{path}': {name} needs a number, such as "
                f"'endless:{name}={getattr(Options, name)}'"
            ) from None
    ranges = {
        'classes': (2, MOST_CLASSES // KINDS),
        'difficulty': (0, 100),
        'seed': (0, 2**32),
        'examples': (1, 2**31 - 1),
    }
    for name, number in values.items():
        low, high = ranges[name]
        if not low <= number <= high:
            raise UserError(f"source 'endless:{path}': {name} must be in {low}..{high}")
    return Options(**values)


def shares(difficulty: float) -> np.ndarray:
    """Share of the images of a class that show each kind, float64 [KINDS]."""
    rank = np.arange(1, KINDS + 1)
    weight = rank ** -(1 + 1 / difficulty) if difficulty else (rank == 1) * 1.0
    return weight / weight.sum()


@functools.lru_cache(maxsize=4)
def draw_sketches(classes: int, seed: int) -> np.ndarray:
    """Draw every kind of every class, ink uint8 [classes KINDS side side] with a margin."""
    side = SIDE + 2 * MARGIN
    sketches = np.empty((classes, KINDS, side, side), np.uint8)
    for label in range(classes):
        rng = np.random.default_rng((seed, label))
        sketches[label] = _draw_strokes(rng.uniform(2, side - 3, (KINDS, STROKES, 3, 2)), side)
    sketches.flags.writeable = False
    return sketches


def _draw_strokes(corners: np.ndarray, side: int) -> np.ndarray:
    """Draw curves given by three points each [n strokes 3 2], ink uint8 [n side side]."""
    t = np.linspace(0, 1, POINTS)[:, None]
    start, turn, end = (corners[:, :, None, k] for k in range(3))
    points = (1 - t) ** 2 * start + 2 * t * (1 - t) * turn + t**2 * end  # [n strokes POINTS 2]
    points = points.reshape(len(corners), -1, 2)
    cells = points.astype(int)
    part = points - cells
    ink = np.zeros(len(corners) * side**2)
    first = np.arange(len(corners))[:, None] * side**2
    for down, right in np.ndindex(2, 2):
        weight = np.abs(1 - down - part[..., 0]) * np.abs(1 - right - part[..., 1])
        pixel_index = first + (cells[..., 0] + down) * side + cells[..., 1] + right
        ink += np.bincount(pixel_index.ravel(), weight.ravel(), minlength=len(ink))
    return np.rint(255 * (1 - np.exp(-2 * ink))).astype(np.uint8).reshape(-1, side, side)
